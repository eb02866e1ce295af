"""Boxes, chunk grids and plans, for any regular cut of any small array."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptmgr.core import boxes, chunking, manifest, plan
from ckptmgr.core.boxes import Box
from ckptmgr.core.manifest import StoredLeaf, StoredTree
from ckptmgr.core.plan import Shard, Wanted
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
