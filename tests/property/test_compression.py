"""The model of compression never promises what cannot be, and samples are parts of the leaves."""

from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.core import boxes
from ckptmgr.core.compression import Trial, places, seconds
from ckptmgr.core.manifest import StoredLeaf


def leaf(*shape, chunk=None, dtype="float32"):
    return StoredLeaf(("w",), "array", shape, dtype, "w", dtype, shape, chunk or shape)


@given(
    save=st.floats(1e-3, 1e4),
    nbytes=st.integers(1, 10**13),
    disk=st.floats(1e5, 1e12),
    ratio=st.floats(0, 1.1),
    rate=st.floats(1e5, 1e12),
    cores=st.integers(1, 256),
)
def test_a_choice_never_wins_more_than_the_disk_took(save, nbytes, disk, ratio, rate, cores):
    trial = Trial("zstd", ratio, rate)
    took = seconds(save, nbytes, disk, trial, cores)
    assert took >= save - min(save, nbytes / disk) - 1e-9 * save
    assert took >= nbytes / (rate * cores) * (1 - 1e-9)
    faster = seconds(save, nbytes, disk, Trial("zstd", ratio, 2 * rate), cores)
    assert faster <= took * (1 + 1e-9)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 30), max_size=3), st.integers(1, 9)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 20),
)
def test_every_place_is_a_chunk_of_its_leaf(shapes, count):
    leaves = [
        leaf(*shape, chunk=tuple(max(1, min(size, n)) for n in shape)) for shape, size in shapes
    ]
    found = places(leaves, count)
    has_bytes = any(one.nbytes for one in leaves)
    assert sum(len(place.parts) for place in found) == (count if has_bytes else 0)
    for place in found:
        one = leaves[place.leaf]
        assert list(boxes.tiles(place.box, one.chunk)) == [place.box]
        assert boxes.contains(boxes.whole(one.stored_shape), place.box)
        ends = zip(place.box.stop, one.stored_shape, one.chunk, strict=True)
        assert all(stop == size or stop % chunk == 0 for stop, size, chunk in ends)
        assert all(0 <= part < 1 for part in place.parts)
