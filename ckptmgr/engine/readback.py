"""Reading a step back from the storage device and comparing it with what was in memory.

Every file's pages are dropped from the page cache, and the kernel is asked page by page whether
they are gone. Then every metadata file is read, and every chunk through the item's database, the
way a restore reads it; all that is wrong is told, not only the first thing. `ckptmgr.engine.verify`
does the same with a step that is published, and drops nothing unless it is asked to.

What is not guaranteed. "storage" means that this machine's page cache did not have the bytes: a
cache further down (a disk's, a hypervisor's, a file server's, ZFS's own) may still have answered,
and directories and inodes are not dropped. Bytes that a restore does not read are not compared:
the padding of chunks, and the tree nodes of the single processes' databases. Nothing may write to
the step meanwhile.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from ckptmgr.core import boxes, manifest
from ckptmgr.core.boxes import Shape
from ckptmgr.core.leafdigest import ZERO, Sums, add, finish
from ckptmgr.core.manifest import StoredLeaf, StoredTree
from ckptmgr.core.plan import Unit
from ckptmgr.engine import leafdigest
from ckptmgr.engine.pagecache import evict
from ckptmgr.engine.reader import Asked, Digests, Opening, Reader
from ckptmgr.engine.store import Store
from ckptmgr.errors import CorruptCheckpoint, Problem, StoreError

STORAGE = "storage"
PAGE_CACHE = "page cache"

BEGUN = 512
"""Chunks whose arrays are opened, and arrays whose metadata is looked at, together."""

LEAST_BYTES = 4096
"""What a chunk under way counts for at least."""

SMALL_BYTES = 2**20
"""Up to this size a chunk is compared where it is waited for."""

HOST_BYTES = 128 * 2**20
"""Bound of the buffers of chunks under way."""

Progress = Callable[[int, int], None]
"""Is told bytes that are done and bytes in all."""


@dataclass(frozen=True, slots=True)
class ReadBack:
    """What reading a step back has shown.

    Attributes:
      problems: everything that is wrong; of arrays with the item as `file`.
      nbytes: array bytes that were read and are right, without padding.
      source: "storage", or "page cache" where it is not known that the cache held none of it.
    """

    problems: tuple[Problem, ...]
    nbytes: int
    source: str


def read_back(
    path: str,
    items: Mapping[str, tuple[StoredTree, Digests]],
    files: Mapping[str, tuple[int, str]],
    *,
    complete: bool = True,
    below: Sequence[str] = ("",),
    host_bytes: int = HOST_BYTES,
) -> ReadBack:
    """Reads the step in the directory `path` and compares all of it.

    Args:
      path: absolute, of a step or of one under way.
      items: item -> its tree, and the digest of every chunk by leaf number and chunk index.
      files: metadata file, as path below the step -> its size and digest.
      complete: whether `items` names every chunk; else only those it names are read.
      below: what is dropped from the page cache first, as paths below the step.
      host_bytes: bound of the buffers of chunks under way; a chunk that needs more goes alone.
    """
    evicted, problems = evict(path, below)
    problems += _file_problems(path, files)
    parts = [
        Part(name, f"{path}/{name}", tree, digests, complete=complete)
        for name, (tree, digests) in items.items()
    ]
    found = check_arrays(parts, host_bytes=host_bytes)
    source = STORAGE if evicted else PAGE_CACHE
    return ReadBack((*problems, *found.problems), found.nbytes, source)


@dataclass(frozen=True, slots=True)
class Part:
    """The arrays of one item, and what they should hold.

    Attributes:
      name: the item's, for problems.
      path: its absolute directory.
      tree: its tree.
      digests: of every chunk, by leaf number and chunk index.
      strict: whether a chunk without a digest is a problem; else it is only read.
      leaf_digests: of leaves, where they are known.
      complete: whether `digests` is meant to have every chunk; else the others are left alone.
    """

    name: str
    path: str
    tree: StoredTree
    digests: Digests
    strict: bool = True
    leaf_digests: Mapping[int, str] = field(default_factory=dict)
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Checked:
    """What reading arrays has shown.

    Attributes:
      problems: everything that is wrong.
      nbytes: array bytes that were read and are right.
      leaf_digests: item -> leaf -> digest of what was read, where asked for and all of it is right.
    """

    problems: tuple[Problem, ...]
    nbytes: int
    leaf_digests: Mapping[str, Mapping[int, str]] = field(default_factory=dict)


def check_arrays(
    parts: Iterable[Part],
    *,
    host_bytes: int = HOST_BYTES,
    leaf_digests: bool = False,
    progress: Progress = lambda done, total: None,
) -> Checked:
    """Reads every chunk and compares its digest; with `leaf_digests` those of the leaves, too.

    `progress` is told array bytes: nothing at first and everything last, damaged or not.
    """
    items = [
        _Item(part, Reader(None, part.tree, part.path, part.digests))
        for part in parts
        if part.tree.has_arrays
    ]
    with ThreadPoolExecutor(os.cpu_count(), "ckptmgr-compare") as workers:
        window = _Window(host_bytes, progress, leaf_digests, workers)
        window.expect(sum(leaf.nbytes for item in items for leaf in item.part.tree.leaves))
        for item in items:
            _check_chunks(item, window)
        window.drain()
    found = {item.name: _leaf_digests(item, window) for item in items} if leaf_digests else {}
    return Checked(tuple(window.problems), window.nbytes, found)


def _leaf_digests(item: _Item, window: _Window) -> dict[int, str]:
    """Of leaves that were read and are right; one that is known otherwise is a problem."""
    bad = {problem.leaf for problem in window.problems if problem.file == item.name}
    found = {}
    for number, leaf in enumerate(item.tree.leaves):
        if not leaf.has_array or leaf.dotted in bad:
            continue
        sums = window.sums.get((item.name, number), ZERO)
        found[number] = finish(sums, leaf.stored_dtype, leaf.stored_shape)
        known = item.part.leaf_digests.get(number, found[number])
        if known != found[number]:
            text = f"its values have the leaf digest {found[number]}, {known} was recorded"
            window.note(Problem(item.name, text, leaf.dotted))
    return found


@dataclass(frozen=True, slots=True)
class _Item:
    """One item with arrays."""

    part: Part
    reader: Reader

    @property
    def name(self) -> str:
        return self.part.name

    @property
    def tree(self) -> StoredTree:
        return self.part.tree

    def held_bytes(self, leaf: StoredLeaf) -> int:
        """What a chunk under way may hold: its bytes as read, a form between, and our buffer."""
        size = manifest.itemsize(leaf.stored_dtype)
        return max(LEAST_BYTES, 3 * boxes.whole(leaf.chunk).size * size)


class _Window:
    """The chunks under way, and what has been found of those that arrived.

    Large ones are compared on all cores, small ones where they are waited for.
    """

    def __init__(
        self, host_bytes: int, progress: Progress, leaf_digests: bool, workers: Executor
    ) -> None:
        self.problems: dict[Problem, None] = {}  # an array that cannot be opened is told once
        self.nbytes = 0
        self.sums: dict[tuple[str, int], Sums] = {}
        self._leaf_digests = leaf_digests
        self._host_bytes = host_bytes
        self._progress = progress
        self._workers = workers
        self._done = self._total = 0
        self._held = 0
        self._asked: collections.deque[_Asked] = collections.deque()

    def expect(self, total: int) -> None:
        """Says how many bytes there are in all, before the first is asked for."""
        self._total = total
        self._progress(0, total)

    def pass_over(self, nbytes: int) -> None:
        """Counts bytes as done."""
        self._done += nbytes
        if self._done < self._total:  # the end is told when it is the end
            self._progress(self._done, self._total)

    def ask(self, item: _Item, unit: Unit, opening: Opening) -> None:
        """Starts to read a chunk, after waiting for earlier ones where the bound asks for it."""
        leaf = item.tree.leaves[unit.leaf]
        held = item.held_bytes(leaf)
        while self._asked and self._held + held > self._host_bytes:
            self._settle()
        values = np.empty(unit.box.shape, leaf.stored_dtype)
        try:
            asked = item.reader.ask(unit, opening, values)
        except CorruptCheckpoint as exc:
            self.note(*exc.problems)
            self.pass_over(values.nbytes)
            return
        compared = None
        if values.nbytes > SMALL_BYTES:
            with contextlib.suppress(RuntimeError):  # no thread starts while the interpreter ends
                compared = self._workers.submit(self._compare, item, asked)
        self._asked.append(_Asked(item, asked, held, compared))
        self._held += held

    def note(self, *problems: Problem) -> None:
        self.problems |= dict.fromkeys(problems)

    def drain(self) -> None:
        while self._asked:
            self._settle()
        self._progress(self._total, self._total)

    def _compare(self, item: _Item, asked: Asked) -> Sums | None:
        """What the chunk adds to its leaf's digest. Raises CorruptCheckpoint."""
        item.reader.settle(asked)
        if not self._leaf_digests:
            return None
        shape = item.tree.leaves[asked.unit.leaf].stored_shape
        return leafdigest.partial(asked.values, asked.unit.box, shape)

    def _settle(self) -> None:
        oldest = self._asked.popleft()
        item, asked = oldest.item, oldest.asked
        self._held -= oldest.held
        try:
            future = oldest.compared
            sums = self._compare(item, asked) if future is None else future.result()
        except CorruptCheckpoint as exc:
            self.note(*exc.problems)
        else:
            self.nbytes += asked.values.nbytes
            if sums is not None:
                key = (item.name, asked.unit.leaf)
                self.sums[key] = add(self.sums.get(key, ZERO), sums)
        self.pass_over(asked.values.nbytes)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A chunk under way; `compared` is a worker's answer, None where nobody works on it."""

    item: _Item
    asked: Asked
    held: int
    compared: Future[Sums | None] | None


