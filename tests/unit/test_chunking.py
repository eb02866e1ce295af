"""The chunk grid of the leaves that models really have."""

import pytest

from ckptmgr.core.boxes import Box, tiles, whole
from ckptmgr.core.chunking import GATHER_BYTES, chunk_shape

MIB = 2**20


def rows(shape, count, processes=1):
    """`count` even shards along the first axis, and the processes that own them in turn."""
    step = shape[0] // count
    cut = [
        Box((i * step, *(0,) * (len(shape) - 1)), ((i + 1) * step, *shape[1:]))
        for i in range(count)
    ]
    return cut, [i * processes // count for i in range(count)]


def test_a_small_leaf_of_one_process_is_one_chunk_whatever_the_devices():
    assert chunk_shape((64, 64), 4, *rows((64, 64), 8), 16 * MIB) == (64, 64)


def test_a_small_leaf_of_two_processes_is_cut_at_every_shard_edge_between_them():
    assert chunk_shape((64, 64), 4, *rows((64, 64), 8, processes=2), 16 * MIB) == (8, 64)


def test_a_large_leaf_is_cut_at_its_shards():
    shape = (1024, 1024)  # 512 KiB a shard, 4 MiB in all
    assert chunk_shape(shape, 4, *rows(shape, 8), 16 * MIB) == (128, 1024)


def test_a_large_shard_is_cut_along_the_leading_axis_to_the_size_asked_for():
    shape = (4096, 4096)  # 8 MiB a shard
    assert chunk_shape(shape, 4, *rows(shape, 8), 1 * MIB) == (64, 4096)


def test_a_row_larger_than_a_chunk_is_cut_along_the_next_axis():
    assert chunk_shape((2, 1 << 20), 4, [whole((2, 1 << 20))], [0], 1 * MIB) == (1, 1 << 18)


def test_the_limit_for_gathering_is_a_process_and_not_the_array():
    shape = (8, GATHER_BYTES // 16)  # f32: 2 x GATHER_BYTES, in two processes
    assert chunk_shape(shape, 4, *rows(shape, 8, processes=2), 16 * MIB) == (1, shape[1])
    columns = [Box((0, i * shape[1] // 2), (8, (i + 1) * shape[1] // 2)) for i in range(2)]
    assert chunk_shape(shape, 4, columns, [0, 1], 16 * MIB) == (8, shape[1] // 2)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 0)])
def test_an_array_without_elements_has_a_chunk_of_at_least_one(shape):
    chunk = chunk_shape(shape, 4, [whole(shape)], [0], MIB)
    assert chunk == tuple(max(1, n) for n in shape)
    assert list(tiles(whole(shape), chunk)) == []


def test_a_scalar_has_the_empty_chunk():
    assert chunk_shape((), 4, [Box((), ())], [0], 1) == ()


def test_prime_sizes_on_one_device_are_cut_evenly_with_a_shorter_last_chunk():
    chunk = chunk_shape((1009, 7), 4, [whole((1009, 7))], [0], 1024)
    assert chunk == (35, 7)
    assert 35 * 7 * 4 <= 1024
    assert [cell.shape[0] for cell in tiles(whole((1009, 7)), chunk)] == [35] * 28 + [29]


def test_a_prime_shard_stays_whole_rather_than_fall_to_single_rows():
    shape = (2 * 1009, 256)
    assert chunk_shape(shape, 4, *rows(shape, 2), 64 * 1024) == (1009, 16)


def test_a_shorter_last_shard_keeps_the_grid_of_the_others():
    cut = [Box((0,), (4,)), Box((4,), (8,)), Box((8,), (10,))]
    assert chunk_shape((10,), 4, cut, [0, 1, 2], MIB) == (4,)


def test_axes_over_which_processes_do_not_change_are_not_cut():
    cut = [Box((i * 4, j * 4), (i * 4 + 4, j * 4 + 4)) for i in range(2) for j in range(4)]
    by_row = [i for i in range(2) for _ in range(4)]
    assert chunk_shape((8, 16), 4, cut, by_row, MIB) == (4, 16)
    by_column = [j % 2 for _ in range(2) for j in range(4)]
    assert chunk_shape((8, 16), 4, cut, by_column, MIB) == (8, 4)


def test_a_chunk_smaller_than_one_element_is_one_element():
    assert chunk_shape((3, 3), 8, [whole((3, 3))], [0], 1) == (1, 1)


def test_a_shard_is_cut_at_its_largest_even_division_that_fits():
    assert chunk_shape((24,), 4, *rows((24,), 2), 20) == (4,)
    assert chunk_shape((24,), 4, *rows((24,), 2), 24) == (6,)
