"""Every kind of leaf comes back bit for bit; what cannot be stored is refused by its path."""

import collections
import datetime
import fractions
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ckptmgr
from tests.support import trees

# Types that JAX has on every backend; each as numpy has it.
DEVICE_DTYPES = [
    "bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16",
    "float32", "complex64", "int2", "int4", "uint2", "uint4", "float4_e2m1fn", "float8_e3m4",
    "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
HOST_DTYPES = [
    *DEVICE_DTYPES, "int64", "uint64", "float64", "complex128", "float6_e2m3fn", "float6_e3m2fn",
]  # fmt: skip
# Sign, exponent and mantissa corners: -0.0, subnormals, infinities, quiet and signalling NaN
# with a payload.
PATTERNS = {
    2: [0, 0x8000, 1, 0x8001, 0x7C00, 0xFC01, 0x7E55, 0xFE01, 0x7F80, 0x7FC1, 0xFFA5, 0x3C00],
    4: [0, 1 << 31, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC01234, 0xFFC00001, 0x7F800001],
    8: [0, 1 << 63, 1, 0x7FF0000000000000, 0x7FF8000000001234, 0xFFF0000000000001, 0x3FB999999999999A],
}  # fmt: skip


def patterned(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values of a dtype whose bits are all the corner cases there are, repeated to the shape."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape))
    if kind == np.bool_:
        return np.resize(np.array([True, False, False]), shape)
    if kind.itemsize == 1:
        width = next(
            (b for b in (2, 4, 6) if dtype.startswith((f"int{b}", f"uint{b}", f"float{b}_"))), 8
        )
        return np.resize(_low(kind, width), size).reshape(shape)
    word = 4 if dtype == "complex64" else 8 if dtype == "complex128" else kind.itemsize
    count = size * kind.itemsize // word
    words = np.resize(np.array(PATTERNS[word], f"uint{8 * word}"), count)
    return words.view(kind).reshape(shape)


def _low(kind: np.dtype, width: int) -> np.ndarray:
    if kind.name.startswith(("int", "uint")) and width < 8:
        info = ml_dtypes.iinfo(kind)
        return np.arange(info.min, info.max + 1).astype(kind)
    return np.arange(2**width, dtype=np.uint8).view(kind)


def keys(impl: str, shape: tuple[int, ...]) -> jax.Array:
    """Typed keys made without a compilation."""
    width = {"threefry2x32": 2}.get(impl, 4)
    data = np.random.default_rng(1).integers(0, 2**32, (*shape, width), np.uint32)
    return jax.random.wrap_key_data(data, impl=impl)


def round_trip(root, tree, **options):
    """Saves; gives what comes back without a target, with one, and with one of bare shapes."""
    trees.save(root, tree, **options)
    with ckptmgr.CheckpointManager(root) as manager:
        as_saved = manager.restore()
        target = trees.abstract(tree)
        placed = manager.restore(target)
        trees.assert_same_tree(placed, tree)
        for value, goal in zip(jax.tree.leaves(placed), jax.tree.leaves(target), strict=True):
            if isinstance(goal, jax.ShapeDtypeStruct):
                assert isinstance(value, jax.Array) and value.sharding == goal.sharding
        trees.assert_same_tree(manager.restore(trees.without_sharding(tree)), tree)
        trees.assert_same_tree(manager.restore(tree), tree)
    trees.assert_same_tree(as_saved, tree)
    return as_saved


def test_arrays_of_every_dtype_on_one_device_come_back_bit_for_bit(tmp_path):
    shapes = [(), (1,), (5,), (1, 1), (3, 7), (257,), (2, 1), (1, 2, 1, 2, 1, 2, 1, 1, 3)]
    tree = {d: [jax.device_put(patterned(d, s)) for s in shapes] for d in DEVICE_DTYPES}
    back = round_trip(tmp_path, tree)
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(back))


def test_arrays_of_every_dtype_on_eight_devices_come_back_bit_for_bit(tmp_path, mesh8):
    placed = [
        ((8,), P("x")), ((40, 3), P("x", None)), ((5, 8), P(None, "x")), ((264,), P("x")),
        ((5,), P()), ((), P()), ((8, 1), P("x", None)), ((1, 3, 16), P(None, None, "x")),
    ]  # fmt: skip
    tree = {
        d: [jax.device_put(patterned(d, s), NamedSharding(mesh8, spec)) for s, spec in placed]
        for d in DEVICE_DTYPES
    }
    round_trip(tmp_path, tree)


def test_arrays_of_two_mesh_axes_and_of_single_devices_come_back_in_their_place(tmp_path, mesh42):
    devices = jax.devices()
    tree = {
        "s": jax.device_put(patterned("bfloat16", (8, 6)), NamedSharding(mesh42, P("data", "model"))),
        "both": jax.device_put(patterned("int4", (16,)), NamedSharding(mesh42, P(("data", "model")))),
        "swapped": jax.device_put(patterned("float32", (2, 4)), NamedSharding(mesh42, P("model", "data"))),
        "r": jax.device_put(patterned("float32", (3,)), NamedSharding(mesh42, P())),
        "partly": jax.device_put(patterned("float16", (4, 3)), NamedSharding(mesh42, P("data"))),
        "single": jax.device_put(patterned("float32", (3, 3)), devices[3]),
        "np": patterned("float64", (4,)),
        "host": 0.1,
    }  # fmt: skip
    back = round_trip(tmp_path, tree)
    assert type(back["np"]) is np.ndarray and type(back["host"]) is float


def test_numpy_arrays_of_every_dtype_come_back_bit_for_bit(tmp_path):
    shapes = [(), (5,), (0,), (3, 7), (1, 1)]
    tree = {d: [patterned(d, s) for s in shapes] for d in HOST_DTYPES}
    back = round_trip(tmp_path, tree)
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(back))


