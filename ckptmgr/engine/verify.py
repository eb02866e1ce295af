"""Verifying a step on disk: all of it is read, and all that is wrong is told.

Of a step of ours: the manifest; size and digest of every metadata file; that every chunk is in
exactly one receipt; presence and size of every data file; and every chunk, read through the
item's database as a restore reads it, against its digest. What cannot be relied on is not used:
the arrays of an item whose tree is damaged are not read, and those of a damaged receipt are read
without digests, both with a note.

What Orbax wrote has no digests: that it opens, and that every array can be read, is all there is.

Files that nothing of the step names are told as `unknown` and are no problem: no value depends on
them, and systems leave such files behind (`.nfs…`, an editor's). No device is touched and
nothing is written. What is not compared is said in `ckptmgr.engine.readback`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptmgr.core import layout, manifest
from ckptmgr.core.manifest import FormatError, Manifest
from ckptmgr.core.receipts import Receipt
from ckptmgr.engine import foreign, pagecache, presence, readback, steps
from ckptmgr.engine.catalog import Catalog
from ckptmgr.engine.readback import HOST_BYTES, PAGE_CACHE, STORAGE, Part, Progress
from ckptmgr.engine.steps import OpenItem
from ckptmgr.engine.store import Store
from ckptmgr.errors import Problem, StepNotFound, StoreError

NO_DIGESTS = "not verified: written by Orbax, which records no digests"

_OF_ANOTHER = (
    "does not fit the step: it is another save's, or the receipts and _CHECKPOINT_METADATA are"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification has shown.

    Attributes:
      step: the step's number; None where neither directory nor manifest says one.
      path: its directory.
      kind: as in `StepInfo`; "" where it is not known.
      problems: everything that is wrong, not only the first thing.
      nbytes: array bytes that were read and are right.
      notes: what was not checked, and why, and other things that are no damage.
      unknown: files that nothing of the step names, directories with a "/" at their end.
      source: "storage", or "page cache" where it is not known that the cache held none of it.
      attempt: the save that wrote it, "" where that is not known.
      leaf_digests: item -> dotted leaf -> digest of its values, where asked for.
    """

    step: int | None
    path: str
    kind: str = ""
    problems: tuple[Problem, ...] = ()
    nbytes: int = 0
    notes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    source: str = PAGE_CACHE
    attempt: str = ""
    leaf_digests: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether nothing was found wrong."""
        return not self.problems

    @property
    def verified(self) -> bool:
        """Whether every byte was compared with a digest and is right; never of Orbax's."""
        return self.good and self.attempt != ""


@dataclass(slots=True)
class _Findings:
    """What is known so far."""

    problems: dict[Problem, None] = field(default_factory=dict)  # each is told once
    notes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    nbytes: int = 0
    leaf_digests: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, problems: Iterable[Problem]) -> None:
        self.problems |= dict.fromkeys(problems)

    def compare(self, parts: Sequence[Part], how: _How) -> None:
        checked = readback.check_arrays(
            parts,
            host_bytes=how.host_bytes,
            leaf_digests=how.leaf_digests,
            progress=how.progress,
        )
        self.nbytes = checked.nbytes
        self.add(checked.problems)
        for part in parts:
            names = {i: leaf.dotted for i, leaf in enumerate(part.tree.leaves)}
            digests = checked.leaf_digests.get(part.name, {})
            if digests:
                self.leaf_digests[part.name] = {names[i]: text for i, text in digests.items()}


@dataclass(frozen=True, slots=True)
class _How:
    """How arrays are compared; see `verify`."""

    host_bytes: int
    leaf_digests: bool
    progress: Progress


def verify(
    path: str,
    step: int | None,
    *,
    known: Problem | None = None,
    is_foreign: bool = False,
    from_storage: bool = False,
    leaf_digests: bool = False,
    host_bytes: int = HOST_BYTES,
    progress: Progress | None = None,
) -> Verdict:
    """Verifies the step in the directory `path`; see above. Damage is told and not raised.

    Args:
      path: absolute.
      step: the number it must have; None: whatever its manifest says.
      known: what the catalog found wrong; the rest is looked at all the same.
      is_foreign: whether Orbax wrote it, its manager or its `Checkpointer`.
      from_storage: drop it from the page cache first.
      leaf_digests: take those of the values, and compare them where they were recorded.
      host_bytes: bound of the buffers of chunks under way; a chunk that needs more goes alone.
      progress: is told array bytes, done and in all, on this thread.
    """
    if known and not known.file:  # no step of anyone
        return Verdict(step, path, problems=(known,))
    found = _Findings()
    if known and known.file != layout.MANIFEST:  # which is read again
        found.add([known])
    evicted = False
    if from_storage:
        evicted, problems = pagecache.evict(path)
        found.add(problems)
        found.notes += [] if evicted else ["this machine's page cache may have answered"]
    how = _How(host_bytes, leaf_digests, progress or (lambda done, total: None))
    document: Manifest | None = None
    if is_foreign:
        look = foreign.look(path, step or 0)
        found.add(look.problems)
        found.compare(look.parts, how)
        found.notes += [*look.notes, NO_DIGESTS]
        kind = "foreign"
    else:
        document = _check_ours(found, path, step, how)
        kind = document.kind if document else ""
        step = document.step if document and step is None else step
    return Verdict(
        step,
        path,
        kind,
        tuple(found.problems),
        found.nbytes,
        tuple(found.notes),
        tuple(found.unknown),
        STORAGE if evicted else PAGE_CACHE,
        document.attempt if document else "",
        found.leaf_digests,
    )


