"""Boxes: the cases that properties do not single out."""

import numpy as np
import pytest

from ckptmgr.core import boxes
from ckptmgr.core.boxes import Box


def test_a_box_says_its_shape_size_and_slices():
    box = Box((1, 0), (3, 4))
    assert (box.shape, box.size) == ((2, 4), 8)
    assert box.slices == (slice(1, 3), slice(0, 4))
    assert str(box) == "[1:3, 0:4]"


def test_a_box_of_no_dimensions_has_one_element():
    assert boxes.whole(()) == Box((), ())
    assert Box((), ()).size == 1
    assert boxes.intersect(Box((), ()), Box((), ())) == Box((), ())
    assert list(boxes.tiles(Box((), ()), ())) == [Box((), ())]


def test_the_whole_of_an_empty_array_is_an_empty_box_without_tiles():
    assert boxes.whole((3, 0)) == Box((0, 0), (3, 0))
    assert list(boxes.tiles(boxes.whole((3, 0)), (2, 1))) == []


def test_a_box_is_made_from_the_slices_of_a_sharding():
    assert boxes.from_index((slice(None), slice(2, 4)), (5, 8)) == Box((0, 2), (5, 4))
    assert boxes.from_index((), ()) == Box((), ())
    assert boxes.from_index((slice(None),), (0,)) == Box((0,), (0,))


def test_boxes_that_only_touch_do_not_meet():
    assert boxes.intersect(Box((0,), (2,)), Box((2,), (4,))) is None


def test_numbers_of_different_dimensions_do_not_compare():
    with pytest.raises(ValueError, match="zip"):
        boxes.contains(Box((0,), (1,)), Box((0, 0), (1, 1)))


def test_a_box_outside_the_array_is_refused_with_its_leaf():
    with pytest.raises(ValueError, match=r"leaf 'w': box \[2:5\] lies outside .* shape \(4,\)"):
        boxes.assert_exact_cover("w", (4,), [Box((0,), (2,)), Box((2,), (5,))])


def test_a_gap_and_an_overlap_that_cancel_out_are_seen():
    with pytest.raises(ValueError, match=r"leaf 'w': elements \[1:2\] would be written 2 times"):
        boxes.assert_exact_cover("w", (4,), [Box((0,), (2,)), Box((1,), (3,))])


@pytest.mark.parametrize("shards", [[], [Box((), ())] * 2], ids=["nobody", "two"])
def test_a_scalar_is_written_by_exactly_one(shards):
    with pytest.raises(ValueError, match=f"leaf 'w': .* written {len(shards)} times"):
        boxes.assert_exact_cover("w", (), shards)


def test_an_empty_array_is_covered_by_nothing_and_by_empty_boxes():
    boxes.assert_exact_cover("w", (0, 3), [])
    boxes.assert_exact_cover("w", (0, 3), [Box((0, 0), (0, 3))] * 2)
    with pytest.raises(ValueError, match="leaf 'w'"):
        boxes.assert_exact_cover("w", (2,), [Box((1,), (1,))])


def test_the_check_of_many_shards_stays_cheap():
    cut = [Box((i, j), (i + 1, j + 1)) for i in range(100) for j in range(100)]
    boxes.assert_exact_cover("w", (100, 100), cut)
    count = np.zeros((100, 100), int)
    for box in cut:
        count[box.slices] += 1
    assert (count == 1).all()