def test_numpy_arrays_of_any_layout_and_byte_order_come_back_by_value(tmp_path):
    base = patterned("float32", (8, 6))
    tree = {
        "big_endian": base.astype(">f4"),
        "big_int": np.arange(7, dtype=">i8") - 3,
        "big_complex": (np.arange(4) + 2j).astype(">c16"),
        "transposed": base.T,
        "reversed": base[::-1, ::-2],
        "fortran": np.asfortranarray(base),
        "broadcast": np.broadcast_to(np.int16(7), (3, 4)),
        "read_only": np.frombuffer(b"\x01\x02\x03\x04", "<u2"),
        "subclass": base[:2].view(np.matrix),
    }
    trees.save(tmp_path, tree)
    back = ckptmgr.restore(tmp_path)
    trees.assert_same_leaves(back, tree)
    assert all(leaf.dtype.isnative and leaf.flags.writeable for leaf in back.values())
    trees.assert_same_leaves(ckptmgr.restore(tmp_path, tree), tree)


def test_arrays_without_elements_keep_shape_and_dtype(tmp_path, mesh8):
    shapes = {"a": (0,), "b": (0, 8), "c": (3, 0), "d": (0, 0), "e": (1, 0, 3)}
    tree = {}
    for dtype in ("float32", "bfloat16", "int8", "uint4", "bool", "float8_e4m3"):
        host = {name: np.zeros(shape, dtype) for name, shape in shapes.items()}
        tree[dtype] = {
            "np": host,
            "one": jax.device_put(host),
            "replicated": jax.device_put(host, NamedSharding(mesh8, P())),
            "split": jax.device_put({"a": host["a"], "b": host["b"]}, NamedSharding(mesh8, P("x"))),
        }
    tree["full"] = jnp.arange(3)
    round_trip(tmp_path, tree)
    assert ckptmgr.describe(tmp_path).info.nbytes == 12


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys_come_back_with_their_stream(tmp_path, mesh8, impl):
    key = jax.random.key(7, impl=impl)
    split = NamedSharding(mesh8, P("x"))
    tree = {
        "one": key,
        "batch": keys(impl, (5,)),
        "grid": keys(impl, (2, 3)),
        "no": keys(impl, (0, 2)),
        "sharded": jax.device_put(keys(impl, (8,)), split),
        "rows": jax.device_put(keys(impl, (8, 3)), split),
        "columns": jax.device_put(keys(impl, (3, 8)), NamedSharding(mesh8, P(None, "x"))),
        "replicated": jax.device_put(key, NamedSharding(mesh8, P())),
        "legacy": jax.random.PRNGKey(3),
    }
    back = round_trip(tmp_path, tree)
    assert type(back["legacy"]) is np.ndarray and back["legacy"].dtype == np.uint32
    assert np.array_equal(jax.random.bits(back["one"], (9,)), jax.random.bits(key, (9,)))
    kinds = {leaf.dotted: leaf.kind for leaf in ckptmgr.describe(tmp_path).leaves["default"]}
    assert kinds["one"] == kinds["sharded"] == "key" and kinds["legacy"] == "array"


