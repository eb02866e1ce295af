"""Stock Orbax restores a step of ours in each of its usual ways, bit for bit."""

import json
import warnings

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckptmgr
from tests.support import trees

RNG = np.random.default_rng(11)


@pytest.fixture(autouse=True)
def quiet():
    """Orbax warns on each restore without a target that shardings come from a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def make_tree(mesh):
    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    w = RNG.standard_normal((8, 4)).astype(np.float32)
    return {
        "params": {
            "w": put(w, "data", "model"),
            "bf16": put(
                RNG.integers(0, 2**16, 16, np.uint16).view(jnp.bfloat16.dtype), ("data", "model")
            ),
            "mlp/~/linear": {"b": put(w[0], "model"), "r": put(w[:3])},
        },
        "ints": [put(np.arange(8, dtype=np.int8), "data"), jnp.arange(3, dtype=jnp.uint16)],
        "small": (jnp.asarray([-2, 1, 7], jnp.int4), jnp.asarray([0.5, -0.0], jnp.float8_e4m3fn)),
        "single": jax.device_put(w, jax.devices()[3]),
        "np": RNG.standard_normal((2, 3)),
        "flags": put(np.array([True, False] * 4), "data"),
        "scalar": jnp.float32(0.1),
        "zeros": put(np.zeros((8, 8), np.float32), "data"),
        "py": {"i": 7, "f": 0.1, "t": True},
        "key": jax.random.key(5),
        "keys": put(
            jax.random.wrap_key_data(np.arange(32, dtype=np.uint32).reshape(8, 4), impl="rbg"),
            "data",
        ),
        "legacy": jax.random.PRNGKey(2),
        "none": None,
        "empty": {"d": {}, "l": [], "t": ()},
    }


def as_orbax_gives(tree):
    """Tuples as lists, which is what Orbax makes of them without a target."""
    if isinstance(tree, dict):
        return {key: as_orbax_gives(child) for key, child in tree.items()}
    if isinstance(tree, list | tuple) and tree != ():
        return [as_orbax_gives(child) for child in tree]
    return tree


def orbax(root, **options):
    return ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(**options))


VARIANTS = {
    "default": ckptmgr.Storage(),
    "cut": ckptmgr.Storage(chunk_bytes=40),
    "zstd": ckptmgr.Storage(compression="zstd", chunk_bytes=100),
    "zarr3": ckptmgr.Storage(driver="zarr3"),
    "zarr3 zstd": ckptmgr.Storage(driver="zarr3", compression="zstd", chunk_bytes=100),
}


@pytest.mark.parametrize("storage", VARIANTS.values(), ids=VARIANTS)
def test_orbax_restores_without_arguments(tmp_path, mesh42, storage):
    tree = make_tree(mesh42)
    trees.save(tmp_path, tree, step=4, storage=storage)
    wanted = as_orbax_gives(tree)
    ways = {
        "none": {},
        "standard": {"args": ocp.args.StandardRestore()},
        "pytree": {"args": ocp.args.PyTreeRestore()},
    }
    for way in ways.values():
        with orbax(tmp_path) as manager:  # each picks its handlers at the first call
            found = manager.restore(4, **way)
        trees.assert_same_tree(found, wanted)
        for leaf in ("w", "bf16"):
            assert found["params"][leaf].sharding == tree["params"][leaf].sharding
        assert found["single"].devices() == {jax.devices()[3]}


def test_orbax_restores_into_a_target_on_the_same_mesh(tmp_path, mesh42):
    tree = make_tree(mesh42)
    trees.save(tmp_path, tree)
    with orbax(tmp_path) as manager:
        back = manager.restore(1, args=ocp.args.StandardRestore(trees.abstract(tree)))
    trees.assert_same_tree(back, tree)
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
        assert not isinstance(want, jax.Array) or got.sharding == want.sharding
    args = ocp.checkpoint_utils.construct_restore_args(tree)
    with orbax(tmp_path) as manager:
        back = manager.restore(1, args=ocp.args.PyTreeRestore(tree, restore_args=args))
    trees.assert_same_tree(back, tree)


@pytest.mark.parametrize(
    "size", [(2, 4), (8, 1), (2, 2), (1, 1)], ids=lambda s: "x".join(map(str, s))
)
def test_orbax_restores_onto_another_mesh(tmp_path, mesh42, size):
    tree = {
        k: v
        for k, v in make_tree(mesh42).items()
        if k in ("params", "ints", "single", "zeros", "scalar")
    }
    trees.save(tmp_path, tree, storage=ckptmgr.Storage(chunk_bytes=64))
    mesh = Mesh(np.array(jax.devices()[: size[0] * size[1]]).reshape(size), ("data", "model"))

    def there(leaf):
        spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else P()
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    like = jax.tree.map(there, tree)
    with orbax(tmp_path) as manager:
        back = manager.restore(1, args=ocp.args.StandardRestore(like))
    trees.assert_same_tree(back, tree)
    assert back["params"]["w"].sharding == like["params"]["w"].sharding


def test_orbax_checkpointers_restore_an_item_directory(tmp_path, mesh42):
    tree = make_tree(mesh42)
    item = trees.save(tmp_path, tree) + "/default"
    wanted = as_orbax_gives(tree)
    with ocp.StandardCheckpointer() as checkpointer:
        trees.assert_same_leaves(checkpointer.restore(item, trees.abstract(tree)), tree)
        trees.assert_same_leaves(checkpointer.restore(item), wanted)
    with ocp.PyTreeCheckpointer() as checkpointer:
        trees.assert_same_leaves(checkpointer.restore(item), wanted)
        found = checkpointer.metadata(item).item_metadata.tree
    assert found["params"]["w"].shape == (8, 4) and found["params"]["bf16"].dtype == jnp.bfloat16


def test_orbax_restores_a_train_state(tmp_path, mesh42):
    params = {
        "w": jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh42, P("data", "model"))),
        "b": jnp.zeros(4),
    }
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
    state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, params))
    trees.save(tmp_path, state)
    with orbax(tmp_path) as manager:
        back = manager.restore(1, args=ocp.args.StandardRestore(trees.abstract(state)))
        plain = manager.restore(1)
    trees.assert_same_tree(back, state)
    trees.assert_same_leaves(plain["params"], state.params)


def test_orbax_lists_our_steps_and_restores_each(tmp_path):
    metrics = {1: 0.5, 20: 0.125, 300: 0.25}
    with ckptmgr.CheckpointManager(tmp_path) as manager:
        for step, loss in metrics.items():
            manager.save(step, {"w": jnp.full(4, step)}, metrics={"loss": loss, "n": step})
    with orbax(tmp_path, best_fn=lambda m: m["loss"], best_mode="min") as manager:
        assert manager.all_steps() == [1, 20, 300] and manager.latest_step() == 300
        assert manager.best_step() == 20
        assert manager.metrics(20) == {"loss": 0.125, "n": 20}
        for step in metrics:
            trees.assert_same_leaves(
                manager.restore(step, args=ocp.args.StandardRestore()),
                {"w": np.full(4, step, np.int32)},
            )
    with orbax(tmp_path) as manager:
        found = manager.restore(None)
    trees.assert_same_leaves(found.get("default", found), {"w": np.full(4, 300, np.int32)})


def test_orbax_goes_on_where_we_left_off_and_we_where_it_did(tmp_path):
    trees.save(tmp_path, {"w": jnp.zeros(4)}, step=1)
    with orbax(tmp_path, max_to_keep=2) as manager:
        for step in (2, 3):
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.full(4, float(step))}))
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 3]
    with ckptmgr.CheckpointManager(tmp_path) as manager:
        assert [(info.step, info.kind) for info in manager.steps()] == [
            (2, "foreign"),
            (3, "foreign"),
        ]
        manager.save(4, {"w": jnp.full(4, 4.0)})
        manager.wait()
        for step in (2, 3, 4):
            trees.assert_same_leaves(
                manager.restore(step=step), {"w": np.full(4, step, np.float32)}
            )
    with orbax(tmp_path) as manager:
        assert manager.all_steps() == [2, 3, 4]
        trees.assert_same_leaves(manager.restore(4), {"w": np.full(4, 4, np.float32)})


def test_orbax_restores_what_stands_beside_leaves_it_cannot_hold(tmp_path, mesh42):
    w = jax.device_put(
        np.arange(32, dtype=np.float32).reshape(8, 4), NamedSharding(mesh42, P("data", "model"))
    )
    tree = {
        "w": w,
        "a": {"b": jnp.ones(1)}, "a.b": jnp.zeros(2),
        "bytes": b"abc",
        "u4": jnp.asarray([1, 15], jnp.uint4), "f8": jnp.asarray([1, -2], jnp.float8_e4m3),
        "big": 2**100, "c": 1 + 2j,
        "zero": jnp.zeros((0, 4)), "zero3": jax.device_put(np.zeros((3, 0), np.int8), NamedSharding(mesh42, P())),
        "": jnp.ones(3), "/": np.ones(2),
        "s": "text", "np": np.float32(3),
    }  # fmt: skip
    trees.save(tmp_path, tree)
    trees.assert_same_leaves(ckptmgr.restore(tmp_path), tree)
    with orbax(tmp_path) as manager:
        found = manager.restore(1)
    trees.assert_same_values(found["w"], w)
    assert found["w"].sharding == w.sharding
    assert found["zero"].shape == (0, 4) and found["zero3"].dtype == np.int8
    trees.assert_same_values(
        found["a"]["b"], tree["a"]["b"]
    )  # the first of the name; not the other
    assert not {"a.b", "", "/"} & set(found)
    assert np.asarray(found["bytes"]).tobytes() == b"abc"
    assert np.asarray(found["u4"]).tolist() == [1, 15] and found["u4"].dtype == np.uint8
    assert np.array_equal(trees.bits(found["f8"]), trees.bits(tree["f8"]))
    assert found["big"] == str(2**100) and found["c"].item() == 1 + 2j
    assert found["s"] == "text" and found["np"] == 3.0


def test_orbax_never_gives_one_string_for_another_of_the_same_dotted_name(tmp_path):
    tree = {
        "a": {"b": "first"},
        "a.b": "second",
        "n": {"m": 2**70},
        "n.m": "word",
        "w": jnp.ones(1),
    }
    trees.save(tmp_path, tree)
    assert {k: v for k, v in ckptmgr.restore(tmp_path).items() if k != "w"} == {
        k: v for k, v in tree.items() if k != "w"
    }
    with orbax(tmp_path) as manager:
        found = manager.restore(1)
    assert found["a"]["b"] == "first" and found.get("a.b", "second") == "second"
    assert found["n"]["m"] == str(2**70) and found.get("n.m", "word") == "word"


def test_int_keys_and_namedtuples_reach_orbax_as_it_has_them(tmp_path):
    tree = {
        "layers": {0: jnp.ones(1), 1: jnp.ones(2), 10: jnp.ones(3)},
        "opt": optax.adam(1e-3).init({"w": jnp.ones(2)}),
    }
    trees.save(tmp_path, tree)
    with orbax(tmp_path) as manager:
        plain = manager.restore(1)
        back = manager.restore(1, args=ocp.args.StandardRestore(trees.abstract(tree)))
    assert list(plain["layers"]) == ["0", "1", "10"]
    trees.assert_same_leaves(plain["layers"], tree["layers"])
    trees.assert_same_tree(back, tree)


BARE = {
    "array": lambda mesh: jnp.arange(4),
    "sharded": lambda mesh: jax.device_put(
        np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P("data"))
    ),
    "numpy": lambda mesh: np.arange(3),
    "scalar": lambda mesh: 3,
    "key": lambda mesh: jax.random.key(1),
}


@pytest.mark.parametrize("kind", BARE)
def test_orbax_restores_a_bare_leaf(tmp_path, mesh42, kind):
    tree = BARE[kind](mesh42)
    trees.save(tmp_path, tree)
    trees.assert_same_values(ckptmgr.restore(tmp_path), tree)
    with orbax(tmp_path) as manager:
        trees.assert_same_values(manager.restore(1, args=ocp.args.PyTreeRestore()), tree)


def iterator():
    return iter(grain.MapDataset.range(100).shuffle(seed=3).to_iter_dataset())


def test_orbax_restores_items_with_a_data_iterator_among_them(tmp_path, mesh42):
    tree = make_tree(mesh42)
    data = iterator()
    for _ in range(5):
        next(data)
    with ckptmgr.CheckpointManager(tmp_path) as manager:
        manager.save(
            7, ckptmgr.Items(state=tree, data=data, ema={"w": jnp.ones(2)}), metrics={"loss": 0.5}
        )
        following = [next(data) for _ in range(20)]  # goes on while the save is under way
    with orbax(tmp_path) as manager:
        found = manager.restore(7)
        assert set(found.keys()) == {"state", "data", "ema", "metrics"}
        trees.assert_same_leaves(found["state"], as_orbax_gives(tree))
        trees.assert_same_leaves(found["ema"], {"w": np.ones(2, np.float32)})
        assert found["data"] == {"next_index": 5} and found["metrics"] == {"loss": 0.5}
        some = manager.restore(7, args=ocp.args.Composite(
            state=ocp.args.StandardRestore(trees.abstract(tree)), data=ocp.args.JsonRestore()
        ))  # fmt: skip
        trees.assert_same_tree(some["state"], tree)
    fresh = iterator()
    fresh.set_state(some["data"])
    assert [next(fresh) for _ in range(20)] == following
    fresh = iterator()
    back = ckptmgr.restore(tmp_path, ckptmgr.Items(state=tree, data=fresh, ema={"w": jnp.zeros(2)}))
    assert back.data is fresh and [next(fresh) for _ in range(20)] == following


@pytest.mark.parametrize("other", [*BARE, "none", "empty", "text", "bytes"])
def test_orbax_restores_without_arguments_whatever_else_an_item_holds(tmp_path, mesh42, other):
    more = {"none": None, "empty": {}, "text": "text", "bytes": b"xy"}
    item = BARE[other](mesh42) if other in BARE else more[other]
    trees.save(tmp_path, ckptmgr.Items(state={"w": jnp.arange(4)}, other=item))
    trees.assert_same_tree(ckptmgr.restore(tmp_path, item="other"), item)
    with orbax(tmp_path) as manager:
        trees.assert_same_leaves(manager.restore(1)["state"], {"w": np.arange(4, dtype=np.int32)})


def test_an_empty_tree_does_not_keep_orbax_from_the_other_steps(tmp_path):
    trees.save(tmp_path, {}, step=1)
    trees.save(tmp_path, {"w": jnp.ones(2)}, step=2)
    assert ckptmgr.restore(tmp_path, step=1) == {}
    with orbax(tmp_path) as manager:
        assert manager.all_steps() == [1, 2]
        trees.assert_same_leaves(manager.restore(2), {"w": np.ones(2, np.float32)})


def test_orbax_sees_a_step_of_ours_as_committed_and_complete(tmp_path):
    path = trees.save(tmp_path, {"w": jnp.ones(2)}, step=3)
    assert ocp.utils.is_checkpoint_finalized(path)
    assert ocp.utils.checkpoint_steps(tmp_path) == [3]
    with open(f"{path}/_CHECKPOINT_METADATA") as file:
        found = json.load(file)
    assert found["item_handlers"]["default"].endswith(".StandardCheckpointHandler")
    assert found["init_timestamp_nsecs"] <= found["commit_timestamp_nsecs"]


def test_orbax_metadata_of_our_leaves_is_right(tmp_path, mesh42):
    tree = make_tree(mesh42)
    trees.save(tmp_path, tree)
    handler = ocp.StandardCheckpointHandler()
    with ocp.CheckpointManager(tmp_path, item_handlers=handler) as manager:
        found = manager.item_metadata(1)
    for name in ("w", "bf16"):
        leaf = tree["params"][name]
        assert (
            found["params"][name].shape == leaf.shape and found["params"][name].dtype == leaf.dtype
        )
        assert found["params"][name].sharding.to_jax_sharding() == leaf.sharding
