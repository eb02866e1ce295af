"""What a target asks for is what comes back; what does not fit is refused and named in full."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ckptmgr
from tests.support import trees


def mismatch(root, like, **how):
    """The TreeMismatch that a restore into `like` ends with."""
    with pytest.raises(ckptmgr.TreeMismatch) as caught:
        ckptmgr.restore(root, like, **how)
    return caught.value


def shape(*size, dtype="float32", **more):
    return jax.ShapeDtypeStruct(size, dtype, **more)


# -- what does not fit ------------------------------------------------------------------------


def test_a_mismatch_lists_everything_missing_extra_and_differing(tmp_path):
    stored = {
        "a": {"w": jnp.ones((2, 3)), "b": jnp.ones(3)},
        "gone": [jnp.ones(1), 2],
        "same": 1.5,
        "n": jnp.arange(2),
    }
    trees.save(tmp_path, stored, step=9)
    like = {
        "a": {"w": shape(3, 2), "b": shape(3, dtype="int32"), "c": shape(1)},
        "new": (1, 2),
        "same": 0.0,
        "n": "text",
    }
    found = mismatch(tmp_path, like)
    assert found.missing == ("a.c", "new.0", "new.1")
    assert found.extra == ("gone.0", "gone.1")
    assert set(found.differing) == {"a.w", "a.b", "n"}
    assert "(2, 3)" in found.differing["a.w"] and "(3, 2)" in found.differing["a.w"]
    assert "float32" in found.differing["a.b"] and "int32" in found.differing["a.b"]
    text = str(found)
    assert "step 9" in text and all(
        name in text for name in (*found.missing, *found.extra, *found.differing)
    )


@pytest.mark.parametrize("size", [(8, 5), (4, 4), (32,), (8, 4, 1), (4, 8), (), (16, 4), (0,)])
def test_a_shape_is_never_padded_cut_or_reshaped(tmp_path, size):
    trees.save(tmp_path, {"p": {"w": np.arange(32, dtype=np.float32).reshape(8, 4)}})
    for like in (shape(*size), np.zeros(size, np.float32), jnp.zeros(size)):
        for how in ({}, {"cast": True}, {"partial": True}):
            found = mismatch(tmp_path, {"p": {"w": like}}, **how)
            assert set(found.differing) == {"p.w"}
            assert "(8, 4)" in found.differing["p.w"] and str(size) in found.differing["p.w"]


def test_axes_of_size_one_are_kept(tmp_path, mesh8):
    shapes = [(), (1,), (1, 1), (1, 0, 3), (2, 1), (1, 1, 1, 2, 1, 1, 1, 1, 1)]
    tree = {str(s): np.ones(s, np.float32) for s in shapes}
    tree |= {f"jax{s}": jnp.ones(s) for s in shapes}
    tree["split"] = jax.device_put(np.ones((8, 1)), NamedSharding(mesh8, P("x", None)))
    trees.save(tmp_path, tree)
    back = ckptmgr.restore(tmp_path)
    assert {k: v.shape for k, v in back.items()} == {k: v.shape for k, v in tree.items()}
    trees.assert_same_tree(ckptmgr.restore(tmp_path, tree), tree)
    found = mismatch(tmp_path, {**tree, "(1, 1)": np.ones((1,), np.float32), "(1,)": np.float32(0)})
    assert set(found.differing) == {"(1, 1)", "(1,)"}


def test_another_dtype_is_refused_and_cast_converts_only_floats(tmp_path):
    w = np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4)
    tree = {"w": jnp.asarray(w), "n": w, "step": jnp.int32(7), "legacy": jax.random.PRNGKey(3),
            "mask": jnp.array([True, False]), "count": np.int64(2**40), "c": np.complex64(1 + 2j)}  # fmt: skip
    trees.save(tmp_path, tree)
    bf16 = {
        **tree,
        "w": shape(3, 4, dtype="bfloat16"),
        "n": np.zeros((3, 4), np.float64),
        "c": np.complex128(0),
    }
    found = mismatch(tmp_path, bf16)
    assert set(found.differing) == {"w", "n", "c"} and "cast=True" in found.differing["w"]
    back = ckptmgr.restore(tmp_path, bf16, cast=True)
    trees.assert_same_values(back["w"], w.astype(jnp.bfloat16))
    trees.assert_same_values(back["n"], w.astype(np.float64))
    assert back["c"] == 1 + 2j and type(back["c"]) is np.complex128
    for name in ("step", "legacy", "mask", "count"):
        trees.assert_same_values(back[name], tree[name])


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("i32", "float32"), ("i32", "float64"), ("i32", "int16"), ("i32", "uint32"), ("i32", "bool"), ("u8", "bfloat16"),
        ("b", "float32"), ("b", "int32"), ("f32", "int32"), ("f32", "complex64"), ("c64", "float32"), ("f32", "bool"),
        ("key", "float32"), ("i64", "int32"),
    ],
)  # fmt: skip
def test_cast_never_crosses_kinds_or_narrows_integers(tmp_path, name, target):
    tree = {
        "i32": np.arange(4, dtype=np.int32), "u8": np.arange(4, dtype=np.uint8), "b": np.array([True, False]),
        "f32": np.ones(4, np.float32), "c64": np.ones(4, np.complex64), "key": jax.random.PRNGKey(0),
        "i64": np.arange(4),
    }  # fmt: skip
    trees.save(tmp_path, tree)
    like = {name: np.zeros(np.shape(tree[name]), target)}
    found = mismatch(tmp_path, like, cast=True, partial=True)
    stored = tree[name].dtype.name
    assert set(found.differing) == {name}
    assert stored in found.differing[name] and target in found.differing[name]


def test_cast_widens_integers(tmp_path):
    trees.save(tmp_path, {"a": np.arange(-2, 2, dtype=np.int8), "b": np.arange(4, dtype=np.uint8)})
    back = ckptmgr.restore(
        tmp_path, {"a": np.zeros(4, np.int64), "b": np.zeros(4, np.int16)}, cast=True
    )
    trees.assert_same_tree(back, {"a": np.arange(-2, 2), "b": np.arange(4, dtype=np.int16)})


def test_cast_of_sharded_leaves_converts_on_every_device(tmp_path, mesh42):
    w = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
    trees.save(tmp_path, {"w": jax.device_put(w, NamedSharding(mesh42, P("data", "model")))})
    sharding = NamedSharding(mesh42, P("model"))
    for dtype in ("bfloat16", "float16", "float8_e4m3fn"):
        back = ckptmgr.restore(
            tmp_path, {"w": shape(16, 8, dtype=dtype, sharding=sharding)}, cast=True
        )
        trees.assert_same_values(back["w"], w.astype(dtype))
        assert back["w"].sharding == sharding


def test_partial_reads_the_asked_for_leaves_and_nothing_else(tmp_path):
    tree = {
        "params": {"w": jnp.ones((16, 16)), "b": jnp.ones(16)},
        "opt": [jnp.ones((64, 64))],
        "step": 3,
    }
    trees.save(tmp_path, tree)
    like = {"params": tree["params"]}
    assert mismatch(tmp_path, like).extra == ("opt.0", "step")
    trees.assert_same_tree(ckptmgr.restore(tmp_path, like, partial=True), like)
    plan = ckptmgr.plan_restore(tmp_path, like, partial=True)
    assert plan.wanted_bytes == plan.read_bytes == 16 * 16 * 4 + 16 * 4
    assert mismatch(tmp_path, {**like, "more": 1}, partial=True).missing == ("more",)
    with ckptmgr.CheckpointManager(tmp_path) as manager:
        trees.assert_same_tree(manager.restore(like, partial=True), like)


def test_none_and_an_array_do_not_fit_each_other(tmp_path):
    trees.save(tmp_path, {"a": None, "b": jnp.ones(2), "c": {}, "d": [jnp.ones(1)]})
    found = mismatch(tmp_path, {"a": shape(2), "b": None, "c": {"x": shape(1)}, "d": []})
    assert found.missing == ("a", "c.x") and found.extra == ("b", "d.0")
    back = ckptmgr.restore(tmp_path, {"a": None, "b": shape(2), "c": {}, "d": [shape(1)]})
    assert back["a"] is None and back["c"] == {}


def test_kinds_that_do_not_fit_are_refused_by_name(tmp_path):
    tree = {
        "s": "text",
        "b": b"xy",
        "i": 7,
        "f": 0.5,
        "t": True,
        "big": 2**100,
        "w": jnp.ones(2),
        "c": 1j,
    }
    trees.save(tmp_path, tree)
    like = {
        "s": 1,
        "b": "text",
        "i": 0.5,
        "f": 1,
        "t": 1,
        "big": np.int64(0),
        "w": "text",
        "c": 1.0,
    }
    assert set(mismatch(tmp_path, like, cast=True).differing) == set(tree)


def test_a_python_number_that_does_not_fit_its_target_is_refused(tmp_path):
    trees.save(tmp_path, {"big": 2**53 + 1, "f": 0.1})
    with pytest.raises(ckptmgr.TreeMismatch, match=str(2**53 + 1)):
        ckptmgr.restore(tmp_path, {"big": shape(dtype="int32"), "f": 0.0})
    back = ckptmgr.restore(tmp_path, {"big": np.int64(0), "f": shape()})
    assert back["big"] == 2**53 + 1 and type(back["big"]) is np.int64
    trees.assert_same_values(back["f"], np.float32(0.1))


def test_every_differing_number_is_listed_with_the_rest(tmp_path):
    trees.save(tmp_path, {"a": 2**40, "b": 2**41, "c": 1})
    like = {name: shape(dtype="int32") for name in "abc"}
    assert set(mismatch(tmp_path, like).differing) == {"a", "b"}


def test_a_step_counter_may_change_between_a_python_number_and_an_array(tmp_path):
    trees.save(tmp_path, {"py": 7, "dev": jnp.int32(8), "np": np.int64(9)})
    back = ckptmgr.restore(tmp_path, {"py": jnp.int32(0), "dev": 0, "np": 0})
    trees.assert_same_tree(back, {"py": jnp.int32(7), "dev": 8, "np": 9})


def test_a_sharding_that_cannot_hold_the_leaf_is_refused_by_name(tmp_path, mesh8):
    trees.save(tmp_path, {"w": jnp.ones((6, 4)), "v": jnp.ones(16)})
    split = NamedSharding(mesh8, P("x"))
    options = ckptmgr.Options(restore=ckptmgr.Restore(sharding=split))
    found = mismatch(tmp_path, {"w": shape(6, 4), "v": shape(16)}, options=options)
    assert set(found.differing) == {"w"} and "8" in found.differing["w"]


# -- where it comes back ----------------------------------------------------------------------


def make_state(mesh):
    params = {
        "w": jax.device_put(
            jnp.linspace(0, 1, 64).reshape(8, 8), NamedSharding(mesh, P("data", "model"))
        ),
        "b": jax.device_put(jnp.zeros(8, jnp.bfloat16), NamedSharding(mesh, P("model"))),
        "r": jax.device_put(jnp.ones(3), NamedSharding(mesh, P())),
    }
    return train_state.TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))


def test_a_sharding_option_of_more_dimensions_than_a_leaf_is_refused_by_name(tmp_path, mesh8):
    trees.save(tmp_path, {"a": jnp.ones(8), "s": jnp.float32(1)})
    options = ckptmgr.Options(restore=ckptmgr.Restore(sharding=NamedSharding(mesh8, P("x"))))
    found = mismatch(tmp_path, {"a": shape(8), "s": shape()}, options=options)
    assert set(found.differing) == {"s"} and "more dimensions" in found.differing["s"]


@pytest.mark.parametrize("dtype", ["U3", [("x", "f4")], "M8[s]"])
def test_a_dtype_that_arrays_on_devices_never_have_is_refused_by_name(tmp_path, dtype):
    path = trees.save(tmp_path, {"a": jnp.arange(8.0)})
    for cast in (False, True):
        with pytest.raises(ckptmgr.TreeMismatch, match="dtype: stored float32"):
            ckptmgr.restore(path, {"a": np.zeros(8, dtype)}, cast=cast)


def test_a_restore_into_live_state_causes_no_compilation(tmp_path, mesh42):
    @jax.jit
    def update(state, scale, weak):
        grads = jax.tree.map(lambda p: p * scale.astype(p.dtype), state.params)
        return state.apply_gradients(grads=grads), scale, weak * 2

    live = (make_state(mesh42), jnp.float32(0.5), jnp.asarray(1.5))
    assert live[2].weak_type and not live[2].committed
    for _ in range(2):
        live = update(*live)
    compiled = update._cache_size()
    with ckptmgr.CheckpointManager(tmp_path) as manager:
        manager.save(2, live)
        kept = jax.tree.map(lambda a: np.array(a), live)
        live = update(*live)
        back = manager.restore(live, step=2)  # waits for the save
    trees.assert_same_leaves(back, kept)
    trees.assert_same_placement(back, live)
    again = update(*back)
    assert update._cache_size() == compiled
    trees.assert_same_tree(again, live)
    update(*again)
    assert update._cache_size() == compiled


def test_a_step_with_explicit_shardings_takes_the_restored_state(tmp_path, mesh42):
    spec = NamedSharding(mesh42, P("data", "model"))
    step = jax.jit(lambda w: w * 2, in_shardings=spec, out_shardings=spec, donate_argnums=0)
    w = step(step(jax.device_put(jnp.ones((8, 8)), spec)))
    size = step._cache_size()
    trees.save(tmp_path, {"w": w})
    back = ckptmgr.restore(tmp_path, {"w": w})["w"]
    assert back.sharding == spec and back.committed
    trees.assert_same_values(step(step(back)), np.full((8, 8), 16, np.float32))
    assert back.is_deleted() and step._cache_size() == size


def test_weak_types_of_any_shape_stay_as_the_target_has_them(tmp_path, mesh8):
    weak = jnp.asarray(2.0)
    tree = {"scalar": weak, "int": jnp.asarray(3), "array": jnp.broadcast_to(weak, (3,)), "strong": jnp.float32(1),
            "placed": jax.device_put(weak, NamedSharding(mesh8, P()))}  # fmt: skip
    kinds = {name: leaf.weak_type for name, leaf in tree.items()}
    assert kinds == {"scalar": True, "int": True, "array": True, "strong": False, "placed": True}
    trees.save(tmp_path, tree)
    back = ckptmgr.restore(tmp_path, tree)
    trees.assert_same_tree(back, tree)
    assert {name: leaf.weak_type for name, leaf in back.items()} == kinds
    strong = ckptmgr.restore(
        tmp_path, {name: shape(*leaf.shape, dtype=leaf.dtype) for name, leaf in tree.items()}
    )
    assert not any(leaf.weak_type for leaf in strong.values())


def test_weak_types_of_a_bare_shape_target_are_kept(tmp_path):
    tree = {"s": jnp.asarray(2.0), "n": jnp.float32(1)}
    trees.save(tmp_path, tree)
    back = ckptmgr.restore(tmp_path, jax.eval_shape(lambda: tree))
    assert back["s"].weak_type and not back["n"].weak_type


def test_uncommitted_stays_uncommitted_and_committed_committed(tmp_path):
    devices = jax.devices()
    tree = {"u": jnp.arange(3), "c": jax.device_put(jnp.arange(3), devices[0]), "d5": jax.device_put(jnp.arange(3), devices[5]),
            "key": jax.random.key(0), "ckey": jax.device_put(jax.random.key(0), devices[2])}  # fmt: skip
    wanted = {name: leaf.committed for name, leaf in tree.items()}
    assert wanted == {"u": False, "c": True, "d5": True, "key": False, "ckey": True}
    trees.save(tmp_path, tree)
    back = ckptmgr.restore(tmp_path, tree)
    assert {name: leaf.committed for name, leaf in back.items()} == wanted
    assert {name: leaf.devices() for name, leaf in back.items()} == {
        name: leaf.devices() for name, leaf in tree.items()
    }
    trees.assert_same_tree(back, tree)


def test_a_target_without_shardings_goes_to_the_default_device(tmp_path, mesh42):
    spec = NamedSharding(mesh42, P("data"))
    tree = {
        "w": jax.device_put(jnp.arange(16.0), spec),
        "k": jax.device_put(jax.random.key(0), NamedSharding(mesh42, P())),
    }
    trees.save(tmp_path, tree)
    like = jax.eval_shape(lambda: {"w": jnp.zeros(16), "k": jax.random.key(0)})
    back = ckptmgr.restore(tmp_path, like)
    trees.assert_same_tree(back, tree)
    assert all(
        leaf.devices() == {jax.devices()[0]} and not leaf.committed for leaf in back.values()
    )
    with jax.default_device(jax.devices()[3]):
        moved = ckptmgr.restore(tmp_path, like)
    assert moved["w"].devices() == {jax.devices()[3]}


def test_the_sharding_option_serves_targets_without_one(tmp_path, mesh42):
    tree = {
        "a": {"w": jnp.arange(16.0).reshape(8, 2)},
        "b": jnp.arange(8),
        "k": jax.random.key(4),
        "n": np.ones(2),
        "s": 1,
    }
    trees.save(tmp_path, tree)
    like = trees.without_sharding(tree)
    replicated = NamedSharding(mesh42, P())
    options = ckptmgr.Options(restore=ckptmgr.Restore(sharding=replicated))
    back = ckptmgr.restore(tmp_path, like, options=options)
    trees.assert_same_tree(back, tree)
    assert back["a"]["w"].sharding == back["b"].sharding == back["k"].sharding == replicated

    asked = []

    def choose(name, size, dtype):
        asked.append((name, size, dtype))
        return NamedSharding(mesh42, P("data")) if len(size) > 1 else replicated

    options = ckptmgr.Options(restore=ckptmgr.Restore(sharding=choose))
    with ckptmgr.CheckpointManager(tmp_path, options) as manager:
        back = manager.restore(like)
        trees.assert_same_tree(back, tree)
        assert back["a"]["w"].sharding.spec == P("data") and back["b"].sharding == replicated
        assert asked == [
            ("a.w", (8, 2), np.float32),
            ("b", (8,), np.int32),
            ("k", (), like["k"].dtype),
        ]
        asked.clear()
        own = SingleDeviceSharding(jax.devices()[6])
        placed = {**like, "b": shape(8, dtype="int32", sharding=own)}
        assert manager.restore(placed)["b"].sharding == own
        assert [name for name, *_ in asked] == ["a.w", "k"]


def test_the_memory_kind_of_the_target_is_kept(tmp_path, mesh42):
    host = NamedSharding(mesh42, P("data"), memory_kind="pinned_host")
    single = SingleDeviceSharding(jax.devices()[1], memory_kind="pinned_host")
    w = np.arange(32, dtype=np.float32).reshape(8, 4)
    tree = {"device": jnp.asarray(w), "host": jax.device_put(w, host), "single": jax.device_put(w, single),
            "replicated": jax.device_put(w, NamedSharding(mesh42, P(), memory_kind="pinned_host"))}  # fmt: skip
    trees.save(tmp_path, tree)
    back = ckptmgr.restore(tmp_path, tree)
    trees.assert_same_tree(back, tree)
    trees.assert_same_placement(back, tree)
    assert back["host"].sharding.memory_kind == back["single"].sharding.memory_kind == "pinned_host"
    like = {name: shape(8, 4, sharding=host) for name in tree}
    moved = ckptmgr.restore(tmp_path, like)
    assert all(leaf.sharding == host for leaf in moved.values())
    trees.assert_same_leaves(moved, tree)


def test_restored_arrays_may_be_donated_without_harm_to_their_copies(tmp_path, mesh8):
    everywhere = NamedSharding(mesh8, P())
    w = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    tree = {
        "replicated": jax.device_put(w, everywhere),
        "split": jax.device_put(w, NamedSharding(mesh8, P("x"))),
        "one": jax.device_put(w, jax.devices()[0]),
        "uncommitted": jnp.asarray(w),
        "odd": jax.device_put(w[:3, :5], everywhere),
    }
    trees.save(tmp_path, tree)
    first, second = ckptmgr.restore(tmp_path, tree), ckptmgr.restore(tmp_path, tree)
    as_numpy = ckptmgr.restore(tmp_path)
    add = jax.jit(lambda a: a + 1, donate_argnums=0)
    for name, array in first.items():
        expected = np.asarray(tree[name]) + 1
        result = add(add(add(array)))
        assert array.is_deleted()
        for shard in result.addressable_shards:
            assert np.array_equal(shard.data, expected[shard.index] + 1 + 1), (name, shard.device)
        for shard in second[name].addressable_shards:
            assert np.array_equal(shard.data, np.asarray(tree[name])[shard.index]), (
                name,
                shard.device,
            )
    trees.assert_same_leaves(second, tree)
    trees.assert_same_leaves(as_numpy, tree)
    trees.assert_same_leaves(ckptmgr.restore(tmp_path), tree)


def test_restored_numpy_arrays_are_the_callers_own(tmp_path):
    trees.save(tmp_path, {"a": np.arange(4), "b": np.zeros((2, 0)), "j": jnp.ones(3)})
    first = ckptmgr.restore(tmp_path)
    for leaf in jax.tree.leaves(first):
        assert leaf.flags.writeable and leaf.flags.c_contiguous
        leaf += 1
    trees.assert_same_leaves(
        ckptmgr.restore(tmp_path),
        {"a": np.arange(4), "b": np.zeros((2, 0)), "j": np.ones(3, np.float32)},
    )
