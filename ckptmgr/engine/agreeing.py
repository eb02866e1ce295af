"""What the processes of a job compare: whether all save the same thing, and the same host values.

Only digests travel. Where they differ the few processes concerned are asked for more, so that the
error can name the process and the first leaf.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptmgr.core import manifest
from ckptmgr.core.manifest import StoredTree, leaf_to_json
from ckptmgr.engine.meeting import Coordinator, odd_ones
from ckptmgr.errors import PeerFailed

ASKED = 4
"""How many of the odd processes are asked what differs; the others are named all the same."""

DETAIL_BYTES = 2**20
"""Bound of what one process tells; what goes beyond is not looked at."""

Detail = list[list[str]]
"""(leaf, how it differs from others) in the order of the tree."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a process says it saves.

    Attributes:
      call: the step and how, as part of a sentence.
      trees: digest of the trees of all items.
    """

    call: str
    trees: str


def agree(
    coordinator: Coordinator,
    phase: str,
    claim: Claim,
    trees: Mapping[str, StoredTree],
    deadline_seconds: float,
    begin: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """What `begin` returned on process 0, where all processes save the same.

    Raises PeerFailed, on all, that names the odd ones and the first leaf that differs.
    """

    def answer(payloads: Sequence[bytes]) -> bytes:
        claims = [Claim(*json.loads(payload)) for payload in payloads]
        wrong = odd_ones(phase, [claim.call for claim in claims])
        if wrong is not None:
            raise wrong
        wrong = odd_ones(phase, [claim.trees for claim in claims])
        if wrong is not None:
            right = next(r for r in range(len(claims)) if r not in wrong.failures)
            return json.dumps({"differ": [right, *wrong.failures]}).encode()
        return json.dumps(begin()).encode()

    mine = json.dumps([claim.call, claim.trees]).encode()
    found: dict[str, Any] = json.loads(coordinator.exchange(phase, mine, deadline_seconds, answer))
    if "differ" in found:
        _tell_difference(
            coordinator,
            f"{phase}/trees",
            found["differ"],
            lambda: [part for name, tree in trees.items() for part in _tree_detail(name, tree)],
            _odd_tree,
            deadline_seconds,
        )
    return found


def compare_own(
    coordinator: Coordinator,
    phase: str,
    differ: Sequence[int],
    detail: Callable[[], Detail],
    deadline_seconds: float,
) -> None:
    """Raises PeerFailed that names the leaves of which `differ` have other values than process 0."""
    _tell_difference(coordinator, phase, [0, *differ], detail, _odd_values, deadline_seconds)


def odd_values(owns: Sequence[str]) -> list[int]:
    """The processes whose own host values are not those of process 0, which are saved."""
    return [rank for rank, own in enumerate(owns) if own != owns[0]]


def _tree_detail(item: str, tree: StoredTree) -> Detail:
    table = [manifest.digest(json.dumps(entry).encode())[:8] for entry in tree.shardings]
    found = []
    for leaf in tree.leaves:
        placed = "" if leaf.sharding is None else f" sharding {table[leaf.sharding]}"
        text = leaf.dtype + str(list(leaf.shape)) if leaf.has_array else leaf.kind
        rest = manifest.digest(json.dumps(leaf_to_json(leaf)).encode())[:8]
        found.append([f"{item}: {leaf.dotted}", f"{text}{placed} ({rest})"])
    return found


def _tell_difference(
    coordinator: Coordinator,
    phase: str,
    concerned: Sequence[int],
    detail: Callable[[], Detail],
    sentence: Callable[[dict[str, str], dict[str, str]], str],
    deadline_seconds: float,
) -> None:
    """`concerned`: the process that is taken to be right, and the odd ones."""
    right, *odd = concerned
    asked = odd[:ASKED]

    def answer(payloads: Sequence[bytes]) -> bytes:
        reference = _unpacked(payloads[right])
        failures = {}
        for rank in odd:
            text = "saves something else"
            if rank in asked:
                text = sentence(_unpacked(payloads[rank]), reference)
            failures[rank] = f"{text} than process {right}"
        raise PeerFailed(phase, failures, ())

    mine = _packed(detail()) if coordinator.rank in (right, *asked) else b""
    coordinator.exchange(phase, mine, deadline_seconds, answer)


def _odd_tree(odd: dict[str, str], reference: dict[str, str]) -> str:
    for leaf, text in reference.items():
        if leaf not in odd:
            return f"has no leaf {leaf!r} and so another tree"
        if odd[leaf] != text:
            return f"has leaf {leaf!r} as {odd[leaf]}, not {text}: another tree"
    more = next((leaf for leaf in odd if leaf not in reference), None)
    return f"has a leaf {more!r} and so another tree" if more else "has another tree"


def _odd_values(odd: dict[str, str], reference: dict[str, str]) -> str:
    leaves = sorted({leaf for leaf, text in reference.items() if odd.get(leaf) != text})
    shown = ", ".join(repr(leaf) for leaf in leaves[:5]) or "some leaf"
    more = f" and {len(leaves) - 5} more" if len(leaves) > 5 else ""
    return (
        f"has other values in {shown}{more} (what each process holds for itself must be the same "
        "everywhere, since one copy is saved; put what differs into an item with get_state())"
    )


def _packed(detail: Detail) -> bytes:
    while len(packed := zlib.compress(json.dumps(detail).encode())) > DETAIL_BYTES:
        detail = detail[: len(detail) // 2]
    return packed


def _unpacked(packed: bytes) -> dict[str, str]:
    """Leaf -> all that was told of it: of a leaf in several chunks each has its entry."""
    found: dict[str, list[str]] = {}
    for leaf, text in json.loads(zlib.decompress(packed)):
        found.setdefault(leaf, []).append(text)
    return {leaf: ", ".join(texts) for leaf, texts in found.items()}
