"""Stock Orbax reads what several of our processes wrote, and several read what it wrote."""

import warnings

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ckptmgr import Coordination, Options, Storage
from tests.multiprocess import test_saving
from tests.support import goldens, trees

pytestmark = pytest.mark.timeout(150)

VERSIONS = ["0.6.4-2proc", "0.12.8-2proc"]
DEADLINE = 30.0
STORAGE = {
    "plain": Storage(),
    "cut": Storage(chunk_bytes=2**14, compression="zstd"),
    "zarr3": Storage(driver="zarr3"),
}
GOLDEN_SPECS = {
    "w": P("data", "model"), "b": P("model"), "q": P(None, "data"), "rep": P(), "step": P(),
}  # fmt: skip
SPECS = {name: spec for name, spec in test_saving.SPECS.items() if name != "empty"}


@pytest.fixture(autouse=True)
def quiet():
    """Orbax warns on each restore without a target that shardings come from a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def options(name="plain", **rest):
    return Options(
        storage=STORAGE[name], coordination=Coordination(deadline_seconds=DEADLINE), **rest
    )


def host():
    """What each process holds for itself; of text Orbax takes no target."""
    return {"numpy": np.arange(6.0).reshape(2, 3), "int": 7, "float": 0.1}


def golden_values(root):
    """Name -> what Orbax was given."""
    with np.load(root / "values.npz") as arrays:
        found = dict(arrays)
    return found | {"b": found["b"].view(ml_dtypes.bfloat16)}


JOB = """
import pathlib, warnings
import orbax.checkpoint as ocp
from tests.multiprocess import test_orbax as cases, test_saving
from tests.support.trees import abstract

warnings.simplefilter("ignore", UserWarning)
grid = test_saving.grid()
state = test_saving.state(1, grid, put)
arrays = {name: state["arrays"][name] for name in cases.SPECS}
tree = {"arrays": arrays, "keys": state["keys"], "host": cases.host()}

def wrong_in(got):
    values = test_saving.values(1)
    wrong = [name for name in cases.SPECS if not same(got["arrays"][name], values[name])]
    if not same(jax.random.key_data(got["keys"]), jax.random.key_data(test_saving.keys(1))):
        wrong.append("keys")
    for name, value in cases.host().items():
        assert_same_values(got["host"][name], value)
    if "local" in got:
        assert_same_values(np.asarray(got["local"]), np.arange(5, dtype=np.float32))
        key = got["local key"]  # as plain words where no target says otherwise
        words = key if isinstance(key, np.ndarray) else jax.random.key_data(key)
        assert_same_values(np.asarray(words), np.array([0, 3], np.uint32))
    return wrong

# -- Orbax reads ours

found = {}
# on devices of each process, which Orbax itself would not save
local = {"local": jnp.arange(5.0), "local key": jax.random.key(3)}
for name in cases.STORAGE:
    with ckptmgr.CheckpointManager(f"{root}/{name}", cases.options(name)) as manager:
        manager.save(1, {**tree, **local})
    ways = {
        "without arguments": {},
        "into a target": {"args": ocp.args.StandardRestore(abstract({**tree, **local}))},
    }
    for way, arguments_of_it in ways.items():
        with ocp.CheckpointManager(pathlib.Path(root) / name) as manager:
            found[f"{name}, {way}"] = wrong_in(manager.restore(1, **arguments_of_it))
report(ours=found)

# -- we read Orbax's

other = pathlib.Path(root) / "orbax"
with ocp.CheckpointManager(other, options=ocp.CheckpointManagerOptions(create=True)) as manager:
    manager.save(3, args=ocp.args.StandardSave(tree))
    manager.wait_until_finished()
with ckptmgr.CheckpointManager(other, cases.options(read_only=True)) as manager:
    latest = manager.restore_latest(abstract(tree))
    report(
        theirs=[wrong_in(manager.restore(abstract(tree))), wrong_in(latest.state)],
        kind=[[info.step, info.kind] for info in manager.steps()],
    )
