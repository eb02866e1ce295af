"""Directories that Orbax 0.4 to 0.12 wrote are restored with equal values, or refused with why.

`tests/golden` holds them with the scripts that made them. `values_*.npz` is the truth of each.
"""

import functools
import json
import os
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ckptmgr
from tests.support import goldens, trees

VERSIONS = ["0.4.8", "0.5.16", "0.6.4", "0.11.13", "0.12.8"]
KEYSTR = re.compile(r"\['(.*?)'\]|\[(\d+)\]|\.(\w+)")


@pytest.fixture(scope="session")
def golden(tmp_path_factory):
    """Gives the unpacked directory of one archive."""
    root = tmp_path_factory.mktemp("golden")

    return functools.cache(lambda name: goldens.unpack(f"orbax-{name}", root))


def as_step(tmp_path, directory, step=0, item="default"):
    """`directory`, an item or a step whose name is none, as `step` of a run's directory."""
    name = str(step) if item is None else f"{step}/{item}"
    place = tmp_path / "run" / name
    place.parent.mkdir(parents=True, exist_ok=True)
    os.symlink(directory, place)
    return tmp_path / "run"


def refusal(call, *paths):
    """The text of the CheckpointError that `call` ends with, without the paths in it."""
    with pytest.raises(ckptmgr.CheckpointError) as caught:
        call()
    text = str(caught.value)
    for path in sorted(paths, key=lambda path: -len(str(path))):
        text = text.replace(str(path), "")
    return text


def truth_of(root, name):
    """Path -> (value, whether it was an array rather than a number)."""
    about = json.loads((root / f"values_{name}.json").read_text())
    found = {}
    with np.load(root / f"values_{name}.npz") as arrays:
        for text, entry in about.items():
            path = tuple(next(g for g in groups if g) for groups in KEYSTR.findall(text))
            value = arrays[text]
            if entry["dtype"] == "bfloat16":
                value = value.view(ml_dtypes.bfloat16)
            found[path] = (value, entry["py"] in ("ArrayImpl", "ndarray"))
    return found


def target_of(truth):
    """A tree of dicts with a numpy array at each path."""
    tree = {}
    for (*inner, last), (value, _) in truth.items():
        node = functools.reduce(lambda found, key: found.setdefault(key, {}), inner, tree)
        node[last] = np.zeros_like(value)
    return tree


def flat(tree):
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {tuple(trees.key_text(key) for key in path): leaf for path, leaf in pairs}


def assert_true(tree, truth):
    """Every leaf has the values of the truth; numbers may come back as Python's."""
    found = flat(tree)
    assert found.keys() == truth.keys()
    for path, (value, is_array) in truth.items():
        if is_array:
            trees.assert_same_values(found[path], value, ".".join(path))
        else:
            assert np.shape(found[path]) == () and found[path] == value.item(), path


def assert_described(path, truth, item="default", step=None):
    """`describe` knows each array's shape and dtype without reading it."""
    found = {leaf.path: leaf for leaf in ckptmgr.describe(path, step).leaves[item]}
    assert found.keys() == truth.keys()
    for name, (value, is_array) in truth.items():
        assert found[name].shape == value.shape, name
        assert not is_array or found[name].dtype == value.dtype.name, name


ITEMS = {
    "pytree_default": "simple", "pytree_zarr_noocdbt": "simple", "pytree_ocdbt": "simple",
    "pytree_zarr3_ocdbt": "simple", "pytree_zarr3_noocdbt": "simple", "standard_checkpointer": "std",
    "pytree_slash_key": "raw", "pytree_flax_trainstate": "trainstate",
}  # fmt: skip
NOT_WRITTEN = {"0.4.8": {"pytree_zarr3_ocdbt", "pytree_zarr3_noocdbt"}}  # TensorStore had no zarr3


@pytest.mark.parametrize("variant", ITEMS)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_tree_of_every_version_and_layout_has_its_values(
    tmp_path, golden, mesh42, version, variant
):
    if variant in NOT_WRITTEN.get(version, ()):
        assert not (golden(version) / variant).exists()
        return
    truth = truth_of(golden(version), ITEMS[variant])
    root = as_step(tmp_path, golden(version) / variant)
    back = ckptmgr.restore(root)
    assert_true(back, truth)
    assert_described(root, truth)
    info = ckptmgr.describe(root).info
    assert (info.step, info.kind, info.status) == (0, "foreign", "good")
    if "params" in back and "lst" in back:
        assert type(back["lst"]) is list and len(back["lst"]) == 2
    # The same through a target, and on a mesh with the saved shardings.
    assert_true(ckptmgr.restore(root, back), truth)
    placed = ckptmgr.restore(root, mesh=mesh42)
    assert_true(placed, truth)
    table = placed["params"]["embed"]["embedding"]
    assert table.sharding.is_equivalent_to(NamedSharding(mesh42, P("data", None)), 2)


