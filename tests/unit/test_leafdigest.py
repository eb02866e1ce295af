"""The leaf digest: one for the same values on every mesh, another for any others.

`PLAIN` below is the definition of docs/FORMAT.md word for word, in numbers of Python; the two
forms of the library are compared with it, and `GOLDEN` fixes what it gives.
"""

import functools
import itertools
import random
import struct
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ckptmgr.core import leafdigest as reference
from ckptmgr.core.boxes import Box, tiles, whole
from ckptmgr.engine import leafdigest as compiled
from ckptmgr.engine.leaves import _TENSORSTORE_DTYPES, stored_dtype

DTYPES = sorted(_TENSORSTORE_DTYPES)
SUB_BYTE = {"int2": 2, "int4": 4, "float4_e2m1fn": 4, "uint2": 2, "uint4": 4}
ON_DEVICES = sorted({*_TENSORSTORE_DTYPES, "uint2", "uint4", "float8_e4m3"} - {
    "int64", "uint64", "float64", "complex128"})  # fmt: skip


def patterned(dtype, shape, seed=0):
    """Arbitrary bits in every element; none that numpy would not keep."""
    kind = np.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, kind.itemsize), np.uint8)
    if dtype == "bool":
        raw &= 1
    if dtype in SUB_BYTE:
        raw &= 2 ** SUB_BYTE[dtype] - 1
    return raw.view(kind).reshape(shape)


def of_pieces(form, values, boxes):
    sums = (form(values[box.slices], box, values.shape) for box in boxes)
    return functools.reduce(reference.add, sums, reference.ZERO)


def digest(values, form=reference.partial):
    sums = form(values, whole(values.shape), values.shape)
    return reference.finish(sums, values.dtype.name, values.shape)


# -- the definition, in plain numbers -------------------------------------------------------------

BITS32 = 2**32


def plain_mix(word, position):
    def lowbias(x):
        x = (x ^ x >> 16) * 0x7FEB352D % BITS32
        x = (x ^ x >> 15) * 0x846CA68B % BITS32
        return x ^ x >> 16

    def f(x, multiplier):
        x = (x ^ x >> 16) * multiplier % BITS32
        return x ^ x >> 15

    low, high = position % BITS32, position // BITS32
    b0 = low ^ lowbias(high ^ 0x9E3779B9)
    a0 = word ^ lowbias(high ^ 0x85EBCA77)
    a1 = (a0 + f(b0, 0x85EBCA6B)) % BITS32
    b1 = b0 ^ f(a1, 0xC2B2AE35)
    a2 = (a1 + f(b1, 0x7FEB352D)) % BITS32
    b2 = b1 ^ f(a2, 0x846CA68B)
    a3 = (a2 + f(b2, 0x9E3779B1)) % BITS32
    b3 = b2 ^ f(a3, 0x27D4EB2F)
    return a2, b2, a3, b3


def plain_words(values):
    size = values.dtype.itemsize
    data = np.ascontiguousarray(values).tobytes()
    words = [w for (w,) in struct.iter_unpack({1: "<B", 2: "<H"}.get(size, "<I"), data)]
    return [w % 2 ** SUB_BYTE.get(values.dtype.name, 32) for w in words]


def plain_digest(words, dtype, shape, positions=None):
    sums = [0, 0, 0, 0]
    header = f"{dtype}[{','.join(str(n) for n in shape)}]".encode()
    seen = list(zip(words, positions or itertools.count(), strict=False))
    seen += [(byte, (BITS32 - 1) * BITS32 + i) for i, byte in enumerate(header)]
    for word, position in seen:
        sums = [(s + m) % BITS32 for s, m in zip(sums, plain_mix(word, position), strict=True)]
    return "".join(f"{s:08x}" for s in sums)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 1, 3, 2), (0,), (3, 0)])
def test_both_forms_give_what_the_definition_says(dtype, shape):
    values = patterned(dtype, shape)
    expected = plain_digest(plain_words(values), dtype, shape)
    assert digest(values) == expected
    assert digest(values, compiled.partial) == expected


