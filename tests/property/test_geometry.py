"""Boxes, chunk grids and plans, for any regular cut of any small array."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptmgr.core import boxes, chunking, manifest, plan
from ckptmgr.core.boxes import Box
from ckptmgr.core.manifest import StoredLeaf, StoredTree
from ckptmgr.core.plan import Shard, Wanted
from ckptmgr.core.share import Piece, share
from tests.property.strategies import Cut, boxes_in, cuts

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
FULL_SHAPES = st.lists(st.integers(1, 9), max_size=3).map(tuple)
ITEMSIZES = st.sampled_from([1, 2, 4, 8])
CHUNK_BYTES = st.integers(1, 5000) | st.integers(1, 64)


def filled(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    """Where `box` lies in an array of `shape`."""
    out = np.zeros(shape, bool)
    out[box.slices] = True
    return out


def leaf_of(shape: tuple[int, ...], chunk: tuple[int, ...], dtype: str = "int32") -> StoredLeaf:
    return StoredLeaf(("a", "b"), "array", shape, dtype, "a.b", dtype, shape, chunk)


# -- boxes ------------------------------------------------------------------------------------


@given(st.data())
def test_the_intersection_of_two_boxes_is_where_both_lie(data):
    shape = data.draw(SHAPES)
    a, b = (data.draw(boxes_in(shape, empty=True)) for _ in range(2))
    both = filled(a, shape) & filled(b, shape)
    found = boxes.intersect(a, b)
    if found is None:
        assert not both.any()
    else:
        assert found.size > 0
        assert (filled(found, shape) == both).all()


@given(st.data())
def test_the_bounding_box_is_the_smallest_that_holds_all(data):
    shape = data.draw(FULL_SHAPES)
    found = data.draw(st.lists(boxes_in(shape), min_size=1, max_size=4))
    outer = boxes.bounding(found)
    assert all(boxes.contains(outer, box) for box in found)
    for d in range(len(shape)):
        assert outer.start[d] == min(box.start[d] for box in found)
        assert outer.stop[d] == max(box.stop[d] for box in found)


@given(st.data())
def test_tiles_cover_a_box_exactly_and_stay_in_their_cell(data):
    shape = data.draw(SHAPES)
    box = data.draw(boxes_in(shape, empty=True))
    tile = tuple(data.draw(st.integers(1, 5)) for _ in shape)
    count = np.zeros(shape, int)
    for cell in boxes.tiles(box, tile):
        assert cell.size > 0
        for a, b, t in zip(cell.start, cell.stop, tile, strict=True):
            assert a // t == (b - 1) // t
        count[cell.slices] += 1
    assert (count == filled(box, shape)).all()


@given(st.data())
def test_a_box_within_another_cuts_the_same_elements(data):
    shape = data.draw(FULL_SHAPES)
    outer = data.draw(boxes_in(shape))
    inner = boxes.intersect(outer, data.draw(boxes_in(shape)))
    assume(inner is not None)
    array = np.arange(math.prod(shape)).reshape(shape)
    assert (array[outer.slices][inner.within(outer)] == array[inner.slices]).all()


@given(cuts())
def test_the_pieces_of_any_cut_cover_the_array(cut: Cut):
    boxes.assert_exact_cover("x", cut.shape, cut.boxes)


@given(cuts(), st.data())
def test_a_missing_or_doubled_piece_is_refused_with_its_leaf_and_box(cut: Cut, data):
    victim = data.draw(st.sampled_from(cut.boxes))
    if data.draw(st.booleans()):
        changed, times = [box for box in cut.boxes if box != victim], 0
    else:
        changed, times = cut.boxes + [victim], 2
    with pytest.raises(ValueError) as refused:
        boxes.assert_exact_cover("a.b", cut.shape, changed)
    assert str(refused.value) == f"leaf 'a.b': elements {victim} would be written {times} times"


# -- chunks -----------------------------------------------------------------------------------


def numbered(cut: Cut, numbers) -> np.ndarray:
    """The array with the number of each box in all of its elements."""
    out = np.full(cut.shape, -1)
    for box, number in zip(cut.boxes, numbers, strict=True):
        out[box.slices] = number
    return out


@given(cuts(), ITEMSIZES, CHUNK_BYTES)
def test_no_chunk_crosses_owners(cut: Cut, itemsize, chunk_bytes):
    chunk = chunking.chunk_shape(cut.shape, itemsize, cut.boxes, cut.owners, chunk_bytes)
    owners = numbered(cut, cut.owners)
    for cell in boxes.tiles(boxes.whole(cut.shape), chunk):
        met = owners[cell.slices]
        assert met.min() == met.max(), f"chunk {cell} of {chunk} lies on several processes"


@given(cuts(), ITEMSIZES, CHUNK_BYTES)
def test_a_chunk_is_made_of_whole_shards_or_lies_inside_one(cut: Cut, itemsize, chunk_bytes):
    chunk = chunking.chunk_shape(cut.shape, itemsize, cut.boxes, cut.owners, chunk_bytes)
    numbers = numbered(cut, range(len(cut.boxes)))
    for cell in boxes.tiles(boxes.whole(cut.shape), chunk):
        met = np.unique(numbers[cell.slices])
        assert len(met) == 1 or sum(cut.boxes[i].size for i in met) == cell.size


@given(FULL_SHAPES, ITEMSIZES, CHUNK_BYTES)
def test_chunks_of_an_array_on_one_device_are_near_the_size_asked_for(shape, itemsize, chunk_bytes):
    chunk = chunking.chunk_shape(shape, itemsize, [boxes.whole(shape)], [0], chunk_bytes)
    nbytes = math.prod(chunk) * itemsize
    assert nbytes <= max(chunk_bytes, itemsize)
    assert chunk == shape or nbytes * 4 >= chunk_bytes


@given(cuts(sizes=st.sampled_from([1, 2, 4, 8, 16, 32]), even=True), ITEMSIZES, CHUNK_BYTES)
def test_chunks_of_even_shards_are_near_the_size_asked_for(cut: Cut, itemsize, chunk_bytes):
    chunk = chunking.chunk_shape(cut.shape, itemsize, cut.boxes, cut.owners, chunk_bytes)
    nbytes = math.prod(chunk) * itemsize
    assert nbytes <= max(chunk_bytes, itemsize)
    holds_a_shard = all(c >= s for c, s in zip(chunk, cut.boxes[0].shape, strict=True))
    assert holds_a_shard or nbytes * 4 >= chunk_bytes


# -- plans ------------------------------------------------------------------------------------


def shards_of(cut: Cut) -> list[Shard]:
    numbers: dict[int, int] = {}
    found = []
    for box, owner in zip(cut.boxes, cut.owners, strict=True):
        numbers[owner] = numbers.get(owner, -1) + 1
        found.append(Shard(box, (owner,), numbers[owner]))
    return found


@given(cuts(), CHUNK_BYTES)
def test_the_parts_of_all_processes_tile_the_array_and_each_writes_what_it_owns(cut, chunk_bytes):
    chunk = chunking.chunk_shape(cut.shape, 4, cut.boxes, cut.owners, chunk_bytes)
    leaf = leaf_of(cut.shape, chunk)
    shards = shards_of(cut)
    count = np.zeros(cut.shape, int)
    nbytes = 0
    for process in set(cut.owners):
        mine = {(s.position, s.box) for s in shards if s.holders == (process,)}
        made = plan.plan_save(StoredTree((leaf,), 0), [shards], process)
        nbytes += made.nbytes
        for part in made.parts:
            assert part.leaf == 0
            for a, b, c, end in zip(part.box.start, part.box.stop, chunk, cut.shape, strict=True):
                assert a % c == 0 and (b % c == 0 or b == end), "a part is made of whole chunks"
            got = np.zeros(cut.shape, int)
            for position, box in part.sources:
                assert (position, box) in mine, "a part is made of the process's own shards"
                got[box.slices] += 1
            assert (got == filled(part.box, cut.shape)).all(), "the sources fill the part"
            count[part.box.slices] += 1
    assert (count == 1).all()
    assert nbytes == math.prod(cut.shape) * 4


@given(st.data(), st.booleans(), st.integers(1, 2000))
def test_the_units_of_a_restore_fill_every_wanted_box_and_read_no_chunk_twice(
    data, whole_chunks, unit_bytes
):
    shape = data.draw(FULL_SHAPES)
    chunk = tuple(data.draw(st.integers(1, size)) for size in shape)
    leaf = leaf_of(shape, chunk)
    wanted = data.draw(
        st.lists(boxes_in(shape, empty=True), min_size=1, max_size=4, unique=True).map(tuple)
    )
    made = plan.plan_restore(
        [leaf],
        [Wanted(0, wanted, 99)],
        whole_chunks=whole_chunks,
        unit_bytes=unit_bytes,
        host_bytes=1000,
    )
    filled_in = [np.zeros(box.shape, int) for box in wanted]
    for unit in made.units:
        assert unit.targets, "a unit that nobody wants"
        for i in unit.targets:
            piece = boxes.intersect(unit.box, wanted[i])
            assert piece is not None, "a unit that does not meet its target"
            filled_in[i][piece.within(wanted[i])] += 1
    assert all((count == 1).all() for count in filled_in)
    for cell in boxes.tiles(boxes.whole(shape), chunk):
        reads = [unit for unit in made.units if boxes.intersect(unit.box, cell)]
        assert len(reads) <= 1, f"chunk {cell} is read {len(reads)} times"
        if whole_chunks and reads:
            assert reads[0].box == cell
            assert reads[0].chunks == (manifest.chunk_index(leaf, cell),)
    assert made.wanted_bytes == sum(box.size for box in wanted) * 4
    assert made.read_bytes == sum(unit.box.size for unit in made.units) * 4
    assert made.target_bytes == 99
    assert made.peak_host_bytes <= made.read_bytes + made.wanted_bytes


# -- what several processes hold --------------------------------------------------------------

WORLD = 5
HOLDERS = st.sets(st.integers(0, WORLD - 1), min_size=1).map(lambda found: tuple(sorted(found)))


@st.composite
def nested_pieces(draw):
    """Pieces whose sets of holders lie in each other or apart, as those of a mesh; (block, all)."""
    block, blocks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    world = block * blocks
    sets = [(rank,) for rank in range(world)]
    sets += [tuple(range(i * block, (i + 1) * block)) for i in range(blocks)]
    sets += [tuple(range(world))]
    pieces = st.builds(
        Piece, st.sampled_from(sets), st.integers(0, 1000), st.integers(1, 12) | st.just(1)
    )
    loads = st.dictionaries(st.integers(0, world - 1), st.integers(0, 2000))
    return sets, draw(st.lists(pieces, max_size=8)), draw(loads)


@given(
    st.lists(st.builds(Piece, HOLDERS, st.integers(0, 1000), st.integers(1, 12)), max_size=8),
    st.dictionaries(st.integers(0, WORLD - 1), st.integers(0, 2000)),
    st.randoms(use_true_random=False),
)
def test_every_cell_has_one_holder_and_nobody_gets_two_runs_of_a_line(pieces, loads, random):
    found = share(pieces, loads)
    lines: dict[tuple[int, ...], list[int]] = {}
    for piece, runs in zip(pieces, found, strict=True):
        assert [run.start for run in runs] == [0, *(run.stop for run in runs[:-1])]
        assert runs[-1].stop == piece.cells
        assert all(run.start < run.stop and run.process in piece.holders for run in runs)
        lines.setdefault(piece.holders, []).extend(run.process for run in runs)
    assert all(line == sorted(line) for line in lines.values())
    again = list(loads.items())
    random.shuffle(again)
    assert share([Piece(tuple([*p.holders]), p.nbytes, p.cells) for p in pieces], dict(again)) == (
        found
    )


@given(nested_pieces())
def test_no_process_writes_more_than_one_cell_above_what_must_be(drawn):
    sets, pieces, loads = drawn
    level = {rank: float(loads.get(rank, 0)) for rank in sets[-1]}
    must = {holders: sum(loads.get(rank, 0) for rank in holders) for holders in sets}
    for piece, runs in zip(pieces, share(pieces, loads), strict=True):
        for run in runs:
            level[run.process] += (run.stop - run.start) * piece.nbytes / piece.cells
        for holders in must:
            if set(piece.holders) <= set(holders):
                must[holders] += piece.nbytes
    lowest = max(total / len(holders) for holders, total in must.items())
    cell = max((piece.nbytes / piece.cells for piece in pieces), default=0)
    assert max(level.values()) <= lowest + cell + len(pieces)  # whole bytes are counted


@given(
    st.integers(1, WORLD),
    st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 12)), min_size=1, max_size=8),
    st.dictionaries(st.integers(0, WORLD - 1), st.integers(0, 2000)),
)
def test_nobody_gets_anything_who_has_more_than_others_have_then(world, sizes, loads):
    pieces = [Piece(tuple(range(world)), nbytes, cells) for nbytes, cells in sizes]
    level = {rank: float(loads.get(rank, 0)) for rank in range(world)}
    for piece, runs in zip(pieces, share(pieces, loads), strict=True):
        for run in runs:
            level[run.process] += (run.stop - run.start) * piece.nbytes / piece.cells
    cell = max(piece.nbytes / piece.cells for piece in pieces)
    got = [rank for rank in level if level[rank] > loads.get(rank, 0)]
    assert all(level[rank] <= min(level.values()) + 2 * cell for rank in got)


def shared_shards(cut: Cut, holders: list[tuple[int, ...]], process: int) -> list[Shard]:
    """As `process` sees them."""
    count = itertools.count()
    return [
        Shard(box, held, next(count) if process in held else -1)
        for box, held in zip(cut.boxes, holders, strict=True)
    ]


@given(st.data(), st.lists(cuts(), min_size=1, max_size=3), CHUNK_BYTES)
def test_what_several_hold_is_written_once_by_processes_that_hold_it(data, found, chunk_bytes):
    sets = data.draw(st.lists(HOLDERS, min_size=4, max_size=4))
    holders = [[sets[owner] for owner in cut.owners] for cut in found]
    chunks = [
        chunking.chunk_shape(cut.shape, 4, cut.boxes, held, chunk_bytes)
        for cut, held in zip(found, holders, strict=True)
    ]
    leaves = tuple(leaf_of(cut.shape, chunk) for cut, chunk in zip(found, chunks, strict=True))
    counts = [np.zeros(cut.shape, int) for cut in found]
    nbytes = 0
    for process in range(WORLD):
        seen = [shared_shards(cut, held, process) for cut, held in zip(found, holders, strict=True)]
        made = plan.plan_save(StoredTree(leaves, 0), seen, process)
        nbytes += made.nbytes
        for part in made.parts:
            mine = {(s.position, s.box) for s in seen[part.leaf] if s.position >= 0}
            shape = found[part.leaf].shape
            axes = zip(part.box.start, part.box.stop, chunks[part.leaf], shape, strict=True)
            assert all(a % c == 0 and (b % c == 0 or b == end) for a, b, c, end in axes)
            got = np.zeros(shape, int)
            for position, box in part.sources:
                assert (position, box) in mine, "a part is made of shards that are here"
                got[box.slices] += 1
            assert (got[part.box.slices] == 1).all(), "the sources fill the part"
            assert part.write
            counts[part.leaf][part.box.slices] += 1
    assert all((count == 1).all() for count in counts)
    assert nbytes == sum(math.prod(cut.shape) * 4 for cut in found)


@given(cuts(), CHUNK_BYTES, st.integers(1, WORLD - 1))
def test_of_what_each_has_for_itself_process_0_writes_and_the_others_compare(
    cut, chunk_bytes, process
):
    chunk = chunking.chunk_shape(cut.shape, 4, cut.boxes, [(0,)] * len(cut.boxes), chunk_bytes)
    own = [Shard(box, (0,), i, True) for i, box in enumerate(cut.boxes)]
    stored = StoredTree((leaf_of(cut.shape, chunk),), 0)
    first, other = (plan.plan_save(stored, [own], rank) for rank in (0, process))
    assert first.parts and all(part.write for part in first.parts)
    assert other.parts == tuple(replace(part, write=False) for part in first.parts)
    assert (first.nbytes, other.nbytes) == (math.prod(cut.shape) * 4, 0)
    assert first.own == other.own == {0}