def test_keys_restored_into_bare_shapes_are_keys(tmp_path):
    make = functools.partial(jax.tree.map, jax.random.key)
    trees.save(tmp_path, make({"a": 1, "b": 2}))
    back = ckptmgr.restore(tmp_path, jax.eval_shape(lambda: make({"a": 0, "b": 0})))
    trees.assert_same_tree(back, make({"a": 1, "b": 2}))


def test_a_key_of_another_implementation_is_a_mismatch_and_not_a_cast(tmp_path):
    trees.save(tmp_path, {"k": jax.random.key(1, impl="rbg"), "raw": jax.random.PRNGKey(1)})
    like = {"k": jax.random.key(1, impl="unsafe_rbg"), "raw": jax.random.PRNGKey(0)}
    with pytest.raises(ckptmgr.TreeMismatch) as caught:
        ckptmgr.restore(tmp_path, like, cast=True)
    assert set(caught.value.differing) == {"k"} and "rbg" in caught.value.differing["k"]
    for swapped in ({**like, "k": jnp.zeros((4,), jnp.uint32)}, {**like, "raw": jax.random.key(0)}):
        with pytest.raises(ckptmgr.TreeMismatch):
            ckptmgr.restore(tmp_path, swapped)


def test_python_scalars_keep_type_and_value(tmp_path):
    tree = {
        "i": 7, "f": 0.1, "t": True, "u": False, "big": 2**53 + 1, "least": -(2**63), "z": 2**63 - 1,
        "over": 2**63, "huge": 2**100, "huger": -(2**4000), "c": 1 + 2j, "nz": -0.0, "inf": float("-inf"),
        "tiny": 5e-324,
    }  # fmt: skip
    back = round_trip(tmp_path, tree)
    assert back["f"] == 0.1 and type(back["t"]) is bool and type(back["i"]) is int
    assert str(back["nz"]) == "-0.0"
    trees.save(tmp_path / "nan", {"f": float("nan"), "c": complex("nan+infj")})
    found = ckptmgr.restore(tmp_path / "nan")
    assert found["f"] != found["f"] and found["c"].imag == float("inf")


def test_numpy_scalars_keep_their_type(tmp_path):
    names = ["bool", "int8", "int64", "uint64", "float16", "float32", "float64", "complex64",
             "complex128", "bfloat16", "float8_e5m2", "int4", "uint4", "float4_e2m1fn"]  # fmt: skip
    tree = {name: np.dtype(name).type(1) for name in names}
    tree |= {"tenth": np.float64(0.1), "last": np.uint64(2**64 - 1)}
    trees.save(tmp_path, tree)
    for back in (ckptmgr.restore(tmp_path), ckptmgr.restore(tmp_path, tree)):
        assert {k: type(v) for k, v in back.items()} == {k: type(v) for k, v in tree.items()}
        assert back == tree


def test_strings_and_bytes_come_back_as_they_were(tmp_path):
    tree = {
        "s": "héllo \U0001f600\n\t\"quoted\" \\ ", "empty": "", "nul": "a\0b", "long": "x" * 70000,
        "np": np.str_("numpy's"), "b": b"\x00\xff bytes", "none": b"", "array": bytearray(b"ab"),
        "npb": np.bytes_(b"xy"), "w": np.arange(3),
    }  # fmt: skip
    trees.save(tmp_path, tree)
    plain = {**tree, "np": "numpy's", "array": b"ab", "npb": b"xy"}
    for back in (ckptmgr.restore(tmp_path), ckptmgr.restore(tmp_path, tree)):
        trees.assert_same_leaves(back, plain)