GOLDEN = {
    "float32[]": "6e2bfed486f0cb8bfa65ec7f931e9328",
    "float32[5,7]": "37c2c141dc9a5d5af4f1aa12ded729f9",
    "float32[300,1000]": "1c892f9f9bc5ca3e5875bc8b205111af",
    "float64[3]": "aec713d979609ae583f7350a327c78e4",
    "bfloat16[4,6]": "0a5f75d859002c4ef72a0ee810ffe26f",
    "float16[8]": "ee4f7338dae1868269ee4858cb64ec6b",
    "int8[9]": "cb38d4aa8f9ab41f33be730dab8c606d",
    "uint32[2,3]": "33e84422821e3a109a688b44da415300",
    "int64[4]": "327ddfe54256d171ad1882ce9c28e5eb",
    "complex64[3,2]": "376bebaccb6187f0fde3d9a59ae82e67",
    "complex128[2]": "4c79e30b292343e9e0551963ed7e5017",
    "bool[7]": "2c4cef2fe9a6659861ef5e744048bcc4",
    "int4[6]": "eb7a2b292cc2e731a975e1f0b23f585e",
    "float8_e4m3fn[5]": "b14a199e170d881ed826bac355ca3f9e",
    "float32[0,3]": "f809f7ad3c7145a8d17d6082bc425c92",
}


def golden_values(name):
    dtype, _, rest = name.partition("[")
    shape = tuple(int(n) for n in rest.rstrip("]").split(",") if n)
    count = int(np.prod(shape))
    if dtype == "bool":
        return (np.arange(count) % 3 == 0).reshape(shape)
    return (np.arange(count) % 5 - 2).astype(dtype).reshape(shape)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_definition_never_changes(name):
    assert digest(golden_values(name)) == GOLDEN[name]
    assert digest(golden_values(name), compiled.partial) == GOLDEN[name]


# -- pieces ---------------------------------------------------------------------------------------

CUTS = [(1, 1, 1), (2, 2, 2), (7, 5, 6), (7, 5, 1), (1, 5, 6), (3, 5, 6), (7, 2, 6), (4, 1, 6), (7, 1, 4)]  # fmt: skip


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64", "complex128"])
def test_the_sums_of_pieces_are_those_of_the_whole_in_any_order(dtype, cut):
    values = patterned(dtype, (7, 5, 6))
    pieces = list(tiles(whole(values.shape), cut))
    random.Random(1).shuffle(pieces)
    expected = reference.partial(values, whole(values.shape), values.shape)
    assert of_pieces(reference.partial, values, pieces) == expected
    assert of_pieces(compiled.partial, values, pieces) == expected