def verify_entry(
    catalog: Catalog,
    step: int,
    *,
    from_storage: bool = False,
    leaf_digests: bool = False,
    progress: Progress | None = None,
) -> Verdict:
    """Verifies what lies under a step's name. Raises StepNotFound where nothing does."""
    while True:
        entry = catalog.entry(step)
        if entry is None:
            raise StepNotFound(f"step {step} of {catalog.store.root} was deleted", step)
        found = verify(
            catalog.store.path(layout.step_name(step)),
            step,
            known=entry.problem,
            is_foreign=entry.foreign,
            from_storage=from_storage,
            leaf_digests=leaf_digests,
            progress=progress,
        )
        if entry.suspect:
            found = replace(found, notes=(*found.notes, f"suspect: {entry.suspect}"))
        again = entry if found.good else catalog.entry(step)
        if again is not None and again.manifest == entry.manifest:
            if again.problem == entry.problem:
                return found


# -- ours -------------------------------------------------------------------------------------


def _check_ours(found: _Findings, path: str, step: int | None, how: _How) -> Manifest | None:
    store = Store(path)
    document, newer = _manifest(found, store, step)
    if newer:
        found.notes.append("nothing but its manifest was looked at")
        how.progress(0, 0)
        return None
    files = document.files if document is not None else {}
    if document is not None:
        kinds, texts = document.items, _checked(found, store, files)
    else:
        found.notes.append("without its manifest no metadata file could be compared")
        kinds, texts = presence.items(store)
    looked = {name: _item(found, store, name, kind, texts, files) for name, kind in kinds.items()}
    if document is not None:
        _check_manifest(found, store, document, texts, looked)
    parts = [part for item in looked.values() if (part := _part(found, item)) is not None]
    if document is not None:
        found.compare(parts, how)
    else:
        _compare_unproven(found, parts, how)
    return document


def _manifest(found: _Findings, store: Store, step: int | None) -> tuple[Manifest | None, bool]:
    """The manifest, None where it cannot be used; and whether a newer format is why."""
    try:
        text = store.read_file(layout.MANIFEST)
    except StoreError as exc:
        gone = isinstance(exc.__cause__, FileNotFoundError)
        why = presence.why_missing(store) if gone else str(exc)
        found.add([Problem(layout.MANIFEST, why, transient=not gone)])
        return None, False
    try:
        document = Manifest.from_json(text)
    except FormatError as exc:
        found.add([Problem(layout.MANIFEST, str(exc))])
        return None, _is_newer(text)
    if step is not None and document.step != step:
        why = f"it is the manifest of step {document.step}; rename the directory to that number"
        found.add([Problem(layout.MANIFEST, why)])
    return document, False


def _is_newer(text: bytes) -> bool:
    try:
        return int(json.loads(text)["body"]["format"]) > manifest.FORMAT
    except (ValueError, KeyError, TypeError):
        return False


def _checked(
    found: _Findings, store: Store, files: Mapping[str, tuple[int, str]]
) -> dict[str, bytes]:
    """The metadata files that are what the manifest says; what has another size is not read."""
    same = {}
    for name, (size, digest) in files.items():
        there = presence.size(store, name)
        if there is None or there == size:
            same[name] = (size, digest)
        else:
            found.add([Problem(name, f"has {there} bytes instead of {size}")])
    texts, problems = steps.checked_files(store, same)
    found.add(problems)
    bad = {problem.file for problem in problems}
    return {name: text for name, text in texts.items() if name not in bad}


@dataclass(frozen=True, slots=True)
class _Item:
    """What could be made of one item.

    Attributes:
      name: its name.
      opened: None where its own metadata is damaged.
      receipts: those that can be relied on.
      whole: whether that is all of them.
    """

    name: str
    opened: OpenItem | None
    receipts: Sequence[Receipt] = ()
    whole: bool = True


