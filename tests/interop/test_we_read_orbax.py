"""What stock Orbax of today writes, ckptmgr restores, lists and describes."""

import os
import shutil
import warnings

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

RNG = np.random.default_rng(2)


@pytest.fixture(autouse=True)
def quiet():
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
            "bf16": put(RNG.integers(0, 2**16, 16, np.uint16).view(jnp.bfloat16.dtype), ("data", "model")),
            "mlp/~/linear": {"b": put(w[0], "model"), "r": put(w[:3])},
        },
        "list": [put(np.arange(8, dtype=np.int8), "data"), *(jnp.full(2, i) for i in range(11))],
        "small": jnp.asarray([-2, 1, 7], jnp.int4),
        "f8": jnp.asarray([0.5, -0.0], jnp.float8_e4m3fn),
        "single": jax.device_put(w, jax.devices()[3]),
        "np": RNG.standard_normal((2, 3)),
        "flags": put(np.array([True, False] * 4), "data"),
        "scalar": jnp.float32(0.1),
        "zeros": put(np.zeros((8, 8), np.float32), "data"),
        "py": {"i": 7, "f": 0.1, "t": True, "s": "héllo"},
        "key": jax.random.key(5),
        "keys": put(jax.random.wrap_key_data(np.arange(32, dtype=np.uint32).reshape(8, 4), impl="rbg"), "data"),
        "legacy": jax.random.PRNGKey(2),
        "none": None,
        "empty": {"d": {}, "l": [], "t": ()},
    }  # fmt: skip


def write(root, args, *, step=1, metrics=None, **options):
    """Saves one step with a manager of Orbax."""
    options = ocp.CheckpointManagerOptions(**options)
    with ocp.CheckpointManager(root, options=options) as manager:
        assert manager.save(step, args=args, metrics=metrics)
        manager.wait_until_finished()


def write_item(root, handler, args):
    """Saves as the only item of step 1 with a handler that has options of its own."""
    with ocp.CheckpointManager(root, item_handlers=handler) as manager:
        assert manager.save(1, args=args)
        manager.wait_until_finished()


HANDLERS = {
    "default": {},
    "plain zarr": {"use_ocdbt": False},
    "zarr3": {"use_zarr3": True},
    "plain zarr3": {"use_ocdbt": False, "use_zarr3": True},
}


@pytest.mark.parametrize("how", HANDLERS)
def test_every_layout_of_orbax_is_restored(tmp_path, mesh42, how):
    tree = make_tree(mesh42)
    write_item(tmp_path, ocp.PyTreeCheckpointHandler(**HANDLERS[how]), ocp.args.PyTreeSave(tree))
    back = ckptmgr.restore(tmp_path)
    trees.assert_same_tree(back, tree)
    trees.assert_same_tree(ckptmgr.restore(tmp_path, trees.abstract(tree)), tree)
    placed = ckptmgr.restore(tmp_path, mesh=mesh42)
    trees.assert_same_tree(placed, tree)
    assert placed["params"]["w"].sharding.is_equivalent_to(tree["params"]["w"].sharding, 2)
    found = {leaf.dotted: leaf for leaf in ckptmgr.describe(tmp_path).leaves["default"]}
    assert found["params.w"].shape == (8, 4) and found["key"].kind == "key"
    assert found["py.s"].value == "héllo"


def test_a_foreign_step_opens_on_another_mesh(tmp_path, mesh42):
    tree = {
        k: v
        for k, v in make_tree(mesh42).items()
        if k in ("params", "key", "keys", "zeros", "single")
    }
    write(tmp_path, ocp.args.StandardSave(tree))
    for size in ((2, 4), (8, 1), (2, 2), (1, 1)):
        mesh = Mesh(np.array(jax.devices()[: size[0] * size[1]]).reshape(size), ("data", "model"))
        placed = ckptmgr.restore(tmp_path, mesh=mesh)
        trees.assert_same_tree(placed, tree)
        trees.assert_same_tree(ckptmgr.restore(tmp_path, trees.abstract(placed)), tree)
        assert placed["params"]["w"].sharding.is_equivalent_to(
            NamedSharding(mesh, P("data", "model")), 2
        )