def test_a_string_that_json_cannot_spell_comes_back_or_is_refused_at_once(tmp_path):
    odd = {"s": "lone \ud800 surrogate", "w": np.arange(3)}
    with ckptmgr.CheckpointManager(tmp_path) as manager:
        before = trees.files_below(tmp_path)
        try:
            manager.save(1, odd)
        except ckptmgr.UnsupportedLeaf as exc:
            assert exc.leaf == "s" and trees.files_below(tmp_path) == before
            return
        manager.wait()
    assert ckptmgr.restore(tmp_path)["s"] == odd["s"]


class TorchLike:
    """What a foreign tensor looks like."""

    shape = (2,)
    dtype = "torch.float32"

    def numpy(self):
        return np.zeros(2)


NOT_STORABLE = {
    "object array": np.array(["x", None], object),
    "string array": np.array(["x", "yy"]),
    "bytes array": np.array([b"x", b"yy"]),
    "times": np.array(["2020-01-01"], "datetime64[D]"),
    "time": np.datetime64("2020-01-01"),
    "span": np.timedelta64(3, "s"),
    "record": np.zeros(2, [("a", "f4"), ("b", "i4")]),
    "void": np.void(b"abc"),
    "masked": np.ma.masked_array([1.0, 2.0], mask=[True, False]),
    "longdouble": np.longdouble(1),
    "lambda": lambda x: x,
    "function": np.sum,
    "class": float,
    "torch": TorchLike(),
    "set": {1, 2},
    "date": datetime.date(2020, 1, 1),
    "fraction": fractions.Fraction(1, 3),
    "generator": np.random.default_rng(0),
    "abstract": jax.ShapeDtypeStruct((2,), jnp.float32),
    "float0": np.zeros((2,), jax.dtypes.float0),
    "deque": collections.UserDict(a=1),
}


@pytest.mark.parametrize("kind", NOT_STORABLE)
def test_a_leaf_that_cannot_be_stored_is_refused_by_path_before_anything_is_written(tmp_path, kind):
    with ckptmgr.CheckpointManager(tmp_path) as manager:
        before = trees.files_below(tmp_path)
        state = {"ok": jnp.ones(3), "deep": [1, {"bad": NOT_STORABLE[kind]}]}
        with pytest.raises(ckptmgr.UnsupportedLeaf) as caught:
            manager.save(1, state)
        assert caught.value.leaf == "deep.1.bad"
        assert "deep.1.bad" in str(caught.value)
        assert trees.files_below(tmp_path) == before
        assert manager.saves_in_flight == 0 and manager.steps() == ()
        manager.save(1, {"ok": jnp.ones(3)})  # the manager is none the worse
        manager.wait()
        assert manager.latest_step() == 1


def test_save_inside_jit_is_refused_by_the_path_of_the_traced_leaf(tmp_path):
    with ckptmgr.CheckpointManager(tmp_path) as manager:
        before = trees.files_below(tmp_path)

        @jax.jit
        def step(state):
            manager.save(1, state)
            return state

        with pytest.raises(ckptmgr.UnsupportedLeaf, match="jit") as caught:
            step({"params": {"w": jnp.ones(3)}})
        assert caught.value.leaf == "params.w"
        assert trees.files_below(tmp_path) == before


def test_an_array_that_was_deleted_is_named_before_anything_is_written(tmp_path):
    gone = jnp.ones(3)
    gone.delete()
    with ckptmgr.CheckpointManager(tmp_path) as manager:
        before = trees.files_below(tmp_path)
        with pytest.raises(ckptmgr.SnapshotLost, match="params.w") as caught:
            manager.save(4, {"params": {"w": gone}})
        assert (caught.value.leaf, caught.value.step) == ("params.w", 4)
        assert trees.files_below(tmp_path) == before