@pytest.mark.parametrize("version", VERSIONS)
def test_leaves_cast_at_the_save_have_the_values_that_were_written(tmp_path, golden, version):
    truth = truth_of(golden(version), "simple")
    for path, (value, is_array) in truth.items():
        if value.dtype == np.float32:
            truth[path] = (value.astype(ml_dtypes.bfloat16), is_array)
    root = as_step(tmp_path, golden(version) / "pytree_saveargs_bf16")
    assert_true(ckptmgr.restore(root), truth)


@pytest.mark.parametrize("version", VERSIONS)
def test_aggregated_leaves_are_restored_or_refused_as_msgpack(tmp_path, golden, version):
    root = as_step(tmp_path, golden(version) / "pytree_aggregate_msgpack")
    truth = truth_of(golden(version), "host")
    if version in ("0.4.8", "0.5.16"):
        assert re.search("msgpack|aggregate", refusal(lambda: ckptmgr.restore(root), tmp_path))
        part = refusal(lambda: ckptmgr.restore(root, {"step": 0}, partial=True), tmp_path)
        assert re.search("msgpack|aggregate", part)
        assert len(ckptmgr.describe(root).leaves["default"]) == len(truth)
        return
    assert_true(ckptmgr.restore(root), truth)
    assert_described(root, truth)


@pytest.mark.parametrize("version", VERSIONS)
def test_of_a_half_aggregated_tree_the_arrays_are_restored(tmp_path, golden, version):
    root = as_step(tmp_path, golden(version) / "pytree_half_aggregate")
    simple = truth_of(golden(version), "simple")
    truth = {("dev", *path[1:]): entry for path, entry in simple.items() if path[0] == "params"}
    assert_true(ckptmgr.restore(root, target_of(truth), partial=True), truth)
    if version in ("0.4.8", "0.5.16"):
        assert re.search("msgpack|aggregate", refusal(lambda: ckptmgr.restore(root), tmp_path))
        return
    truth |= {("host",): simple["np_arr",], ("n",): (np.int64(5), False)}
    assert_true(ckptmgr.restore(root), truth)


@pytest.mark.parametrize("version", ["0.11.13", "0.12.8"])
def test_typed_keys_are_keys(tmp_path, golden, version):
    back = ckptmgr.restore(as_step(tmp_path, golden(version) / "pytree_typed_prng"))
    key = jax.random.key(3)
    trees.assert_same_values(back["k"], key)
    trees.assert_same_values(back["ks"], jax.random.split(key, 4))
    trees.assert_same_values(back["w"], np.ones(3, np.float32))


@pytest.mark.parametrize("version", VERSIONS)
def test_empty_containers_and_none_come_back(tmp_path, golden, version):
    root = as_step(tmp_path, golden(version) / "pytree_empties")
    back = ckptmgr.restore(root)
    trees.assert_same_values(back.pop("w"), np.ones(3, np.float32))
    # Up to 0.6 Orbax itself recorded an empty tuple as None.
    assert back.pop("empty_tup") == (() if version in ("0.11.13", "0.12.8") else None)
    assert back == {
        "none": None,
        "empty_dict": {},
        "empty_list": [],
        "nested": {"e": {}, "n": None},
    }


@pytest.mark.parametrize("version", ["0.4.8", "0.5.16"])
def test_arrays_without_elements_come_back(tmp_path, golden, version):
    back = ckptmgr.restore(as_step(tmp_path, golden(version) / "pytree_zero_size"))
    trees.assert_same_tree(back, {"z": np.zeros((0, 4), np.float32), "w": np.ones(3, np.float32)})


@pytest.mark.parametrize("version", VERSIONS)
def test_strings_come_back(tmp_path, golden, version):
    root = as_step(tmp_path, golden(version) / "pytree_string")
    trees.assert_same_tree(ckptmgr.restore(root), {"s": "héllo", "w": np.ones(3, np.float32)})
    kinds = {leaf.dotted: leaf.kind for leaf in ckptmgr.describe(root).leaves["default"]}
    assert kinds == {"s": "string", "w": "array"}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_dtype_comes_back_bit_for_bit(tmp_path, golden, version):
    found = sorted(path.name.removeprefix("dtypes_") for path in golden(version).glob("dtypes_*"))
    assert len(found) == 15 and {"bfloat16", "int4", "float8_e4m3b11fnuz", "complex64"} <= set(
        found
    )
    for number, name in enumerate(found):
        values = np.arange(6) % 2 if name == "bool" else np.arange(6)
        as_step(tmp_path, golden(version) / f"dtypes_{name}", number)
        back = ckptmgr.restore(tmp_path / "run", step=number)
        trees.assert_same_tree(back, {name: values.astype(name)})