def _check_chunks(item: _Item, window: _Window) -> None:
    """Asks for every chunk of an item, and compares what its arrays say of themselves."""
    leaves = item.tree.leaves
    for number, index in sorted(item.part.digests.keys() - set(_chunks(item.tree))):
        leaf = leaves[number].dotted if number < len(leaves) else ""
        window.note(Problem(item.name, f"chunk {list(index)} does not belong to the array", leaf))
    opened: set[int] = set()
    units = _units(item, window)
    while batch := list(itertools.islice(units, BEGUN)):
        for unit, opening in zip(batch, item.reader.begin(batch), strict=True):
            window.ask(item, unit, opening)
            if opening is not None:
                opened.add(unit.leaf)
    # those read by key or without elements; opening the others has compared them
    named = {number for number, _ in item.part.digests}
    rest = (
        leaf
        for i, leaf in enumerate(leaves)
        if leaf.has_array and i not in opened and (item.part.complete or i in named)
    )
    _check_metadata(item, rest, window)


def _chunks(tree: StoredTree) -> Iterator[tuple[int, Shape]]:
    for number, leaf in enumerate(tree.leaves):
        if leaf.has_array:
            for box in boxes.tiles(boxes.whole(leaf.stored_shape), leaf.chunk):
                yield number, manifest.chunk_index(leaf, box)