def test_a_train_state_of_orbax_is_restored_into_its_class(tmp_path, mesh42):
    params = {
        "w": jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh42, P("data", "model"))),
        "b": jnp.zeros(4),
    }
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
    state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, params))
    write(tmp_path, ocp.args.StandardSave(state))
    with ckptmgr.CheckpointManager(tmp_path) as manager:
        back = manager.restore(trees.abstract(state))
        assert type(back) is train_state.TrainState and back.tx is state.tx
        trees.assert_same_tree(back, state)
        trees.assert_same_leaves(manager.restore()["params"], state.params)
        with pytest.raises(ckptmgr.TreeMismatch) as caught:
            manager.restore(state.replace(params={"w": jnp.ones((8, 5)), "new": 1}))
    assert caught.value.missing == ("params.new",) and caught.value.extra == ("params.b",)
    assert set(caught.value.differing) == {"params.w"}


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys_of_orbax_are_keys(tmp_path, impl):
    tree = {"k": jax.random.key(3, impl=impl), "w": jnp.ones(2)}
    write(tmp_path, ocp.args.PyTreeSave(tree))
    trees.assert_same_leaves(ckptmgr.restore(tmp_path), tree)
    trees.assert_same_tree(ckptmgr.restore(tmp_path, tree), tree)


def test_composite_items_of_orbax_are_items(tmp_path, mesh42):
    tree = make_tree(mesh42)
    meta = {"it": 7, "nested": {"x": [1, 2, None], "s": "é"}}
    items = ocp.args.Composite(
        state=ocp.args.StandardSave({"w": tree["params"]["w"], "n": 3}),
        more=ocp.args.PyTreeSave(tree),
        meta=ocp.args.JsonSave(meta),
        arr=ocp.args.ArraySave(tree["params"]["w"]),
    )
    write(tmp_path, items, step=40, metrics={"loss": 0.5}, best_fn=lambda m: m["loss"])
    back = ckptmgr.restore(tmp_path)
    assert type(back) is ckptmgr.Items and set(back) == {"state", "more", "meta", "arr"}
    trees.assert_same_tree(back.more, tree)
    assert back.meta == meta
    trees.assert_same_leaves(back.state, {"w": tree["params"]["w"], "n": 3})
    arr = back.arr["checkpoint"] if isinstance(back.arr, dict) else back.arr
    trees.assert_same_values(arr, tree["params"]["w"])
    assert ckptmgr.restore(tmp_path, item="meta") == meta
    like = ckptmgr.Items(state={"w": tree["params"]["w"], "n": 0})
    trees.assert_same_tree(
        ckptmgr.restore(tmp_path, like, partial=True).state, {"w": tree["params"]["w"], "n": 3}
    )


def test_random_key_items_of_orbax_are_restored_or_named(tmp_path):
    items = ocp.args.Composite(
        state=ocp.args.StandardSave({"w": jnp.ones(2)}),
        rng=ocp.args.JaxRandomKeySave(jax.random.key(4)),
        nprng=ocp.args.NumpyRandomKeySave(np.random.RandomState(3).get_state()),
    )
    write(tmp_path, items)
    trees.assert_same_leaves(ckptmgr.restore(tmp_path, item="state"), {"w": np.ones(2, np.float32)})
    try:
        back = ckptmgr.restore(tmp_path)
    except ckptmgr.CheckpointError as exc:
        assert "rng" in str(exc) and "nprng" in str(exc)
    else:  # what is there must not vanish without a word
        assert {"state", "rng", "nprng"} <= set(back)


def test_metrics_of_orbax_are_in_the_step_info(tmp_path):
    for step, loss in ((1, 0.5), (2, 0.25)):
        write(
            tmp_path,
            ocp.args.StandardSave({"w": jnp.ones(2)}),
            step=step,
            metrics={"loss": loss},
            best_fn=lambda m: m["loss"],
        )
    with ckptmgr.CheckpointManager(tmp_path) as manager:
        assert [(i.step, dict(i.metrics)) for i in manager.steps()] == [
            (1, {"loss": 0.5}),
            (2, {"loss": 0.25}),
        ]
        info = manager.info(2)
    assert info.kind == "foreign" and info.status == "good" and not info.verified
    assert dict(info.metrics) == {"loss": 0.25}