@pytest.mark.parametrize("version", VERSIONS)
def test_a_legacy_manager_with_several_items_lists_and_restores_its_steps(golden, version):
    root = golden(version) / "manager_legacy_dict"
    truth = truth_of(golden(version), "simple")
    with ckptmgr.CheckpointManager(root, ckptmgr.Options(read_only=True)) as manager:
        assert [(info.step, info.kind) for info in manager.steps()] == [
            (2, "foreign"),
            (3, "foreign"),
        ]
        for step in (2, 3):
            back = manager.restore(step=step)
            assert set(back) == {"state", "meta"}
            assert back.meta == {"epoch": step, "note": "café"}
            assert_true(back.state, truth)
        assert_true(manager.restore(item="state"), truth)
    assert_described(root, truth, "state")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_metrics_of_a_legacy_manager_are_in_its_steps(golden, version):
    root = golden(version) / "manager_legacy_dict"
    with ckptmgr.CheckpointManager(root, ckptmgr.Options(read_only=True)) as manager:
        assert [dict(info.metrics) for info in manager.steps()] == [
            {"loss": 1 / 2},
            {"loss": 1 / 3},
        ]


@pytest.mark.parametrize("version", VERSIONS)
def test_steps_with_a_prefix_are_not_steps_until_their_names_are_numbers(tmp_path, golden, version):
    root = golden(version) / "manager_legacy_async_prefix"
    with pytest.raises(ckptmgr.StepNotFound, match="no committed step"):
        ckptmgr.restore(root)
    truth = truth_of(golden(version), "simple")
    for step in (10, 20, 30):
        as_step(tmp_path, root / f"ckpt_{step}", step, None)
    assert_true(ckptmgr.restore(tmp_path / "run"), truth)
    assert ckptmgr.describe(tmp_path / "run").info.step == 30


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_a_manager_with_args_restores(golden, version):
    root = golden(version) / "manager_args_standard"
    truth = truth_of(golden(version), "std")
    with ckptmgr.CheckpointManager(root, ckptmgr.Options(read_only=True)) as manager:
        assert [info.step for info in manager.steps()] == [20, 30]
        assert_true(manager.restore(step=20), truth)
        assert_true(manager.restore(), truth)
    assert_described(root, truth)
    root = golden(version) / "manager_args_trainstate"
    truth = truth_of(golden(version), "trainstate")
    assert_true(ckptmgr.restore(root), truth)
    assert_described(root, truth)


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_a_composite_manager_restores_item_by_item(tmp_path, golden, version):
    root = golden(version) / "manager_args_composite"
    with pytest.raises(ckptmgr.StepNotFound, match="no committed step"):
        ckptmgr.restore(root)  # its names have leading zeros
    truth = truth_of(golden(version), "std")
    for step in (100, 200):
        as_step(tmp_path, next(root.glob(f"*{step}")), step, None)
        run = tmp_path / "run"
        assert_true(ckptmgr.restore(run, step=step, item="state"), truth)
        extra = ckptmgr.restore(run, step=step, item="extra")
        trees.assert_same_values(extra["a"], np.arange(4, dtype=np.int32))
        assert extra["b"] == [1, 2.5, "txt"]
        assert ckptmgr.restore(run, step=step, item="json") == {
            "it": step,
            "nested": {"x": [1, 2, None]},
        }
        assert_described(run, truth, "state", step)


@pytest.mark.parametrize("version", VERSIONS[1:])
@pytest.mark.parametrize("item", ["arr", "rngkey"])
def test_an_item_that_is_no_tree_is_restored_or_said_to_be_unreadable(
    tmp_path, golden, version, item
):
    directory = next((golden(version) / "manager_args_composite").glob("*100"))
    if not (directory / item).exists():
        assert (version, item) == ("0.5.16", "rngkey")  # it had no handler for keys yet
        return
    root = as_step(tmp_path, directory, 100, None)
    try:
        back = ckptmgr.restore(root, item=item)
    except ckptmgr.CheckpointError as exc:
        assert item in str(exc) and "cannot be read" in str(exc), str(exc)
    else:
        back = next(iter(back.values())) if isinstance(back, dict) else back
        wanted = np.arange(16, dtype=np.float32) if item == "arr" else jax.random.key(100)
        trees.assert_same_values(back, wanted)
    # Nor does it vanish without a word where everything is asked for.
    try:
        assert item in ckptmgr.restore(root)
    except ckptmgr.CheckpointError as exc:
        assert item in str(exc)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_step_of_every_version_opens_by_its_own_directory(golden, version):
    step = golden(version) / "manager_legacy_dict/3"
    assert ckptmgr.restore(step, item="meta") == {"epoch": 3, "note": "café"}
    assert ckptmgr.describe(step).info.step == 3


