"""Which compression makes a save shorter, by the model; where samples are taken; zarr's codecs."""

import math

import numpy as np
import pytest

from ckptmgr.core import compression
from ckptmgr.core.compression import CODECS, Trial, choose, places, seconds
from ckptmgr.core.manifest import StoredLeaf

GB = 1e9
ZSTD, BLOSC, BITS = (
    Trial("zstd", 0.89, 0.7 * GB),
    Trial("blosc", 0.91, 1.0 * GB),
    Trial("blosc_bitshuffle", 0.82, 1.8 * GB),
)
WEIGHTS = (ZSTD, BLOSC, BITS)
TOKENS = (Trial("zstd", 0.6, 0.6 * GB), Trial("blosc", 0.5, 3 * GB))
NOISE = (Trial("zstd", 1.0, 2 * GB), Trial("blosc_bitshuffle", 1.0, 3 * GB))
ZEROS = (Trial("zstd", 0.0, 4 * GB), Trial("blosc", 0.004, 5 * GB))
SLOW = (Trial("zstd", 0.5, 0.05 * GB),)


@pytest.mark.parametrize(
    ("trials", "disk", "rest", "cores", "wanted"),
    [
        (WEIGHTS, 0.1 * GB, 0.0, 1, "blosc_bitshuffle"),
        (WEIGHTS, 1.0 * GB, 0.0, 1, "blosc_bitshuffle"),
        (WEIGHTS, 2.0 * GB, 0.0, 1, None),  # one core compresses more slowly than it writes
        (WEIGHTS, 2.0 * GB, 0.0, 8, "blosc_bitshuffle"),
        (WEIGHTS, 20.0 * GB, 0.0, 8, None),
        (WEIGHTS, 1.0 * GB, 2.0, 8, None),  # the disk is a third of the save
        (WEIGHTS[:2], 0.1 * GB, 0.0, 1, "zstd"),
        (WEIGHTS[1:2], 0.1 * GB, 0.0, 1, None),  # wins nine parts of a hundred
        (TOKENS, 1.0 * GB, 0.0, 1, "blosc"),
        (TOKENS, 0.1 * GB, 0.0, 1, "blosc"),
        (NOISE, 0.01 * GB, 0.0, 8, None),
        (ZEROS, 0.01 * GB, 0.0, 1, "zstd"),
        (ZEROS, 3.0 * GB, 0.0, 1, "blosc"),
        (SLOW, 0.04 * GB, 0.0, 1, "zstd"),
        (SLOW, 0.06 * GB, 0.0, 1, None),
    ],
)
def test_the_choice_is_what_makes_the_save_shorter_by_a_tenth(trials, disk, rest, cores, wanted):
    nbytes = 10**9
    found = choose(nbytes / disk + rest, nbytes, disk, trials, cores)
    assert found.name == wanted
    assert "the disk writes" in found.reason
    assert ("is not worth it" in found.reason) == (wanted is None)


def test_the_reason_has_the_figures_it_rests_on():
    found = choose(1.0, 10**9, 1.1 * GB, [ZSTD], 1)
    assert found.reason.startswith(
        "the disk writes 1.1 GB/s, zstd gives 0.89 of the bytes at 700 MB/s"
    )


def test_leaves_that_compression_must_open_count_against_it():
    trial = Trial("zstd", 0.5, GB, opening=2e-4)
    assert choose(1.0, 10**8, 1e8, [trial], 4, small=1000).name == "zstd"
    assert choose(1.0, 10**8, 1e8, [trial], 4, small=3000).name is None
    assert seconds(1.0, 10**8, 1e8, trial, 4, small=1000) == pytest.approx(0.5 + 0.2)


def test_a_disk_is_at_least_as_fast_as_the_save_has_shown():
    assert seconds(1.0, 10**9, 1.0, BITS, 8) == seconds(1.0, 10**9, 1e9, BITS, 8)


def leaf(*shape, chunk=None, dtype="float32"):
    return StoredLeaf(("w",), "array", shape, dtype, "w", dtype, shape, chunk or shape)


def test_a_place_stands_for_as_many_bytes_as_any_other():
    leaves = [leaf(1000, 1000), leaf(500, 1000, dtype="int32"), leaf(), leaf(0, 3)]
    found = places(leaves, 12)
    count = {n: sum(len(p.parts) for p in found if p.leaf == n) for n in range(len(leaves))}
    assert count == {0: 8, 1: 4, 2: 0, 3: 0}
    assert places([leaf(0, 3), leaf(chunk=())][:1]) == []


def test_few_places_are_spread_as_many_are():
    cut = leaf(16, 64, chunk=(1, 64))
    rows = [place.box.start[0] for place in places([cut], 16)]
    assert sorted(rows) == list(range(16))
    assert {row // 4 for row in rows[:8]} == {0, 1, 2, 3}


@pytest.mark.parametrize("name", CODECS)
def test_what_blosc_cannot_take_is_stored_as_it_is(name):
    large = leaf(2**29 + 1)
    assert math.prod(large.chunk) * 4 > compression.BLOSC_BYTES
    assert (compression.compressor(name, large) is None) == (name != "zstd")
    assert bool(compression.codecs(name, large)) == (name == "zstd")
    small = leaf(4)
    assert compression.compressor(name, small) == CODECS[name]
    (codec,) = compression.codecs(name, small)
    assert codec["name"] == CODECS[name]["id"]
    assert codec["configuration"].get("typesize", 4) == np.dtype("float32").itemsize


def test_without_a_name_nothing_is_compressed():
    assert compression.compressor(None, leaf(4)) is None
    assert compression.codecs(None, leaf(4)) == []
