"""Chunks where the user names no size: as large as promised, and right for meshes that are finer."""

import math

import numpy as np
import pytest

from ckptmgr.core import chunking
from ckptmgr.core.boxes import Box
from ckptmgr.core.manifest import StoredLeaf
from ckptmgr.core.plan import Shard, Wanted, plan_restore
from ckptmgr.engine.leaves import _Grids

MIB = 2**20
WIDTHS = [1, 768, 1000, 4096, 11008]


def shards(shape, count, processes=1):
    """Even shards along the first axis, of so many processes."""
    rows = shape[0] // count
    return [
        Shard(
            Box((i * rows, *(0,) * (len(shape) - 1)), ((i + 1) * rows, *shape[1:])),
            (i * processes // count,),
            i,
        )
        for i in range(count)
    ]


def leaf_of(shape, dtype, found, chunk_bytes=None):
    """The leaf as it is stored with `Storage(chunk_bytes=...)`; takes no memory."""
    values = np.broadcast_to(np.zeros((), dtype), shape)
    name = values.dtype.name
    leaf = StoredLeaf((), "array", shape, name, "a", name, shape)
    chunk = _Grids(chunk_bytes, [(leaf, values)], [found])(shape, name, found, None)
    return StoredLeaf((), "array", shape, name, "a", name, shape, chunk)


def chunk_mib(leaf):
    return math.prod(leaf.chunk) * np.dtype(leaf.stored_dtype).itemsize / MIB


def over_read(leaf, count):
    """The most that one of `count` devices, each a process by itself, reads per byte it needs."""
    plans = [
        plan_restore(
            [leaf],
            [Wanted(0, (shard.box,))],
            whole_chunks=True,
            unit_bytes=16 * MIB,
            host_bytes=512 * MIB,
        )
        for shard in shards(leaf.stored_shape, count)
    ]
    return max(plan.over_read for plan in plans)


def shape_of(mib, width, count, multiple=8):
    """Shards of about `mib` MiB of float32 whose rows eight times as many devices can share."""
    rows = max(multiple, round(mib * MIB / 4 / width / multiple) * multiple)
    return (count * rows, width) if width > 1 else (count * rows,)


SIZES = {1: 1, 2: 2, 4: 2, 8: 2, 16: 2, 32: 4, 64: 8, 128: 16, 256: 16}
"""MiB of a shard -> MiB of its chunks."""


@pytest.mark.parametrize("processes", [1, 8])
@pytest.mark.parametrize("shard, chunk", SIZES.items())
def test_chunks_are_an_eighth_of_a_shard_but_2_to_16_mib(shard, chunk, processes):
    for dtype in ("float32", "bfloat16", "int8"):
        rows = shard * MIB // (4096 * np.dtype(dtype).itemsize)
        shape = (8 * rows, 4096)
        leaf = leaf_of(shape, dtype, shards(shape, 8, processes))
        assert chunk_mib(leaf) == chunk
        assert leaf.chunk[1] == 4096  # one run of memory


def test_a_shard_is_cut_into_a_power_of_two_of_pieces_between_the_bounds():
    for nbytes in range(1, 300 * MIB, 77_777):
        size = chunking.usual_chunk_bytes(nbytes)
        pieces = max(1, round(nbytes / size))
        assert 2 * MIB <= size <= 16 * MIB
        assert pieces & (pieces - 1) == 0, nbytes
        assert pieces >= 8 or size < 4 * MIB
    assert chunking.usual_chunk_bytes(0) == 2 * MIB
    assert chunking.usual_chunk_bytes(24 * MIB) == 3 * MIB


def test_a_size_that_is_given_is_kept_whatever_the_shard():
    shape = (8 * 64 * 64, 4096)
    for given in (MIB, 4 * MIB, 32 * MIB):
        leaf = leaf_of(shape, "float32", shards(shape, 8), given)
        assert chunk_mib(leaf) * MIB == given


@pytest.mark.parametrize("processes", [1, 8])
@pytest.mark.parametrize("width", WIDTHS)
def test_chunks_are_never_larger_than_16_mib_nor_far_smaller_than_promised(width, processes):
    for mib in (3, 5, 6, 12, 17, 20, 24, 48, 100, 130, 160, 200, 256):
        shape = shape_of(mib, width, 8)
        found = shards(shape, 8, processes)
        leaf = leaf_of(shape, "float32", found)
        aim = chunking.usual_chunk_bytes(found[0].box.size * 4) / MIB
        assert aim / 2 < chunk_mib(leaf) <= aim * 1.01


@pytest.mark.parametrize("finer", [2, 4, 8])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [2, 8])
def test_a_finer_mesh_reads_what_it_needs_of_shards_of_16_to_128_mib(count, width, finer):
    for mib in (17, 20, 24, 33, 48, 64, 80, 100, 120):
        shape = shape_of(mib, width, count)
        leaf = leaf_of(shape, "float32", shards(shape, count))
        assert over_read(leaf, count * finer) == 1


@pytest.mark.parametrize("finer", [2, 4, 8])
@pytest.mark.parametrize("mib", [2**n for n in range(2, 9)])
def test_a_finer_mesh_reads_what_it_needs_where_that_is_2_mib_of_shards_of_a_power_of_two(
    mib, finer
):
    shape = (8 * mib * 64, 4096)
    leaf = leaf_of(shape, "float32", shards(shape, 8))
    got = over_read(leaf, 8 * finer)
    assert got == max(1, 2 * finer / mib)  # no chunk is smaller than 2 MiB


@pytest.mark.parametrize("finer", [2, 4, 8])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_finer_mesh_reads_little_more_than_it_needs_where_that_is_2_mib(count, width, finer):
    worst = {}
    for mib in (4, 5, 6, 9, 12, 15, 24, 130, 144, 160, 200, 250):
        shape = shape_of(mib, width, count, 64)  # as the axes of models are
        if math.prod(shape) * 4 / count / finer < 2.1 * MIB:
            continue
        leaf = leaf_of(shape, "float32", shards(shape, count))
        worst[mib] = round(over_read(leaf, count * finer), 2), leaf.chunk
    assert {mib: found for mib, found in worst.items() if found[0] > 1.2} == {}
