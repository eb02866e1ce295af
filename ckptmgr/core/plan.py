"""Which process writes or reads which box of which leaf. No communication, no device.

`plan_save` turns leaves and the places of their shards into parts to write; `plan_restore` turns
stored leaves and the boxes that are wanted into units to read. Both end with a check of their
own geometry.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptmgr.core import boxes, layout, manifest
from ckptmgr.core.boxes import Box, Shape
from ckptmgr.core.manifest import StoredLeaf, StoredTree
from ckptmgr.core.share import Piece, Run, share


@dataclass(frozen=True, slots=True)
class Shard:
    """A distinct piece of a leaf and who holds it.

    Attributes:
      box: where it lies in the leaf.
      holders: the processes that hold it, ascending; one of them writes it.
      position: for this process, which of its addressable shards holds it; -1 for none.
      own: whether every process has such a piece of its own (a host array, an array on its own
        devices): process 0's is written, the others' are compared with it.
    """

    box: Box
    holders: tuple[int, ...]
    position: int
    own: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """One write: a box of whole chunks, and the local shards it is made of.

    Attributes:
      leaf: number of the leaf.
      box: what is written.
      sources: (position of the local shard, its box); one that equals `box` is written as it
        lies, several are assembled.
      write: False for what is only digested, to be compared with what process 0 writes.
    """

    leaf: int
    box: Box
    sources: tuple[tuple[int, Box], ...]
    write: bool = True


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What one process writes of one item.

    Attributes:
      tree: the stored tree, the same on every process.
      parts: in leaf order.
      nbytes: bytes of this process's parts that it writes.
      own: numbers of the leaves of which every process has its own copy.
    """

    tree: StoredTree
    parts: tuple[Part, ...]
    nbytes: int
    own: frozenset[int] = frozenset()


def plan_save(tree: StoredTree, shards: Sequence[Sequence[Shard]], process: int) -> SavePlan:
    """Plans the writes of `process`; `shards[i]` are all distinct shards of leaf i.

    What several processes hold is shared so that all write about as many bytes, see `share`.
    Leaves with the same shape and chunks that have one sequence of shards are cut the same way,
    which is worked out once.

    Raises ValueError, naming leaf and boxes, when shards overlap or leave a gap.
    """
    cuts: dict[tuple[Shape, Shape, int], list[_Cut]] = {}
    loads: Counter[int] = Counter()
    alone: dict[int, Counter[int]] = {}
    pieces: list[Piece] = []
    planned: list[tuple[int, _Cut]] = []
    for number, (leaf, found) in enumerate(zip(tree.leaves, shards, strict=True)):
        if not leaf.has_array:
            continue
        key = (leaf.stored_shape, leaf.chunk, id(found))  # `shards` keeps it alive
        size = manifest.itemsize(leaf.stored_dtype)
        if key not in cuts:
            boxes.assert_exact_cover(leaf.dotted, leaf.stored_shape, [s.box for s in found])
            cuts[key] = _cut(leaf, [s for s in found if s.box.size and _concerns(s, process)])
        if id(found) not in alone:
            alone[id(found)] = _elements_alone(found)
        for holder, elements in alone[id(found)].items():
            loads[holder] += elements * size
        for cut in cuts[key]:
            planned.append((number, cut))
            if len(cut.holders) > 1:
                pieces.append(Piece(cut.holders, cut.box.size * size, cut.cells))
    shared = iter(share(pieces, loads))
    parts: list[Part] = []
    for number, cut in planned:
        runs = next(shared) if len(cut.holders) > 1 else ()
        parts += _parts(number, tree.leaves[number], cut, runs, process)
    nbytes = sum(
        part.box.size * manifest.itemsize(tree.leaves[part.leaf].stored_dtype)
        for part in parts
        if part.write
    )
    own = frozenset(i for i, found in enumerate(shards) if found and found[0].own)
    return SavePlan(tree, tuple(parts), nbytes, own)


@dataclass(frozen=True, slots=True)
class LeafWrite:
    """What one wave writes of a leaf.

    Attributes:
      leaf: number of the leaf.
      parts: its parts in this wave; none for an array without elements.
      first: whether the array is created here.
    """

    leaf: int
    parts: tuple[Part, ...]
    first: bool

    @property
    def writes(self) -> bool:
        """Whether anything is written; else the parts are only digested."""
        return not self.parts or self.parts[0].write


Wave = tuple[LeafWrite, ...]


WAVE_PARTS, MOST_SMALL_WAVES = 4096, 4
"""A wave has about so many parts at most, so that of a tree of many thousands of small leaves one is
committed while the next is made. That alone makes no more waves than so many: each commit writes
anew the tree of all keys before it, of 200 bytes for a leaf."""