@pytest.mark.parametrize("version", VERSIONS)
def test_the_legacy_flax_format_is_refused_as_what_it_is(golden, version):
    for name in ("flax_legacy_msgpack", "flax_multiprocess_gda"):
        directory = golden(version) / name
        for path in (directory, *sorted(directory.iterdir())):
            for call in (ckptmgr.restore, ckptmgr.describe):
                text = refusal(functools.partial(call, path), path, directory)
                assert re.search("flax|msgpack", text), text


@pytest.mark.parametrize("version", VERSIONS)
def test_what_flax_saved_through_orbax_is_restored(tmp_path, golden, version):
    truth = truth_of(golden(version), "trainstate")
    truth = {path: entry for path, entry in truth.items() if path[0] == "params"}
    root = as_step(tmp_path, golden(version) / "flax_save_checkpoint_orbax/checkpoint_1", 1)
    if version in ("0.4.8", "0.5.16"):  # the number lies in an aggregate file
        assert re.search("msgpack|aggregate", refusal(lambda: ckptmgr.restore(root), tmp_path))
        assert_true(ckptmgr.restore(root, target_of(truth), partial=True), truth)
        return
    truth["step",] = (np.int64(1), False)
    assert_true(ckptmgr.restore(root), truth)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_was_not_finished_is_refused_as_such(golden, version):
    directory = golden(version) / "uncommitted"
    leftovers = sorted(directory.iterdir())
    assert leftovers
    with pytest.raises(ckptmgr.StepNotFound, match="no committed step"):
        ckptmgr.restore(directory)
    with ckptmgr.CheckpointManager(directory, ckptmgr.Options(read_only=True)) as manager:
        assert manager.steps() == () and manager.latest_step() is None
    for path in leftovers:
        with pytest.raises(
            ckptmgr.CheckpointError, match="no committed step|not finish|unfinished"
        ):
            ckptmgr.restore(path)


@pytest.mark.parametrize("version", ["0.6.4-2proc", "0.12.8-2proc"])
def test_what_two_processes_wrote_opens_in_one(tmp_path, golden, mesh42, version):
    root = golden(version)
    with np.load(root / "values.npz") as arrays:
        host = dict(arrays)
    host["b"] = host["b"].view(ml_dtypes.bfloat16)
    truth = {(name,): (value, True) for name, value in host.items()}
    places = [(root / "mgr_standard_2proc", 2), (root / "mgr_standard_2proc", 3)]
    for number, name in enumerate(["pytree_ocdbt", "pytree_zarr_noocdbt", "pytree_zarr3"]):
        places.append((as_step(tmp_path, root / f"{name}_2proc", number), number))
    spec = {"w": P("data", "model"), "b": P("model"), "q": P(None, "data"), "rep": P(), "step": P()}
    for where, step in places:
        assert_true(ckptmgr.restore(where, step=step), truth)
        assert_described(where, truth, step=step)
        placed = ckptmgr.restore(where, step=step, mesh=mesh42)
        assert_true(placed, truth)
        for name, leaf in placed.items():
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh42, spec[name]), leaf.ndim)
        like = {
            name: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=NamedSharding(mesh42, spec[name]))
            for name, v in host.items()
        }
        assert_true(ckptmgr.restore(where, like, step=step), truth)


@pytest.mark.parametrize("version", ["0.5.16", "0.6.4", "0.12.8"])
def test_a_golden_reader_casts_and_reads_a_part(tmp_path, golden, version):
    root = as_step(tmp_path, golden(version) / "pytree_default")
    truth = truth_of(golden(version), "simple")
    value = truth["params", "embed", "embedding"][0]
    like = {"params": {"embed": {"embedding": jax.ShapeDtypeStruct(value.shape, jnp.bfloat16)}}}
    back = ckptmgr.restore(root, like, cast=True, partial=True)
    trees.assert_same_values(back["params"]["embed"]["embedding"], value.astype(ml_dtypes.bfloat16))
    plan = ckptmgr.plan_restore(root, like, cast=True, partial=True)
    assert plan.wanted_bytes == plan.read_bytes == value.nbytes