@pytest.mark.parametrize("dtype", ["int4", "bool", "uint8", "bfloat16", "float32", "int64"])
@pytest.mark.parametrize(
    "shape, start, stop",
    [
        ((700, 300), (0, 0), (700, 300)),  # one run, a block and a rest
        ((1000, 512), (3, 128), (903, 384)),  # runs of whole groups
        ((2000, 99), (1, 7), (1999, 40)),  # runs of any length
        ((2, 40_000, 3), (0, 0, 1), (2, 40_000, 2)),  # runs of one element
        ((2, 200_000), (0, 1), (2, 150_001)),  # runs longer than a block of either form
        ((40_961,), (0,), (40_961,)),
    ],
)
def test_the_compiled_form_agrees_whatever_the_runs(dtype, shape, start, stop):
    box = Box(start, stop)
    values = patterned(dtype, box.shape)
    found = compiled.partial(values, box, shape)
    assert found == reference.partial(values, box, shape)
    cut = tuple(max(1, -(-n // 2)) for n in shape)
    pieces = [
        compiled.partial(values[piece.within(box)], piece, shape) for piece in tiles(box, cut)
    ]
    assert functools.reduce(reference.add, pieces) == found


@pytest.mark.parametrize(
    "shape, box",
    [
        ((2**33,), Box((2**32 - 3,), (2**32 + 4,))),
        ((2**20, 2**14), Box((2**18 - 1, 5), (2**18 + 1, 8))),
        ((2**40,), Box((2**40 - 4,), (2**40,))),
        ((3, 2**32 + 1), Box((0, 2**32 - 2), (3, 2**32 + 1))),
    ],
)
@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64"])
def test_positions_beyond_32_bits_count_in_full(dtype, shape, box):
    values = patterned(dtype, box.shape)
    strides = [int(np.prod(shape[d + 1 :], dtype=object)) for d in range(len(shape))]
    each = max(1, values.dtype.itemsize // 4)
    positions = [
        sum(i * n for i, n in zip(index, strides, strict=True)) * each + word
        for index in itertools.product(*(range(*ab) for ab in zip(*box, strict=True)))
        for word in range(each)
    ]
    expected = plain_digest(plain_words(values), dtype, shape, positions)
    for form in (reference.partial, compiled.partial):
        assert reference.finish(form(values, box, shape), dtype, shape) == expected


@pytest.mark.parametrize(
    "shape, start, stop",
    [
        ((2**33,), (2**32 - 70_001,), (2**32 + 70_000,)),
        ((2**33,), (2**32,), (2**32 + 140_000,)),
        ((2**17, 2**17), (2**15 - 100, 0), (2**15 + 100, 1024)),
        ((2**18, 99_999), (42_900, 1), (43_000, 1334)),
    ],
)
def test_the_compiled_form_agrees_across_and_beyond_32_bits(shape, start, stop):
    box = Box(start, stop)
    values = patterned("bfloat16", box.shape)
    assert compiled.partial(values, box, shape) == reference.partial(values, box, shape)


def test_values_that_are_not_those_of_the_box_are_refused():
    for form in (reference.partial, compiled.partial):
        with pytest.raises(ValueError, match="not those of the box"):
            form(np.zeros(3), Box((0,), (4,)), (4,))
        with pytest.raises(ValueError, match="no digest"):
            form(np.array(["a"]), Box((0,), (1,)), (1,))


def test_only_the_value_of_an_element_counts_and_not_how_the_host_holds_it():
    values = patterned("float32", (8, 6))
    for same in (values.astype(">f4"), np.asfortranarray(values), values[::-1].copy()[::-1]):
        assert digest(same) == digest(values) == digest(same, compiled.partial)
    narrow = np.array([-2, 7, -8, 0], ml_dtypes.int4)
    extended = np.array([-2, 7, -8, 0], np.int8).view(ml_dtypes.int4)  # sign in the upper half
    assert digest(extended) == digest(narrow) == digest(extended, compiled.partial)
    true = np.array([2, 0, 1], np.uint8).view(bool)
    assert digest(true) == digest(np.array([True, False, True]))


def test_dtype_and_shape_are_part_of_the_digest():
    zeros = [np.zeros(shape, dtype) for dtype in ("float32", "int32", "uint32", "uint8", "float64")
             for shape in ((), (1,), (4,), (2, 2), (4, 1), (1, 4), (0,), (0, 4), (4, 0))]  # fmt: skip
    assert len({digest(values) for values in zeros}) == len(zeros)


# -- what changes it ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bool", "int4", "uint8", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("fill", ["zeros", "ones", "any"])
def test_every_single_bit_counts(dtype, fill):
    shape = (4, 8)
    values = {"zeros": np.zeros, "ones": np.ones, "any": lambda s, d: patterned(d.name, s)}[fill](
        shape, np.dtype(dtype)
    )
    bits = {"bool": 1, "int4": 4}.get(dtype, 8)
    raw = values.view(np.uint8).reshape(-1)
    found = {digest(values)}
    for byte, bit in itertools.product(range(raw.size), range(bits)):
        raw[byte] ^= 1 << bit
        found.add(digest(values))
        raw[byte] ^= 1 << bit
    assert len(found) == 1 + raw.size * bits


def test_every_swap_counts():
    values = patterned("float32", (40,))
    found = {digest(values)}
    for i, j in itertools.combinations(range(values.size), 2):
        swapped = values.copy()
        swapped[[i, j]] = values[[j, i]]
        found.add(digest(swapped))
    assert len(found) == 1 + 40 * 39 // 2


def test_shifts_zero_runs_and_equal_values_count():
    values = patterned("bfloat16", (64, 16))
    found = [digest(np.roll(values.reshape(-1), k).reshape(64, 16)) for k in range(values.size)]
    found += [digest(np.roll(values, k, axis=1)) for k in range(1, 16)]
    found += [digest(np.full((64, 16), v, ml_dtypes.bfloat16)) for v in (0, -0.0, 1, -1, 2, np.nan)]
    found += [digest(values[::-1]), digest(values[:, ::-1]), digest(-values)]
    for begin, length in itertools.product(range(0, 64, 8), (1, 8, 16)):
        gone = values.copy()
        gone[begin : begin + length] = 0
        found.append(digest(gone))
    # the last two zero runs of the last begin are the same
    assert len(set(found)) == len(found) - 1


# What a mix has to be, tried on many words at once. Each lane alone is looked at: were changes to
# cancel in a lane more often than by chance, the four together would be weaker than 128 bits.

COUNT = 2**14


def mixes(words, positions):
    """The four numbers of each word, through sums of one word each."""
    k1, k2 = reference.high_keys(0)
    a, b = words ^ np.uint32(k2), positions ^ np.uint32(k1)

    def f(x, number):
        x = (x ^ (x >> np.uint32(16))) * np.uint32(reference.MULTIPLIERS[number])
        return x ^ (x >> np.uint32(15))

    lanes = []
    for number in (0, 2, 4):
        a = a + f(b, number)
        lanes.append(a)
        b = b ^ f(a, number + 1)
        lanes.append(b)
    return np.stack(lanes[2:])


def test_the_mixes_looked_at_below_are_those_of_the_library():
    words, positions = patterned("uint32", (50,)), np.arange(50, dtype=np.uint32)
    for word, position, found in zip(words, positions, mixes(words, positions).T, strict=True):
        assert tuple(found) == plain_mix(int(word), int(position))


def words_of(kind):
    if kind == "any":
        return patterned("uint32", (COUNT,), seed=3)
    if kind == "ascending":
        return np.arange(COUNT, dtype=np.uint32)
    return np.full(COUNT, {"zero": 0, "one": 0x3F800000, "half": 0x3F80}[kind], np.uint32)


@pytest.mark.parametrize("kind", ["zero", "one", "half", "any", "ascending"])
@pytest.mark.parametrize("spread", [0, 18], ids=["near", "far"])
def test_no_two_changes_of_one_bit_cancel_more_often_than_by_chance(kind, spread):
    """A bit set here and cleared there, or set in both: differences that are equal or opposite.

    Of 2**14 differences of a lane, 2**27 pairs, 1/16 is either by chance, and is met twice below.
    That of a Poisson number of this mean is above 6 has a probability of 7e-13.
    """
    words, positions = words_of(kind), np.arange(COUNT, dtype=np.uint32) << np.uint32(spread)
    before = mixes(words, positions)
    for bit in range(32):
        change = mixes(words ^ np.uint32(1 << bit), positions) - before
        for lane in change:
            both = np.concatenate([lane, -lane])
            assert both.size - np.unique(both).size <= 2 * 6


@pytest.mark.parametrize("kind", ["one", "any", "ascending"])
@pytest.mark.parametrize("distance", [1, 2, 128, 2**16, 2**30, 2**31])
def test_swaps_and_moves_of_a_value_do_not_cancel(kind, distance):
    words, positions = words_of(kind), np.arange(COUNT, dtype=np.uint32)
    other = positions ^ np.uint32(distance)
    for changed in (words ^ np.uint32(1 << 31), words + np.uint32(1), words * np.uint32(3)):
        swapped = (mixes(changed, positions) + mixes(words, other)) - (
            mixes(words, positions) + mixes(changed, other)
        )
        for lane in swapped:
            moved = lane[words != changed]
            assert np.count_nonzero(moved == 0) <= 4  # 2**-18 expected; each comes with its mirror


@pytest.mark.parametrize("delta", [1, 2, 3, 256, 2**16, 2**31 - 1])
def test_adding_here_and_subtracting_there_does_not_cancel(delta):
    rng = np.random.default_rng(delta)
    words = words_of("any")
    here, there = np.arange(COUNT, dtype=np.uint32), rng.permutation(COUNT).astype(np.uint32)
    there += np.uint32(COUNT)
    d = np.uint32(delta)
    change = mixes(words + d, here) - mixes(words, here)
    change += mixes(words[::-1] - d, there) - mixes(words[::-1], there)
    for lane in change:
        assert np.count_nonzero(lane == 0) <= 2  # 2**-18 expected: 3 have a chance of 1e-17
        for part in (lane & np.uint32(255), lane >> np.uint32(24)):
            # chi-square with 255 degrees of freedom: mean 255, deviation 22.6
            counts = np.bincount(part.astype(np.int64), minlength=256)
            assert ((counts - COUNT / 256) ** 2 / (COUNT / 256)).sum() < 255 + 7 * 22.6


@pytest.mark.parametrize("kind", ["zero", "any", "ascending"])
def test_every_bit_of_a_word_and_its_position_turns_half_of_every_lane(kind):
    """A share of 2**14 tosses has a standard deviation of 0.5 / 2**7; 8,192 shares are taken, each
    within 6.5 of these with a probability of 1 - 8e-11."""
    words, positions = words_of(kind), patterned("uint32", (COUNT,), seed=4)
    before = mixes(words, positions)
    for bit in range(32):
        flip = np.uint32(1 << bit)
        for after in (mixes(words ^ flip, positions), mixes(words, positions ^ flip)):
            turned = np.unpackbits((after ^ before).view(np.uint8).reshape(4, COUNT, 4), axis=2)
            shares = turned.mean(axis=1)
            assert np.abs(shares - 0.5).max() < 6.5 * 0.5 / 2**7


def test_random_sets_of_changes_never_give_the_same_digest():
    rng = np.random.default_rng(7)
    values = patterned("float32", (16, 16)).view(np.uint32)
    found = {digest(values)}
    for _ in range(3000):
        changed = values.copy().reshape(-1)
        places = rng.choice(256, 2 * rng.integers(1, 5), replace=False)
        deltas = rng.integers(1, 2**32, places.size // 2, np.uint32)
        changed[places] += np.concatenate([deltas, -deltas])  # the plain sum stays
        assert changed.sum(dtype=np.uint32) == values.sum(dtype=np.uint32)
        found.add(digest(changed.reshape(16, 16)))
    assert len(found) == 3001


# -- arrays on devices ----------------------------------------------------------------------------


def on_device(array):
    """`of_array` with every shard summed by its device, as on an accelerator."""
    sums, seen = reference.ZERO, set()
    for shard in array.addressable_shards:
        box = Box(*zip(*(s.indices(n)[:2] for s, n in zip(shard.index, array.shape, strict=True)),
                       strict=True)) if array.ndim else Box((), ())  # fmt: skip
        if box.size and box not in seen:
            found = compiled.start_on_device(shard.data, box, array.shape)
            sums = reference.add(sums, compiled._as_sums(found))
        seen.add(box)
    return reference.finish(sums, stored_dtype(array.dtype.name), array.shape)


def as_stored(values):
    return values.view(stored_dtype(values.dtype.name))


@pytest.mark.parametrize("dtype", ON_DEVICES)
def test_a_sharded_array_has_the_digest_of_its_values(mesh42, dtype):
    values = patterned(dtype, (8, 12))
    expected = digest(as_stored(values))
    array = jax.device_put(values, NamedSharding(mesh42, P("model")))
    assert compiled.of_array(array) == expected
    assert on_device(array) == expected


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128"])
def test_wide_arrays_have_the_digest_of_their_values(mesh8, dtype):
    values = patterned(dtype, (8, 3))
    with jax.enable_x64(True):
        array = jax.device_put(values, NamedSharding(mesh8, P("x")))
        assert array.dtype == dtype
        assert compiled.of_array(array) == digest(values) == on_device(array)


SPECS = [P(), P("data"), P("model"), P(None, "data"), P("model", "data"), P(("data", "model")),
         P(None, ("model", "data")), P(None, None, "model"), P("data", None, "model")]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_sharding_gives_the_same_digest(mesh42, spec):
    values = patterned("float32", (8, 16, 6))
    expected = digest(values)
    turned = Mesh(mesh42.devices[::-1, ::-1], ("data", "model"))
    shuffled = np.random.default_rng(0).permutation(mesh42.devices.reshape(-1))
    for mesh in (mesh42, turned, Mesh(shuffled.reshape(4, 2), ("data", "model"))):
        array = jax.device_put(values, NamedSharding(mesh, spec))
        assert compiled.of_array(array) == expected
    assert on_device(array) == expected


@pytest.mark.parametrize("shape", [(), (0,), (8, 0), (1,)])
def test_arrays_of_one_element_or_none_have_a_digest_too(mesh8, shape):
    values = patterned("float32", shape)
    for sharding in (
        NamedSharding(mesh8, P()),
        jax.sharding.SingleDeviceSharding(jax.devices()[3]),
    ):
        array = jax.device_put(values, sharding)
        assert compiled.of_array(array) == digest(values) == on_device(array)


def test_a_large_array_on_a_mesh_has_the_digest_of_its_values(mesh42):
    values = patterned("bfloat16", (1024, 1536))
    for spec in (P(), P("data"), P(None, "model"), P("model", "data")):
        array = jax.device_put(values, NamedSharding(mesh42, spec))
        assert compiled.of_array(array) == digest(values) == on_device(array)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "complex64"])
@pytest.mark.parametrize(
    "shape, start",
    [
        ((2**33,), (2**32 - 3,)),
        ((2**33,), (2**32 + 5,)),
        ((2**18, 2**15, 3), (2**15 - 5, 2**14, 1)),
        ((2**30, 2**20), (2**29, 2**19)),
        ((5, 2**31 - 1, 7), (0, 0, 3)),
    ],
)
def test_a_device_counts_positions_beyond_32_bits_in_full(dtype, shape, start):
    size = (5, 4, 2)[: len(shape)] if len(shape) != 1 else (50,)
    box = Box(start, tuple(a + n for a, n in zip(start, size, strict=True)))
    values = patterned(dtype, box.shape)
    found = compiled.start_on_device(jnp.asarray(values), box, shape)
    assert compiled._as_sums(found) == reference.partial(values, box, shape)


def test_only_the_boxes_asked_for_are_summed(mesh8):
    values = patterned("float32", (16, 4))
    array = jax.device_put(values, NamedSharding(mesh8, P("x")))
    boxes = list(tiles(whole(values.shape), (2, 4)))
    halves = [compiled.sums_of_array(array, set(boxes[k::2])) for k in range(2)]
    assert halves[0] == of_pieces(reference.partial, values, boxes[::2])
    assert reference.add(*halves) == compiled.sums_of_array(array)


def test_an_array_that_was_digested_can_still_be_donated(mesh8):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    for sharding in (
        NamedSharding(mesh8, P("x")),
        jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    ):
        array = step(jax.device_put(np.zeros((2**16, 8), np.float32), sharding))
        places = [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
        compiled.of_array(array)
        after = step(array)
        assert [s.data.unsafe_buffer_pointer() for s in after.addressable_shards] == places


def test_many_shapes_share_a_few_programs():
    before = set(compiled._PROGRAMS)
    for k in range(60):
        shape = (101 + k, 307 + 3 * k)
        values = np.full(shape, k, np.float32)
        half = Box((0, 5), (shape[0], 105))
        assert compiled.partial(values[:, 5:105], half, shape) == reference.partial(
            values[:, 5:105], half, shape
        )
        compiled.partial(values, whole(shape), shape)
    assert len(set(compiled._PROGRAMS) - before) <= 4


def test_threads_with_settings_of_their_own_get_the_same_digest():
    values = patterned("float32", (300, 300))
    expected, found = digest(values), []

    def run(settings, anew):
        with settings:
            if anew:
                compiled._PROGRAMS.clear()
            found.append(digest(values, compiled.partial))

    def settings():
        return [jax.enable_x64(True), jax.transfer_guard("disallow"), jax.disable_jit(),
                jax.default_device(jax.devices()[5]), jax.numpy_rank_promotion("raise"),
                jax.numpy_dtype_promotion("strict")]  # fmt: skip

    for each in settings():  # each compiles
        run(each, True)
    compiled._PROGRAMS.clear()
    threads = [threading.Thread(target=run, args=(each, False)) for each in settings()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 12


def test_an_xla_that_knows_no_such_option_compiles_without_it(monkeypatch):
    monkeypatch.setattr(compiled, "_WIDE_VECTORS", {"xla_no_such_option": "1"})
    monkeypatch.setattr(compiled, "_PROGRAMS", {})
    values = patterned("float32", (300, 300))
    assert digest(values, compiled.partial) == digest(values)


def test_without_a_cpu_backend_the_form_in_numpy_does(monkeypatch):
    monkeypatch.setattr(compiled, "_cpu", lambda: None)
    values = patterned("float32", (300, 300))
    assert digest(values, compiled.partial) == digest(values)