with ckptmgr.CheckpointManager(other, cases.options()) as manager:
    manager.save(4, tree)
    manager.wait()
    report(after=[info.step for info in manager.steps()])

# -- what old releases wrote

golden = {}
mesh_of = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
for version in cases.VERSIONS:
    where = pathlib.Path(arguments[0]) / f"orbax-{version}"
    truth = cases.golden_values(where)
    like = {
        name: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh_of, cases.GOLDEN_SPECS[name])
        )
        for name, x in truth.items()
    }
    with ckptmgr.CheckpointManager(
        where / "mgr_standard_2proc", cases.options(read_only=True)
    ) as manager:
        listed = [info.step for info in manager.steps()]
        for step in listed:
            back = manager.restore(like, step=step)
            golden[f"{version} {step}"] = [name for name in truth if not same(back[name], truth[name])]
        latest = manager.restore_latest(like)
    for name in ("pytree_ocdbt_2proc", "pytree_zarr_noocdbt_2proc", "pytree_zarr3_2proc"):
        for way in ({"like": like}, {"mesh": mesh_of}):
            back = ckptmgr.restore(where / name, **way)
            golden[f"{version} {name} {list(way)}"] = [
                leaf for leaf in truth if not same(back[leaf], truth[leaf])
            ]
    golden[version] = [listed, latest.step]
report(golden=golden)
"""


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """Where the archives are unpacked."""
    root = tmp_path_factory.mktemp("golden")
    for version in VERSIONS:
        goldens.unpack(f"orbax-{version}", root)
    return root


@pytest.fixture(scope="module")
def job(tmp_path_factory, golden):
    """(where, what two processes of four devices reported)."""
    root = tmp_path_factory.mktemp("orbax")
    return root, test_saving.run(JOB, root, golden, devices=4, timeout=100)


@pytest.mark.parametrize("way", ["without arguments", "into a target"])
@pytest.mark.parametrize("name", STORAGE)
def test_orbax_in_two_processes_restores_what_two_of_ours_wrote(job, name, way):
    assert [facts["ours"][f"{name}, {way}"] for facts in job[1]] == [[], []]


@pytest.mark.parametrize("name", STORAGE)
def test_orbax_in_one_process_restores_what_two_of_ours_wrote(job, name):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    values = {name: x for name, x in test_saving.values(1).items() if name in SPECS}
    like = {
        "arrays": {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, SPECS[name]))
            for name, x in values.items()
        },
        "keys": jax.device_put(test_saving.keys(0), NamedSharding(mesh, P("x"))),
        "host": {key: type(x)() if np.isscalar(x) else x * 0 for key, x in host().items()},
        "local": np.zeros(5, np.float32),
        "local key": jax.random.key(0),
    }
    with ocp.CheckpointManager(job[0] / name) as manager:
        found = manager.restore(1, args=ocp.args.StandardRestore(like))
    trees.assert_same_leaves(found["arrays"], values)
    trees.assert_same_values(found["keys"], test_saving.keys(1))
    trees.assert_same_leaves(found["host"], host())
    trees.assert_same_values(found["local"], np.arange(5, dtype=np.float32))
    trees.assert_same_values(found["local key"], jax.random.key(3))


def test_two_processes_restore_what_orbax_wrote_in_the_same_job(job):
    for facts in job[1]:
        assert facts["theirs"] == [[], []]
        assert facts["kind"] == [[3, "foreign"]]
        assert facts["after"] == [3, 4]


@pytest.mark.parametrize("version", VERSIONS)
def test_two_processes_restore_what_two_of_an_old_orbax_wrote(job, version):
    for facts in job[1]:
        found = {key: value for key, value in facts["golden"].items() if key.startswith(version)}
        assert found.pop(version) == [[2, 3], 3]
        assert len(found) == 8 and set(map(tuple, found.values())) == {()}, found