@pytest.mark.parametrize(
    "value", [np.arange(3, dtype=np.int32), 3, 0.5], ids=["array", "int", "float"]
)
def test_a_bare_leaf_of_orbax_is_restored(tmp_path, value):
    write(
        tmp_path,
        ocp.args.PyTreeSave(jnp.asarray(value) if isinstance(value, np.ndarray) else value),
    )
    trees.assert_same_values(ckptmgr.restore(tmp_path), value)
    trees.assert_same_values(ckptmgr.restore(tmp_path, value), value)


def test_a_step_of_orbax_that_was_not_finished_is_no_step(tmp_path):
    write(tmp_path, ocp.args.StandardSave({"w": jnp.ones(2)}), step=1)
    shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")
    shutil.copytree(tmp_path / "1", tmp_path / "3.orbax-checkpoint-tmp-4")
    with ckptmgr.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 1 and len(manager.steps()) == 1
        trees.assert_same_leaves(manager.restore(), {"w": np.ones(2, np.float32)})
    assert os.path.isdir(tmp_path / "2.orbax-checkpoint-tmp")  # another's directory is left alone


def test_a_step_of_orbax_with_unmerged_databases_is_refused_with_the_reason(tmp_path):
    write(tmp_path, ocp.args.StandardSave({"w": jnp.ones(2)}))
    os.remove(tmp_path / "1/default/manifest.ocdbt")
    with pytest.raises(ckptmgr.CorruptCheckpoint, match="never merged"):
        ckptmgr.restore(tmp_path)


def test_a_leaf_of_orbax_that_is_gone_is_refused_by_name_and_the_rest_is_read(tmp_path):
    tree = {"w": jnp.ones(2), "b": jnp.zeros(3)}
    write_item(tmp_path, ocp.PyTreeCheckpointHandler(use_ocdbt=False), ocp.args.PyTreeSave(tree))
    shutil.rmtree(tmp_path / "1/default/b")
    with pytest.raises(ckptmgr.CorruptCheckpoint) as caught:
        ckptmgr.restore(tmp_path)
    assert [problem.leaf for problem in caught.value.problems] == ["b"]
    back = ckptmgr.restore(tmp_path, {"w": jnp.zeros(2)}, partial=True)
    trees.assert_same_leaves(back, {"w": np.ones(2, np.float32)})


def test_a_lost_chunk_of_orbax_is_an_error_and_not_zeros(tmp_path):
    tree = {"w": np.ones((4, 4), np.float32)}
    for zarr3, chunk in ((False, "w/0.0"), (True, "w/c/0/0")):
        root = tmp_path / str(zarr3)
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=zarr3)
        write_item(root, handler, ocp.args.PyTreeSave(tree))
        os.remove(root / "1/default" / chunk)
        with pytest.raises(ckptmgr.CorruptCheckpoint, match="w"):
            ckptmgr.restore(root)


def test_metadata_of_orbax_that_is_not_json_is_refused_by_file(tmp_path):
    write(tmp_path, ocp.args.StandardSave({"w": jnp.ones(2)}))
    for name in ("_sharding", "_METADATA"):
        path = tmp_path / "1/default" / name
        text = path.read_bytes()
        path.write_bytes(text[:10])
        with pytest.raises(ckptmgr.CorruptCheckpoint, match=name):
            ckptmgr.restore(tmp_path)
        path.write_bytes(text)
    assert ckptmgr.restore(tmp_path)["w"].tolist() == [1, 1]


def test_a_checkpointer_directory_without_a_step_is_opened_or_its_refusal_says_what_it_is(tmp_path):
    tree = {"w": jnp.ones(2)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "final", tree)
        checkpointer.wait_until_finished()
        checkpointer.save(tmp_path / "7", tree)
        checkpointer.wait_until_finished()
    for name in ("final", "7"):
        try:
            back = ckptmgr.restore(tmp_path / name)
        except ckptmgr.StepNotFound as exc:
            assert "Checkpointer" in str(exc), str(exc)
        else:
            trees.assert_same_leaves(back, tree)