def waves(
    plan: SavePlan,
    process: int,
    wave_bytes: int,
    goes_first: Callable[[Part], bool] = lambda part: False,
) -> tuple[Wave, ...]:
    """Cuts a plan into waves of about `wave_bytes`, each at least one part; see `WAVE_PARTS` too.

    Leaves of which every part `goes_first` come before the others. Process 0 creates the arrays that
    have no elements.
    """
    by_leaf: dict[int, list[Part]] = {}
    for part in plan.parts:
        by_leaf.setdefault(part.leaf, []).append(part)
    most = _most_parts(plan)
    found: list[Wave] = []
    wave: list[LeafWrite] = []
    held = count = 0
    first_ones = {number for number, parts in by_leaf.items() if all(map(goes_first, parts))}
    for number in sorted(range(len(plan.tree.leaves)), key=lambda n: n not in first_ones):
        leaf, parts = plan.tree.leaves[number], by_leaf.get(number, [])
        creates = leaf.has_array and leaf.nbytes == 0 and process == 0
        if not parts and not creates:
            continue
        size, first = manifest.itemsize(leaf.stored_dtype), True
        taken: list[Part] = []
        for part in parts:
            nbytes = part.box.size * size
            if held and (held + nbytes > wave_bytes or count >= most):
                if taken:
                    wave.append(LeafWrite(number, tuple(taken), first))
                    first, taken = False, []
                found.append(tuple(wave))
                wave, held, count = [], 0, 0
            taken.append(part)
            held += nbytes
            count += nbytes > layout.INLINE_BYTES
        wave.append(LeafWrite(number, tuple(taken), first))
    if wave:
        found.append(tuple(wave))
    return tuple(found)