@pytest.mark.parametrize(
    "storage",
    [
        ckptmgr.Storage(chunk_bytes=4096),
        ckptmgr.Storage(chunk_bytes=1000),
        ckptmgr.Storage(chunk_bytes=1),
        ckptmgr.Storage(driver="zarr3"),
        ckptmgr.Storage(compression="zstd"),
        ckptmgr.Storage(driver="zarr3", compression="zstd", chunk_bytes=100),
    ],
    ids=["4KiB", "1000", "1 byte", "zarr3", "zstd", "zarr3 zstd 100"],
)
def test_any_chunk_size_driver_and_compression_is_bit_exact(tmp_path, mesh42, mesh8, storage):
    aim = storage.chunk_bytes or 2 * 2**20  # the least of the usual sizes
    tiny = aim < 1000
    big = 8 if tiny else 64

    def put(dtype, shape, spec, mesh=mesh42):
        return jax.device_put(patterned(dtype, shape), NamedSharding(mesh, spec))

    tree = {
        "square": put("float32", (big, big), P("data", "model")),
        "odd": put("bfloat16", (2 * big, 3), P("data", None)),
        "wide": put("float32", (1, 16 * big), P(None, "x"), mesh8),
        "both": put("uint4", (2 * big, 3), P(("data", "model"))),
        "replicated": put("float32", (7, 11), P()),
        "key": jax.device_put(keys("rbg", (8,)), NamedSharding(mesh8, P("x"))),
        "np": patterned("complex128", (5, 3)),
        "zero": put("float32", (0, 8), P()),
        "zeros": put("int32", (8, 8), P()) * 0,
        "scalar": 0.1,
    }
    round_trip(tmp_path, tree, storage=storage)
    found = ckptmgr.describe(tmp_path)
    sizes = {
        leaf.dotted: int(np.prod(leaf.chunk)) * np.dtype(leaf.stored_dtype).itemsize
        for leaf in found.leaves["default"]
        if leaf.has_array
    }
    smallest = {"square": 4, "odd": 2, "wide": 4, "both": 1, "replicated": 4, "np": 16, "zeros": 4}
    for name, least in smallest.items():
        assert sizes[name] <= max(aim, least), name
    edge = tree["square"].sharding.shard_shape((big, big))
    square = next(leaf for leaf in found.leaves["default"] if leaf.dotted == "square")
    if sizes["square"] < big * big * 4:  # cut: then no chunk lies in two shards
        assert all(size % part == 0 for size, part in zip(edge, square.chunk, strict=True))


def test_leaf_options_leave_out_cast_and_cut_by_name(tmp_path, mesh8):
    split = NamedSharding(mesh8, P("x"))
    tree = {
        "params": {"w": jax.device_put(np.linspace(0, 1, 64, dtype=np.float32), split), "n": jnp.arange(3)},
        "opt": [jnp.ones(4), {"mu": np.ones((2, 2), np.float32)}],
        "big": np.arange(4096, dtype=np.float32),
        "key": jax.random.key(0),
    }  # fmt: skip
    rules = (
        ckptmgr.LeafRule("opt.*", exclude=True),
        ckptmgr.LeafRule("params.*", cast="bfloat16"),
        ckptmgr.LeafRule("big", chunk_bytes=1024),
        ckptmgr.LeafRule("*", cast="float16"),  # the first rule that matches is the one
    )
    trees.save(tmp_path, tree, storage=ckptmgr.Storage(leaf_options=rules))
    back = ckptmgr.restore(tmp_path)
    assert back["params"]["w"].dtype == jnp.bfloat16 and back["params"]["n"].dtype == np.int32
    w = np.asarray(tree["params"]["w"]).astype(jnp.bfloat16)
    trees.assert_same_values(back["params"]["w"], w)
    trees.assert_same_values(back["params"]["n"], tree["params"]["n"])
    trees.assert_same_values(back["big"], tree["big"])
    trees.assert_same_values(back["key"], tree["key"])
    assert back["opt"] == [None, {"mu": None}]
    leaves = {leaf.dotted: leaf for leaf in ckptmgr.describe(tmp_path).leaves["default"]}
    assert set(leaves) == {"params.w", "params.n", "big", "key"}
    assert leaves["big"].chunk == (256,) and leaves["params.w"].stored_dtype == "bfloat16"
    with pytest.raises(ckptmgr.TreeMismatch) as caught:
        ckptmgr.restore(tmp_path, tree, cast=True)
    assert caught.value.missing == ("opt.0", "opt.1.mu")
    like = {k: v for k, v in tree.items() if k != "opt"}
    wide = ckptmgr.restore(tmp_path, like, cast=True)["params"]["w"]
    trees.assert_same_values(wide, w.astype(np.float32))


def test_a_leaf_rule_with_an_unknown_dtype_is_refused():
    with pytest.raises(ckptmgr.InvalidOption, match="float99"):
        ckptmgr.LeafRule("*", cast="float99")
