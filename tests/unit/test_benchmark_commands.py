"""The benchmarks of growth, of chunk sizes, of regressions and of everything at once, and the training
they save from.

No test here looks at how long anything took.
"""

import importlib
import json
import threading
import time

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ckptmgr.core.boxes import from_index
from ckptmgr.core.manifest import StoredLeaf
from tests.support.benchmarks import BENCHMARKS, full, run, tables


@pytest.fixture
def growth(monkeypatch):
    return module(monkeypatch, "growth")


@pytest.fixture
def suite(monkeypatch):
    return module(monkeypatch, "suite")


@pytest.fixture
def regression(monkeypatch):
    return module(monkeypatch, "regression")


@pytest.fixture
def resharding(monkeypatch):
    return module(monkeypatch, "resharding")


def module(monkeypatch, name):
    """A module of the benchmarks, which import each other as scripts of one directory do."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module(name)


def test_growth(tmp_path):
    args = ["--profile", "--directory", tmp_path]
    leaves, leaf_checks, shards, shard_checks, *profiles = tables(run("growth.py", *args))
    micros = ["us a leaf, 10 to 20", "us a leaf, 20 to 40", "last / before"]
    assert leaves[""] == ["", "10", "20", "40", *micros]
    assert shards[""][1:4] == ["8", "32", "us a shard, 8 to 32"]
    assert all(len(checks) == 2 for checks in (leaf_checks, shard_checks))
    assert len(profiles) == 2 * 3
    for profile in profiles:
        assert profile[""] == ["CPU, ms", "threads there, ms"]
        *functions, whole = list(profile)[1:]
        assert functions[-1] == "threads that are not Python's"
        assert whole in ("all of in save()", "all of from then until durable", "all of restore")
    assert list(tmp_path.iterdir()) == []


def test_the_term_of_one_more_leaves_out_what_a_save_of_anything_costs(growth):
    counts = (100, 1_000, 10_000)
    linear = [0.5 + 30e-6 * count for count in counts]
    assert growth.terms(counts, linear) == pytest.approx([30e-6, 30e-6])
    assert growth.growth(growth.terms(counts, linear)) == pytest.approx(1.0)
    squared = [0.5 + 1e-9 * count**2 for count in counts]
    assert growth.growth(growth.terms(counts, squared)) == pytest.approx(10.0)


def test_no_growth_is_told_where_there_is_no_term_to_compare_with(growth):
    assert growth.growth([30e-6]) is None
    assert growth.growth([-1e-6, 30e-6]) is None


def test_a_term_that_has_grown_is_a_miss_only_beyond_its_limit(growth):
    below = growth.judged("restore", "ckptmgr", 59e-6, 2.0, 60.0)
    assert [check.verdict for check in below] == ["OK"]
    beyond = growth.judged("restore", "ckptmgr", 61e-6, 2.0, 60.0)
    assert [check.verdict for check in beyond] == ["MISS", "MISS"]
    steady = growth.judged("restore", "ckptmgr", 61e-6, 1.2, 60.0)
    assert [check.verdict for check in steady] == ["MISS", "OK"]


def test_samples_give_cpu_time_to_the_function_that_used_it(monkeypatch):
    sampler = module(monkeypatch, "sampling").Sampler()

    def works():
        ends = time.thread_time() + 0.2
        while time.thread_time() < ends:
            pass

    done = threading.Event()
    with sampler.during("work"):
        waits, busy = threading.Thread(target=done.wait), threading.Thread(target=works)
        for thread in (waits, busy):
            thread.start()
        busy.join()
        done.set()
        waits.join()
    (table,) = tables(sampler.tables(rounds=1))
    (worked,) = [row for row in table if row.endswith("works")]
    assert (
        float(table[worked][0])
        > 100
        > sum(float(cells[0]) for row, cells in table.items() if row.endswith(": Condition.wait"))
    )


def test_suite(tmp_path):
    out = tmp_path / "out.json"
    args = ["--only", "growth,lost_time", "--workloads", "small1", "--directory", tmp_path]
    *_, last = tables(run("suite.py", *args, "--json", out))
    assert last[""] == ["workload", "measure", "against", "found", "goal", "must", "verdict"]
    whole = json.loads(out.read_text())
    assert list(whole["commands"]) == ["growth"]  # no workload is left for the other
    assert {line["workload"] for line in whole["targets"]} == {"leaves", "shards"}
    assert {line["verdict"] for line in whole["targets"]} <= {"goal", "must", "MISS"}


def test_suite_lists_what_a_command_has_judged_and_what_it_has_not(suite):
    ratio = {"measure": "durable", "system": "ckptmgr", "against": "orbax", "value": 0.5}
    ratio |= {"low": 0.4, "high": 0.6, "target": 0.6, "goal": 0.3, "verdict": "must", "case": "a"}
    check = {"title": "files", "system": "ckptmgr", "value": 9.0, "limit": 8.0, "verdict": "MISS"}
    lines = suite.targets_of({"workload": "dense", "ratios": [ratio], "checks": [check]})
    assert [line["measure"] for line in lines] == ["to durable", "files"]
    assert (lines[0]["goal"], lines[0]["must"]) == ("0.30", "0.60")
    assert lines[1]["verdict"] == "MISS"
    assert suite.targets_of({"workload": "dense", "judged": lines}) == lines


def test_regression(tmp_path):
    args = ["--directory", tmp_path, "--json", tmp_path / "out.json"]
    (found,) = tables(run("regression.py", *args))
    assert found[""] == ["ckptmgr's", "of", "found", "usual", "at most", ""]
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [result["workload"] for result in results] == ["dense", "small"]
    for result in results:
        assert all(ratio["value"] > 0 for ratio in result["ratios"])
        assert all(ratio["usual"] < ratio["at_most"] for ratio in result["ratios"])
    assert list(tmp_path.iterdir()) == [tmp_path / "out.json"]


def test_a_ratio_is_a_regression_when_it_exceeds_its_limit_twice(regression):
    durable = regression.Limit("durable", "orbax", 0.4, 0.8)
    restore = regression.Limit("restore", "orbax", 0.3, 0.6)

    def judged(*runs):
        left = iter(runs)

        def measure(name):
            values = zip((durable, restore), next(left), strict=True)
            return [regression.Finding(name, limit, value) for limit, value in values]

        found = regression.judged("dense", measure)
        assert next(left, None) is None
        return regression.result_of("dense", found, judge=True)["missed"]

    assert judged((0.8, 0.6)) == []
    assert judged((0.9, 0.3), (0.4, 0.9)) == []  # what was well is not asked again
    assert judged((0.9, 0.3), (1.0, 0.3)) == [
        "to durable is 1.00 of orbax's; usually it is 0.40, and at most 0.80 is allowed"
    ]


def test_a_step_of_training_changes_every_value_and_can_be_verified(monkeypatch):
    training = module(monkeypatch, "training")
    workloads = module(monkeypatch, "workloads")
    job = training.Training(workloads.catalogue(smoke=True)["trainstate"], seed=1, matrix=8)
    before = {name: np.array(array) for name, array in job.state.items()}
    assert {array.dtype.name for array in before.values()} == {"bfloat16", "float32"}
    job.step()
    for name, array in job.state.items():
        after = np.array(array)
        assert np.isfinite(after.astype(np.float32)).all()
        assert (after != before[name]).all()
    job.verify(job.state, job.moved)
    with pytest.raises(AssertionError, match="leaves came back with other values"):
        job.verify(job.state, job.moved + 1)


def test_a_bare_save_gives_back_the_values_of_what_was_donated(monkeypatch, tmp_path, mesh42):
    bare = module(monkeypatch, "systems").Bare(tmp_path)
    values = {
        "scalar": (np.float32(3.5), ()),
        "everywhere": (np.arange(12, dtype=np.int8).reshape(3, 4), ()),
        "split": (np.arange(64, dtype=ml_dtypes.bfloat16).reshape(8, 8), ("data", "model")),
        "columns": (np.arange(64, dtype=np.float32).reshape(8, 8), (None, "data")),
        "empty": (np.zeros((0, 4), np.float32), ()),
    }
    state = {
        name: jax.device_put(value, NamedSharding(mesh42, P(*spec)))
        for name, (value, spec) in values.items()
    }
    everywhere = NamedSharding(mesh42, P())
    like = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=everywhere)
        for name, array in state.items()
    }
    bare.save(1, state)
    jax.jit(lambda tree: jax.tree.map(lambda x: x + x, tree), donate_argnums=0)(state)
    bare.wait()
    assert bare.durable() and bare.idle()
    for name, array in bare.restore(1, like).items():
        np.testing.assert_array_equal(np.asarray(array), values[name][0])
    with open(tmp_path / "1.bare", "r+b") as file:
        file.truncate(9)
    with pytest.raises(EOFError, match="bytes are missing"):
        bare.restore(1, like)


def test_a_bare_save_that_fails_says_so_once(monkeypatch, tmp_path):
    bare = module(monkeypatch, "systems").Bare(tmp_path / "nowhere")
    bare.save(1, {"x": jax.numpy.ones(4)})
    with pytest.raises(FileNotFoundError):
        bare.wait()
    assert bare.idle() and not bare.durable()
    bare.close()


def test_resharding(tmp_path):
    systems, scratch = ["default", "16MiB"], tmp_path / "scratch"
    scratch.mkdir()
    args = ["--directory", scratch, "--systems", ",".join(systems)]
    found = tables(run("resharding.py", *args, "--json", tmp_path / "out.json"))
    times, ratios, dense, checks, same_times, _, trained = found
    rows = ["to durable", "restore", "CPU, save", "CPU, restore"]
    full(times, systems, *rows)
    full(same_times, systems, *rows)
    assert ratios[""] == ["default / 16MiB", "target"]
    assert ["<= 1.10" in ratios["to durable"][1], "<= 1.15" in ratios["restore"][1]] == [True, True]
    meshes = [f"{mesh} devices, all leaves" for mesh in ("16", "32", "64", "4 x 2", "1 x 8")]
    full(dense, systems, "chunks", *meshes)
    # 2 leaves in chunks of a shard: of 8 devices' shards, cut along the first axis
    assert dense["chunks"] == ["16", "16"]
    assert [float(dense[mesh][0]) for mesh in meshes] == [2, 4, 8, 2, 8]
    assert list(checks.values())[1:] == [["over-read, 32 devices", "4.00", "<= 1.20 MISS"]]
    meshes = [f"{mesh} devices, all leaves" for mesh in ("2 x 4", "8 x 1", "8 x 2", "8 x 4")]
    full(trained, systems, "chunks", *meshes)
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    judged = {
        result["workload"]: [line["measure"] for line in result["judged"]] for result in results
    }
    assert judged == {
        "dense": ["to durable", "restore", "over-read, 16 devices", "over-read, 32 devices"],
        "trainstate": ["to durable", "restore"],
    }
    assert list(scratch.iterdir()) == []


def test_over_read_is_of_whole_chunks_and_of_the_device_where_it_is_the_most(
    monkeypatch, resharding
):
    leaf = module(monkeypatch, "workloads").Leaf
    rows = 2**18  # bytes in a row
    shape, few = (8, rows // 4), (6,)
    stored = [stored_leaf("large", shape, chunk=(3, rows // 4)), stored_leaf("small", few, few)]
    leaves = {"large": leaf(shape), "small": leaf(few, spec=())}
    found = resharding.over_read(stored, leaves, (4,))
    # the second of four devices needs rows 2 and 3, which lie in the chunks of rows 0 to 5
    assert (found["large"], found["small"]) == (3.0, 1.0)
    assert found["all"] == (6 * rows + 24) / (2 * rows + 24)
    assert resharding.over_read(stored[1:], leaves, (4,)) == {
        "large": None,
        "small": 1.0,
        "all": 1.0,
    }


@pytest.mark.parametrize("mesh", [(8,), (4, 2), (2, 4), (1, 8)])
@pytest.mark.parametrize("shape", [(16, 8), (16, 3), (6, 8), (8,)])
def test_a_device_of_a_mesh_needs_what_its_sharding_says(resharding, mesh, shape):
    names = ("x", "y")[: len(mesh)]
    spec = [
        name if size % count == 0 else None
        for name, count, size in zip(names, mesh, shape, strict=False)
    ]
    devices = np.array(jax.devices()[:8]).reshape(mesh)
    sharding = jax.NamedSharding(jax.sharding.Mesh(devices, names), jax.P(*spec))
    indices = sharding.devices_indices_map(shape)
    expected = [from_index(indices[device], shape) for device in devices.flat]
    assert resharding.device_boxes(shape, ("x",), mesh) == expected
    assert (
        resharding.device_boxes(shape, (), mesh)
        == [from_index((slice(None),) * len(shape), shape)] * 8
    )


def stored_leaf(name, shape, chunk):
    return StoredLeaf(
        (name,), "array", shape, "float32", name, "float32", stored_shape=shape, chunk=chunk
    )
