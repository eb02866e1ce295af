"""Opening one step of ours: its metadata, checked as a whole before any of it is used.

Works on a step's directory; no device is touched and no array data is read. Steps that Orbax
wrote are opened by `ckptmgr.engine.foreign`.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptmgr.core import layout, manifest, values
from ckptmgr.core.info import StepInfo
from ckptmgr.core.manifest import FormatError, Manifest, StoredTree
from ckptmgr.core.receipts import Receipt, leaf_digests, missing_chunks
from ckptmgr.engine.memory import no_collections
from ckptmgr.engine.reader import Digests
from ckptmgr.engine.store import Store
from ckptmgr.errors import CorruptCheckpoint, Problem, StoreError


@dataclass(frozen=True, slots=True)
class OpenItem:
    """One item of an open step.

    Attributes:
      name: its name.
      path: its absolute directory.
      tree: the stored tree, None for the state of an iterator and the like.
      states: where `tree` is None the decoded state of each process that saved it.
      digests: (leaf, chunk index) -> xxh3-128, as recorded.
      receipts: what each process wrote of it.
      unreadable: why nothing of a foreign item can be read, else "".
    """

    name: str
    path: str
    tree: StoredTree | None
    states: tuple[Any, ...] = ()
    digests: Digests = field(default_factory=dict)
    receipts: tuple[Receipt, ...] = ()
    unreadable: str = ""

    @property
    def leaf_digests(self) -> dict[int, str]:
        """Leaf -> its leaf digest, where those were recorded; worked out when asked for."""
        return {} if self.tree is None else leaf_digests(self.tree, self.receipts)


@dataclass(frozen=True, slots=True)
class OpenStep:
    """A step whose metadata is in memory and consistent."""

    info: StepInfo
    path: str
    items: Mapping[str, OpenItem]

    @property
    def is_single(self) -> bool:
        """Whether it holds one unnamed state rather than named items."""
        return set(self.items) == {layout.DEFAULT_ITEM}


def info_of(
    document: Manifest, suspect: str = "", verified: bool = False, pinned: bool = False
) -> StepInfo:
    """What a manifest says, and records about the step, for the user.

    A heartbeat counts as verified: it was read back before it was published.
    """
    return StepInfo(
        step=document.step,
        kind=document.kind,
        status="suspect" if suspect else "good",
        created=document.created,
        nbytes=document.nbytes,
        metrics=values.decode(document.metrics) or {},
        extra=values.decode(document.extra),
        pinned=pinned,
        verified=verified or document.kind == "heartbeat",
        stored_bytes=document.stored_bytes,
        stored_files=document.stored_files,
        topology=document.topology,
    )


@no_collections()
def open_step(path: str, step: int, document: Manifest) -> OpenStep:
    """Opens the step of ours in directory `path`; `document` is its manifest.

    Raises CorruptCheckpoint with every problem found in its metadata.
    """
    store = Store(path)
    texts, problems = checked_files(store, document.files)
    if problems:
        raise CorruptCheckpoint(step, problems)
    items = {}
    for name, kind in document.items.items():
        try:
            item = open_item(store, name, kind, texts)
        except FormatError as exc:
            problems.append(Problem(name, str(exc)))
            continue
        items[name] = item
        if item.tree is not None:
            problems += chunk_problems(item, item.receipts)
            problems += data_problems(store, name, item.receipts)
    if problems:
        raise CorruptCheckpoint(step, problems)
    plain = {
        f"{name}: {where}": label
        for name, item in items.items()
        if item.tree
        for where, label in item.tree.plain.items()
    }
    return OpenStep(replace(info_of(document), plain=plain), path, items)


def checked_files(
    store: Store, files: Mapping[str, tuple[int, str]]
) -> tuple[dict[str, bytes], list[Problem]]:
    """The metadata files that a manifest lists, each compared with its digest."""
    texts: dict[str, bytes] = {}
    problems = []
    for name, (size, digest) in files.items():
        try:
            text = store.read_file(name)
        except StoreError as exc:
            gone = isinstance(exc.__cause__, FileNotFoundError)
            problems.append(Problem(name, "missing" if gone else str(exc), transient=not gone))
            continue
        if len(text) != size:
            problems.append(Problem(name, f"has {len(text)} bytes instead of {size}"))
        elif manifest.digest(text) != digest:
            problems.append(Problem(name, "has other bytes than were written"))
        texts[name] = text
    return texts, problems


def open_item(store: Store, name: str, kind: str, texts: Mapping[str, bytes]) -> OpenItem:
    """One item out of its checked metadata files. Raises FormatError."""
    path = store.path(name)
    if kind == "state":
        found = map(texts.get, (layout.state_file(name, process) for process in itertools.count()))
        given = itertools.takewhile(lambda text: text is not None, found)
        states = tuple(values.decode(json.loads(text)) for text in given if text is not None)
        if not states:
            raise FormatError("its state is not in the manifest's list of files")
        return OpenItem(name, path, None, states)
    text = texts.get(layout.tree_file(name))
    if text is None:
        raise FormatError("its tree is not in the manifest's list of files")
    receipts = tuple(receipts_of(name, texts))
    digests = {
        (chunk.leaf, chunk.index): chunk.digest for receipt in receipts for chunk in receipt.chunks
    }
    tree = StoredTree.from_json(text)
    return OpenItem(name, path, tree, (), digests, receipts)


def receipts_of(item: str, texts: Mapping[str, bytes]) -> list[Receipt]:
    """What each process wrote of an item. Raises FormatError."""
    prefix = layout.receipt_file(item, 0).rpartition("/")[0] + "/"
    return [
        Receipt.from_json(text)
        for name, text in texts.items()
        if name.startswith(prefix) and layout.parse_receipt(name.removeprefix(prefix)) is not None
    ]


def chunk_problems(item: OpenItem, receipts: Sequence[Receipt]) -> list[Problem]:
    """Chunks that are not in exactly one receipt, of an item with a tree."""
    assert item.tree is not None
    problems = []
    for number, index, why in missing_chunks(item.tree, receipts):
        leaf = item.tree.leaves[number].dotted if number < len(item.tree.leaves) else ""
        problems.append(Problem(item.name, f"chunk {list(index)} {why}", leaf))
    return problems


def data_problems(store: Store, item: str, receipts: Sequence[Receipt]) -> list[Problem]:
    """Data files of an item that are missing or of another size than was written."""
    problems = []
    for receipt in receipts:
        for name, size in receipt.files.items():
            full = f"{item}/{name}"
            try:
                found = os.stat(store.path(full)).st_size
            except FileNotFoundError:
                problems.append(Problem(full, "missing"))
                continue
            if found != size:
                problems.append(Problem(full, f"has {found} bytes instead of {size}"))
    return problems