def _units(item: _Item, window: _Window) -> Iterator[Unit]:
    """Every chunk that is to be read: where a digest is a must, those without are problems."""
    for number, index in _chunks(item.tree):
        leaf = item.tree.leaves[number]
        box = manifest.chunk_box(leaf, index)
        if item.part.digests.get((number, index)) or not item.part.strict:
            yield Unit(number, box, (), (index,))
        elif not item.part.complete:
            window.pass_over(box.size * manifest.itemsize(leaf.stored_dtype))
        else:
            window.note(Problem(item.name, f"no digest of box {box} is known", leaf.dotted))
            window.pass_over(box.size * manifest.itemsize(leaf.stored_dtype))


def _check_metadata(item: _Item, leaves: Iterator[StoredLeaf], window: _Window) -> None:
    """Compares shape, dtype and chunks that arrays say they have with the tree's."""
    while group := list(itertools.islice(leaves, BEGUN)):
        found = item.reader.metadata([leaf.name for leaf in group])
        for leaf, there in zip(group, found, strict=True):
            says = (leaf.stored_shape, leaf.stored_dtype, leaf.chunk)
            if isinstance(there, str):
                text = f"its array cannot be opened ({there})"
            elif there != says:
                text = f"the array has {_array_text(*there)}, the tree says {_array_text(*says)}"
            else:
                continue
            window.note(Problem(item.name, text, leaf.dotted))


def _array_text(shape: Shape, dtype: str, chunk: Shape) -> str:
    return f"{dtype}{list(shape)} in chunks of {list(chunk)}"


def _file_problems(path: str, files: Mapping[str, tuple[int, str]]) -> list[Problem]:
    """Metadata files that are missing or not what they should be."""
    store = Store(path)
    problems = []
    for name, (size, digest) in files.items():
        try:
            data = store.read_file(name)
        except StoreError as exc:
            gone = exc.errno in (errno.ENOENT, errno.ENOTDIR)
            problems.append(Problem(name, "missing" if gone else str(exc), transient=not gone))
            continue
        if len(data) != size:
            problems.append(Problem(name, f"has {len(data)} bytes instead of {size}"))
        elif manifest.digest(data) != digest:
            problems.append(Problem(name, "has other bytes than were written"))
    return problems