def _item(
    found: _Findings,
    store: Store,
    name: str,
    kind: str,
    texts: Mapping[str, bytes],
    files: Mapping[str, Any],
) -> _Item:
    needed = layout.tree_file(name) if kind == "tree" else layout.state_file(name, 0)
    lost = any(layout.is_receipt(file, name) for file in files.keys() - texts.keys())
    try:
        receipts = steps.receipts_of(name, texts)
        found.add(steps.data_problems(store, name, receipts))
        if needed in files.keys() - texts.keys():  # which is told already
            return _Item(name, None, receipts, not lost)
        opened = steps.open_item(store, name, kind, texts)
        if opened.tree is not None and opened.tree.has_arrays and not (receipts or lost):
            found.add([Problem(layout.receipt_file(name, 0), "missing")])
            lost = True
        if opened.tree is not None and not lost:
            found.add(steps.chunk_problems(opened, receipts))
            found.add(_wrong_sizes(opened, receipts))
    except _NONSENSE as exc:
        if needed not in texts and not files:
            found.add([Problem(needed, "missing")])
        else:
            found.add([Problem(name, str(exc) if isinstance(exc, FormatError) else _nonsense(exc))])
        return _Item(name, None, whole=False)
    return _Item(name, opened, receipts, not lost)


_NONSENSE = (ValueError, TypeError, KeyError, AttributeError, IndexError, ArithmeticError)
"""What parsing a document raises whose digest is not known, when it says something odd."""


def _nonsense(exc: Exception) -> str:
    return f"its metadata is not what it should be ({type(exc).__name__}: {exc})"


def _wrong_sizes(item: OpenItem, receipts: Sequence[Receipt]) -> list[Problem]:
    """Chunks of which a receipt has another size than the tree."""
    assert item.tree is not None
    problems = []
    leaves = item.tree.leaves
    for chunk in (chunk for receipt in receipts for chunk in receipt.chunks):
        if chunk.leaf >= len(leaves):
            continue  # told as one that does not belong to the array
        leaf = leaves[chunk.leaf]
        box = manifest.chunk_box(leaf, chunk.index)
        size = box.size * manifest.itemsize(leaf.stored_dtype)
        if size > 0 and chunk.nbytes != size:
            text = f"chunk {list(chunk.index)} has {size} bytes, its receipt says {chunk.nbytes}"
            problems.append(Problem(item.name, text, leaf.dotted))
    return problems


def _part(found: _Findings, item: _Item) -> Part | None:
    if item.opened is None:
        found.notes.append(f"{item.name}: not compared, since its own metadata is damaged")
        return None
    tree = item.opened.tree
    if tree is None:
        return None
    if not item.whole:
        text = "chunks of a damaged receipt were read and not compared"
        found.notes.append(f"{item.name}: {text}")
    known = item.opened.leaf_digests if item.whole else {}
    return Part(item.name, item.opened.path, tree, item.opened.digests, item.whole, known)


def _compare_unproven(found: _Findings, parts: Sequence[Part], how: _How) -> None:
    """Compares arrays by trees and receipts that nothing vouches for, which may say anything."""
    try:
        found.compare(parts, how)
    except Exception as exc:
        found.add([Problem("", f"its arrays could not be compared: {_nonsense(exc)}")])


def _check_manifest(
    found: _Findings,
    store: Store,
    document: Manifest,
    texts: Mapping[str, bytes],
    items: Mapping[str, _Item],
) -> None:
    """What the manifest says of the step as a whole, and files that it does not know."""
    signs = {  # files that no two saves have in common
        name
        for name in document.files
        if name == layout.CHECKPOINT_METADATA or any(layout.is_receipt(name, i) for i in items)
    }
    there = all(presence.size(store, name) is not None for name in signs)
    if len(signs) > 1 and there and not signs & texts.keys():
        found.add([Problem(layout.MANIFEST, _OF_ANOTHER)])
    opened = [item.opened for item in items.values() if item.opened is not None]
    if len(opened) == len(items):
        nbytes = sum(leaf.nbytes for item in opened if item.tree for leaf in item.tree.leaves)
        if nbytes != document.nbytes:
            text = f"says {document.nbytes} bytes of arrays, the trees say {nbytes}"
            found.add([Problem(layout.MANIFEST, text)])
    sizes = {name: size for name, (size, _) in document.files.items()}
    for item in items.values():
        for receipt in item.receipts:
            sizes |= {f"{item.name}/{name}": size for name, size in receipt.files.items()}
    found.add(presence.short(store, sizes))
    unsure = tuple(
        f"{item.name}/{layout.containers_prefix()}" for item in items.values() if not item.whole
    )
    found.unknown += [
        name for name in presence.unknown(store, sizes) if not name.startswith(unsure)
    ]
