"""How chunks are compressed: the choices as zarr codecs, where to look at values, and which choice
makes a save shorter.

Of a trained model's float32 weights "blosc_bitshuffle" leaves 0.86 and of bfloat16 0.75, fewer bytes
than the others and in less time: it puts the bits of the same place together first, and the
exponents of weights are alike, while their mantissas are not. Its lz4 left as few bytes as blosc's
zstd, at two to four times the speed. `benchmarks/compression.py` has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ckptmgr.core import manifest
from ckptmgr.core.boxes import Box
from ckptmgr.core.manifest import StoredLeaf

AUTO = "auto"

CODECS: dict[str, dict[str, Any]] = {
    "zstd": {"id": "zstd", "level": 1},
    "blosc": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0},
    "blosc_bitshuffle": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 2, "blocksize": 0},
}
"""The choices, as zarr 2 writes them down."""

BLOSC_BYTES = 2**31 - 1 - 16
"""blosc takes no larger buffer; such a chunk is stored as it is."""

_SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")

SAMPLES = 16
SAMPLE_BYTES = 2**19

WORTH = 0.1
"""Part of a save's time that a choice must win to be taken."""


def compressor(name: str | None, leaf: StoredLeaf) -> dict[str, Any] | None:
    """The `compressor` of a zarr 2 array."""
    if name is None or not _takes(name, leaf):
        return None
    return dict(CODECS[name])


def codecs(name: str | None, leaf: StoredLeaf) -> list[dict[str, Any]]:
    """What follows the bytes codec of a zarr 3 array."""
    if name is None or not _takes(name, leaf):
        return []
    known = dict(CODECS[name])
    kind = known.pop("id")
    if kind == "blosc":
        known["shuffle"] = _SHUFFLES[known["shuffle"]]
        known["typesize"] = manifest.itemsize(leaf.stored_dtype)
    return [{"name": kind, "configuration": known}]


def _takes(name: str, leaf: StoredLeaf) -> bool:
    nbytes = math.prod(leaf.chunk) * manifest.itemsize(leaf.stored_dtype)
    return CODECS[name]["id"] != "blosc" or nbytes <= BLOSC_BYTES


@dataclass(frozen=True, slots=True)
class Place:
    """A chunk to take samples from.

    Attributes:
      leaf: number of the leaf.
      box: the chunk.
      parts: where in it, each a number from 0 to below 1.
    """

    leaf: int
    box: Box
    parts: tuple[float, ...]


def places(leaves: Sequence[StoredLeaf], count: int = SAMPLES) -> list[Place]:
    """Where to take `count` samples that stand for equal numbers of bytes.

    All bytes lie in a line, by dtype and size of their leaf, which is cut into equal parts; the
    middle of each is a place. The order is such that the first few are spread, too.
    """
    line = sorted(
        (leaf.stored_dtype, leaf.nbytes, number)
        for number, leaf in enumerate(leaves)
        if leaf.nbytes
    )
    total = sum(nbytes for _, nbytes, _ in line)
    found: dict[tuple[int, Box], list[float]] = {}
    begin = at = 0
    for _, nbytes, number in line:
        while at < count and (middle := total * (2 * at + 1) // (2 * count)) < begin + nbytes:
            box, part = _chunk_at(leaves[number], (middle - begin) / nbytes)
            found.setdefault((number, box), []).append(part)
            at += 1
        begin += nbytes
    chunks = [Place(number, box, tuple(parts)) for (number, box), parts in found.items()]
    stride = next((s for s in (7, 5, 3) if math.gcd(s, len(chunks)) == 1), 1)
    return [chunks[i * stride % len(chunks)] for i in range(len(chunks))]


def _chunk_at(leaf: StoredLeaf, part: float) -> tuple[Box, float]:
    """The chunk at `part` of a leaf's chunks in C order, and what part of the chunk is before."""
    grid = [-(-n // c) for n, c in zip(leaf.stored_shape, leaf.chunk, strict=True)]
    inside, number = math.modf(part * math.prod(grid))
    rest = int(number)
    start: list[int] = []
    for size, chunk in zip(reversed(grid), reversed(leaf.chunk), strict=True):
        start.insert(0, rest % size * chunk)
        rest //= size
    stops = zip(start, leaf.chunk, leaf.stored_shape, strict=True)
    return Box(tuple(start), tuple(min(a + c, n) for a, c, n in stops)), inside


@dataclass(frozen=True, slots=True)
class Trial:
    """What a choice did with samples of the values.

    Attributes:
      ratio: bytes that remain, of one byte.
      rate: bytes of values that one core compresses a second.
      opening: seconds to open an array whose chunks are compressed.
    """

    name: str
    ratio: float
    rate: float
    opening: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """`name` as in `Storage.compression`, and why, as a sentence."""

    name: str | None
    reason: str


def seconds(
    save: float, nbytes: int, disk: float, trial: Trial, cores: int, small: int = 0
) -> float:
    """How long a save would take that took `save` seconds without compression.

    Of these the disk wrote for ``nbytes / disk``. Compressed it writes ``ratio * nbytes``, while
    the cores compress the chunks behind: this takes as long as the slower of the two. Whatever
    else the save did takes as long as before, as if nothing of it went on meanwhile; and small
    leaves, which need not be opened without compression, are opened besides.

    Args:
      save: seconds from the call of the save until the step was durable.
      nbytes: what this process wrote.
      disk: bytes that it can write a second, made durable.
      trial: what is tried.
      cores: that compress at a time.
      small: number of such leaves.
    """
    disk = max(disk, nbytes / save)  # so fast it was
    writing = max(trial.ratio * nbytes / disk, nbytes / (trial.rate * cores))
    return save - nbytes / disk + writing + small * trial.opening


def choose(
    save: float, nbytes: int, disk: float, trials: Iterable[Trial], cores: int, small: int = 0
) -> Choice:
    """The choice whose saves are the shortest by `seconds`; none where it wins less than `WORTH`.

    Restores are no part of it: from a slow disk they gain as saves do, but from the page cache or a
    fast disk they take longer than without.
    """
    took = {trial: seconds(save, nbytes, disk, trial, cores, small) for trial in trials}
    best = min(took, key=lambda trial: took[trial])
    taken = took[best] <= (1 - WORTH) * save
    return Choice(
        best.name if taken else None,
        f"the disk writes {_rate(disk)}, {best.name} gives {best.ratio:.2f} of the bytes at "
        f"{_rate(best.rate * cores)}: saves of {took[best]:.3g} s instead of {save:.3g} s"
        + ("" if taken else f"; less than {WORTH:.0%} is not worth it"),
    )


def _rate(bytes_per_second: float) -> str:
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.1f} GB/s"
    return f"{bytes_per_second / 1e6:.3g} MB/s"