def _most_parts(plan: SavePlan) -> int:
    """How many parts a wave has at most, those left out whose values lie among the keys."""
    leaves = plan.tree.leaves
    sizes = (
        part.box.size * manifest.itemsize(leaves[part.leaf].stored_dtype) for part in plan.parts
    )
    apart = sum(size > layout.INLINE_BYTES for size in sizes)
    waves = min(MOST_SMALL_WAVES, max(1, -(-apart // WAVE_PARTS)))
    return max(1, -(-apart // waves))


@dataclass(frozen=True, slots=True)
class _Cut:
    """A box of whole chunks that one process writes, and the shards it is made of.

    Attributes:
      holders: the processes that could write it.
      own: as in `Shard`.
      cells: how many chunks it has where it may be divided, else 1.
    """

    box: Box
    sources: tuple[tuple[int, Box], ...]
    holders: tuple[int, ...]
    own: bool = False
    cells: int = 1


def _concerns(shard: Shard, process: int) -> bool:
    """Whether this process has to plan for a shard: it may write it, or shares it with others."""
    return len(shard.holders) > 1 or process in shard.holders or shard.own


def _elements_alone(shards: Sequence[Shard]) -> Counter[int]:
    """Process -> elements that nobody else could write."""
    found: Counter[int] = Counter()
    for shard in shards:
        if len(shard.holders) == 1:
            found[shard.holders[0]] += shard.box.size
    return found


def _cut(leaf: StoredLeaf, shards: Sequence[Shard]) -> list[_Cut]:
    """A shard made of whole chunks is a piece of its own; smaller ones are gathered by chunk."""
    cuts: list[_Cut] = []
    gathered: dict[Shape, list[Shard]] = {}
    for shard in shards:
        if _is_chunk_aligned(leaf, shard.box):
            cells = boxes.count_tiles(shard.box, leaf.chunk) if len(shard.holders) > 1 else 1
            source = (shard.position, shard.box)
            cuts.append(_Cut(shard.box, (source,), shard.holders, shard.own, cells))
        else:
            for tile in boxes.tiles(shard.box, leaf.chunk):
                gathered.setdefault(manifest.chunk_index(leaf, tile), []).append(shard)
    for index, found in gathered.items():
        sources = tuple((shard.position, shard.box) for shard in found)
        box = manifest.chunk_box(leaf, index)
        cuts.append(_Cut(box, sources, found[0].holders, found[0].own))
    return cuts


def _parts(
    number: int, leaf: StoredLeaf, cut: _Cut, runs: Sequence[Run], process: int
) -> Iterator[Part]:
    """What this process does of a cut that is shared as `runs` say; none: it has one holder."""
    if not runs:
        if cut.own or process in cut.holders:
            yield Part(number, cut.box, cut.sources, write=process in cut.holders)
        return
    for run in runs:
        if run.process != process:
            continue
        if run.stop - run.start == cut.cells:
            yield Part(number, cut.box, cut.sources)
        else:
            tiles = itertools.islice(boxes.tiles(cut.box, leaf.chunk), run.start, run.stop)
            yield from (Part(number, tile, cut.sources) for tile in tiles)


def _is_chunk_aligned(leaf: StoredLeaf, box: Box) -> bool:
    return all(
        a % c == 0 and (b % c == 0 or b == end)
        for a, b, c, end in zip(box.start, box.stop, leaf.chunk, leaf.stored_shape, strict=True)
    )


class Wanted(NamedTuple):
    """What a restore wants of one stored leaf.

    Attributes:
      leaf: number of the stored leaf.
      boxes: the distinct boxes this process needs, each read once.
      copies: bytes that the boxes take, counted once per device that holds one.
    """

    leaf: int
    boxes: tuple[Box, ...]
    copies: int = 0


class Unit(NamedTuple):
    """One read: a box of a stored leaf, and which wanted boxes get a piece of it.

    Attributes:
      leaf: number of the stored leaf.
      box: what is read.
      targets: numbers of the wanted boxes it meets.
      chunks: the recorded chunks inside it, to verify; empty where there are no digests.
    """

    leaf: int
    box: Box
    targets: tuple[int, ...]
    chunks: tuple[Shape, ...] = ()


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What a restore will read and hold.

    Attributes:
      units: the reads, in leaf order.
      wanted_bytes: bytes of the distinct boxes wanted.
      read_bytes: bytes that will be read; more than wanted where chunks are cut.
      target_bytes: bytes of the restored arrays in this process, every device copy counted.
      peak_host_bytes: bound on host memory besides the restored arrays.
      notes: what the user should know, e.g. an axis that had to be replicated.
    """

    units: tuple[Unit, ...]
    wanted_bytes: int
    read_bytes: int
    target_bytes: int
    peak_host_bytes: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = (
            f"reads {self.read_bytes / 1e6:.1f} MB for {self.wanted_bytes / 1e6:.1f} MB wanted, "
            f"restores {self.target_bytes / 1e6:.1f} MB, holds up to "
            f"{self.peak_host_bytes / 1e6:.1f} MB besides"
        )
        return "\n".join((text, *self.notes))

    @property
    def over_read(self) -> float:
        """Bytes read per byte wanted, 1.0 at best."""
        return self.read_bytes / self.wanted_bytes if self.wanted_bytes else 1.0


def plan_restore(
    leaves: Sequence[StoredLeaf],
    wanted: Sequence[Wanted],
    *,
    whole_chunks: bool,
    unit_bytes: int,
    host_bytes: int,
    notes: Sequence[str] = (),
) -> RestorePlan:
    """Plans the reads for `wanted`.

    Args:
      leaves: the stored leaves.
      wanted: at most one entry per stored leaf.
      whole_chunks: read chunks whole, so that their digests can be compared; otherwise only the
        part of a unit that is wanted.
      unit_bytes: small chunks are read together up to about this size.
      host_bytes: what the reader may hold besides the target.
    """
    units: list[Unit] = []
    wanted_bytes = target_bytes = read_bytes = largest = 0
    for want in wanted:
        leaf = leaves[want.leaf]
        size = manifest.itemsize(leaf.stored_dtype)
        wanted_bytes += sum(box.size for box in want.boxes) * size
        target_bytes += want.copies
        made = _units_of_leaf(want, leaf, whole_chunks, unit_bytes // size)
        for unit in made:
            nbytes = unit.box.size * size
            read_bytes += nbytes
            largest = max(largest, nbytes)
        units += made
    peak = min(max(host_bytes, largest), read_bytes + wanted_bytes)
    return RestorePlan(tuple(units), wanted_bytes, read_bytes, target_bytes, peak, tuple(notes))


def _units_of_leaf(
    want: Wanted, leaf: StoredLeaf, whole_chunks: bool, unit_elements: int
) -> list[Unit]:
    needed = [(i, box) for i, box in enumerate(want.boxes) if box.size]
    if needed and whole_chunks and leaf.chunk == leaf.stored_shape:  # one chunk, as small leaves
        box = _whole(leaf.stored_shape)
        return [Unit(want.leaf, box, tuple(i for i, _ in needed), (box.start,))]
    cell = leaf.chunk if whole_chunks else _grown(leaf.chunk, leaf.stored_shape, unit_elements)
    targets: dict[Box, list[int]] = {}
    for i, box in needed:
        for tile in boxes.tiles(box, cell):
            index = tuple(a // c for a, c in zip(tile.start, cell, strict=True))
            start = tuple(k * c for k, c in zip(index, cell, strict=True))
            stop = tuple(
                min(a + c, end) for a, c, end in zip(start, cell, leaf.stored_shape, strict=True)
            )
            targets.setdefault(Box(start, stop), []).append(i)
    units = []
    for box, numbers in targets.items():
        if whole_chunks:
            units.append(Unit(want.leaf, box, tuple(numbers), (manifest.chunk_index(leaf, box),)))
        else:
            met = [boxes.intersect(box, want.boxes[i]) for i in numbers]
            read = boxes.bounding([piece for piece in met if piece is not None])
            units.append(Unit(want.leaf, read, tuple(numbers)))
    return units


_whole = functools.lru_cache(maxsize=4096)(boxes.whole)
"""Many leaves have one shape; what is worked out of their boxes then meets the same ones."""


def _grown(chunk: Shape, shape: Shape, unit_elements: int) -> Shape:
    """A multiple of `chunk`, up to `unit_elements` elements, grown from the last axis on."""
    cell = list(chunk)
    size = boxes.whole(chunk).size
    for d in reversed(range(len(cell))):
        times = min(max(1, unit_elements // size), -(-shape[d] // cell[d]))
        size *= times
        cell[d] *= times
    return tuple(cell)
