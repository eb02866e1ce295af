"""Several processes save one state: every value in it, once, and each process its part."""

import collections
import textwrap

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckptmgr
from ckptmgr import Heartbeat, Integrity, Options, Snapshot, Storage
from ckptmgr.core.receipts import Receipt
from tests.support import trees
from tests.support.processes import run_job

DEADLINE = 30.0
STEPS = (1, 2, 3)

BOUND = 3 * 2**17
"""Bytes of host memory: more than any shard has, and less than a process's share of the tree."""

MODES = {
    "copy_on_write": dict(),
    "double_buffer": dict(snapshot=Snapshot(mode="double_buffer")),
    "sync": dict(snapshot=Snapshot(mode="sync")),
    "heartbeat": dict(heartbeat=Heartbeat(every_saves=1, audit=True)),
    "zarr3": dict(storage=Storage(driver="zarr3")),
    "zstd": dict(storage=Storage(compression="zstd")),
    "cut": dict(storage=Storage(chunk_bytes=2**16), integrity=Integrity(leaf_digests=True)),
    "bounded": dict(snapshot=Snapshot(host_bytes=BOUND), storage=Storage(chunk_bytes=2**16)),
}
"""Options by name."""

SPECS = {
    "all": P(("x", "y")),
    "both": P("x", "y"),
    "rows": P("x"),
    "columns": P(None, "y"),
    "copies": P(),
    "odd": P(),
    "narrow": P("y"),
    "scalar": P(),
    "empty": P("x"),
    "bf16": P("x", "y"),
    "int4": P("y"),
    "bool": P(("y", "x")),
    "large": P("x"),
    "large_copies": P(),
}
"""Where the arrays of several processes lie, on a mesh of the axes x and y."""


END = """
from jax.experimental import multihost_utils

multihost_utils.sync_global_devices("the end")
"""


def run(job, root, *args, **how):
    """`run_job`, whose processes leave together: the service of the job ends with process 0."""
    return run_job(job + END, root, *args, **how)


def once(function):
    """`function` of one argument, called once for each, even where that fails."""
    done = {}

    def call(argument):
        if argument not in done:
            try:
                done[argument] = function(argument), None
            except Exception as exc:
                done[argument] = None, exc
        value, error = done[argument]
        if error is not None:
            raise error
        return value

    return call


def options(mode, **rest):
    chosen = {"coordination": ckptmgr.Coordination(deadline_seconds=DEADLINE), **MODES[mode]}
    return Options(**{**chosen, **rest})


def values(number):
    """The arrays that are saved as step `number`, on the host."""
    rng = np.random.default_rng(number)

    def floats(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    return {
        "all": floats(16, 3),
        "both": floats(8, 16),
        "rows": floats(8, 5),
        "columns": floats(5, 24),
        "copies": floats(37, 5),
        "odd": rng.integers(0, 255, (7, 3, 5), np.uint8),
        "narrow": rng.integers(-9, 9, (24, 7), np.int64).astype(np.int32),
        "scalar": np.float32(number),
        "empty": np.zeros((0, 8), np.float32),
        "bf16": rng.integers(0, 2**16, (8, 8), np.uint16).view(ml_dtypes.bfloat16),
        "int4": rng.integers(-8, 8, (8, 3), np.int8).astype(ml_dtypes.int4),
        "bool": rng.integers(0, 2, (16,), np.uint8).astype(bool),
        "large": floats(256, 512),
        "large_copies": floats(300, 301),
    }


def keys(number):
    """Typed PRNG keys that are sharded over all devices."""
    return jax.random.wrap_key_data(np.arange(32, dtype=np.uint32).reshape(16, 2) + number)


def own(number):
    """What each process has for itself, the same in all."""
    return {
        "numpy": np.arange(6, dtype=np.int64).reshape(2, 3) * number,
        "numpy scalar": np.float64(number / 3),
        "int": number,
        "long": 2**80 + number,
        "float": number / 7,
        "bool": True,
        "text": f"grün {number}",
        "bytes": bytes([number, 0, 255]),
        "local": jnp.arange(5.0) + number,
        "local key": jax.random.key(number),
        "none": None,
    }


def grid():
    """A mesh over all devices of a job."""
    return Mesh(np.array(jax.devices()).reshape(2, -1), ("x", "y"))


def state(number, mesh, put):
    """What a job saves as step `number`."""
    arrays = {name: put(x, NamedSharding(mesh, SPECS[name])) for name, x in values(number).items()}
    places = NamedSharding(mesh, P(("x", "y")))
    data = keys(number)
    shared = jax.make_array_from_callback(data.shape, places, lambda index: data[index])
    return {"arrays": arrays, "keys": shared, "own": own(number)}


@jax.jit
def _other(x):
    return jnp.logical_not(x) if x.dtype == bool else x + jnp.ones((), x.dtype)


def spoil(tree):
    """Donates every array, or deletes what cannot be donated; gives the names of those that live."""
    donate = jax.jit(_other, donate_argnums=0)
    alive = []
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if isinstance(x, np.ndarray):
            x[...] = 0
        if not isinstance(x, jax.Array):
            continue
        if trees.is_key(x):
            x.delete()
        else:
            donate(x)
        if not x.is_deleted():
            alive.append(jax.tree_util.keystr(path))
    return alive


def tree_to_share(name):
    """32 MiB: in leaves of one size; for "mixed" of many sizes, one of them half of the tree."""
    if name != "mixed":
        return {f"l{i}": np.full((1024, 256), i, np.float32) for i in range(32)}
    rng = np.random.default_rng(3)
    rows = [1, 7, 100, 700, 1200, 2100, 3000, 3500, 5776]
    found = {f"l{i}": rng.random((n, 256), np.float32) for i, n in enumerate(rows)}
    return {"a": found, "half": rng.random((sum(rows), 256), np.float32), "z": np.int32(4)}


EVEN = {"copies": P(), "mixed": P(), "parts": P("y")}
"""Trees whose writing must be shared evenly, and where their leaves lie."""


def one_of_crowd(number, i):
    """A small array of three."""
    dtype = (np.float32, ml_dtypes.bfloat16, np.int8)[i % 5 % 3]
    return (np.arange(8) + number + i % 100).astype(dtype)


JOB = """
from tests.multiprocess import test_saving as cases
from tests.support.trees import abstract

grid = cases.grid()
chosen = cases.options("copy_on_write")

def wrong_in(got, number):
    found = [name for name, x in cases.values(number).items() if not same(got["arrays"][name], x)]
    if not same(jax.random.key_data(got["keys"]), jax.random.key_data(cases.keys(number))):
        found.append("keys")
    for name, x in cases.own(number).items():
        try:
            assert_same_values(got["own"][name], x)
        except AssertionError as exc:
            found.append(f"{name}: {exc}")
    return [f"step {number}: {name}" for name in found]

def save_and_restore(mode):
    committed, wrong, alive, held = [], [], [], []
    hooked = cases.options(mode, on_committed=lambda info: committed.append(info.step))
    events = [lambda event: held.append(event.host_bytes or 0)]
    with ckptmgr.CheckpointManager(f"{root}/{mode}", hooked, events=events) as manager:
        for number in cases.STEPS:
            state = cases.state(number, grid, put)
            like = abstract(state)
            manager.save(number, state)
            alive += cases.spoil(state)
            del state
        manager.wait()
        for number in cases.STEPS:
            wrong += wrong_in(manager.restore(like, step=number), number)
        kinds = [info.kind for info in manager.steps()]
    return dict(wrong=wrong, alive=alive, committed=committed, kinds=kinds, held=max(held))

report(modes={mode: save_and_restore(mode) for mode in arguments})

# -- bytes per process

with ckptmgr.CheckpointManager(f"{root}/even", chosen) as manager:
    for step, (name, spec) in enumerate(cases.EVEN.items()):
        places = NamedSharding(grid, spec)
        manager.save(step, jax.tree.map(lambda x: put(x, places), cases.tree_to_share(name)))
        manager.wait()

# -- two managers at a time

def small(number):
    places = NamedSharding(grid, P(("x", "y")))
    return {"w": put(np.full(16, number, np.int32), places), "n": number}

a, b = (ckptmgr.CheckpointManager(f"{root}/{name}", chosen) for name in "ab")
for number in range(20):
    a.save(number, small(number))
    b.save(number, small(number + 100))
b.close()
a.close()

# -- one step, again and again

with ckptmgr.CheckpointManager(f"{root}/again", chosen) as manager:
    for number in range(5):
        manager.save(1, small(number), overwrite=True)
    manager.wait()
    found = [manager.verify() for _ in range(5)]
    report(again=[list(map(str, problems)) for problems in found])

# -- many managers, one after the other, and one process that is late now and then

late = np.random.default_rng(rank)
for turn in range(10):
    with ckptmgr.CheckpointManager(f"{root}/many", chosen) as manager:
        for number in range(3):
            if rank == world - 1:
                time.sleep(late.uniform(0, 0.05))
            manager.save(3 * turn + number, small(3 * turn + number))

# -- more small arrays than are copied one by one

def crowd(number):
    places = [NamedSharding(grid, spec) for spec in (P(("x", "y")), P("x"), P())]
    return {f"l{i}": put(cases.one_of_crowd(number, i), places[i % 3]) for i in range(300)}

with ckptmgr.CheckpointManager(f"{root}/crowd", chosen) as manager:
    programs = manager._saves._stager.programs
    for number in cases.STEPS:
        state = crowd(number)
        manager.save(number, state)
        cases.spoil(state)
        manager.wait()
        programs.wait()
    report(programs=[program is not None for program in programs._compiled.values()])
"""


ALL_MODES = [pytest.param(2, mode, id=f"2 processes, {mode}") for mode in MODES] + [
    pytest.param(4, mode, id=f"4 processes, {mode}")
    for mode in ("copy_on_write", "heartbeat", "cut")
]
with_modes = pytest.mark.parametrize(("world", "mode"), ALL_MODES)
with_worlds = pytest.mark.parametrize("world", [2, 4], ids="{} processes".format)
pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Gives what the processes of a job reported, and where they saved."""

    @once
    def made(world):
        root = tmp_path_factory.mktemp("job")
        modes = [param.values[1] for param in ALL_MODES if param.values[0] == world]
        return run(JOB, root, *modes, world=world, timeout=110), root

    return made


@with_modes
def test_every_process_restores_bit_for_bit_what_was_donated_right_after_save(job, world, mode):
    for facts in job(world)[0]:
        assert facts["modes"][mode]["wrong"] == []


@with_modes
def test_a_save_does_not_keep_arrays_from_being_donated(job, world, mode):
    for facts in job(world)[0]:
        assert facts["modes"][mode]["alive"] == []


@with_modes
def test_one_process_alone_restores_all_values_of_all(job, world, mode):
    for number in STEPS:
        found = ckptmgr.restore(job(world)[1] / mode, step=number)
        assert found.keys() == {"arrays", "keys", "own"}
        trees.assert_same_leaves(found["arrays"], values(number))
        trees.assert_same_values(found["keys"], keys(number))
        trees.assert_same_leaves(found["own"], own(number))


@with_modes
def test_nothing_is_wrong_with_a_step_of_several_processes(job, world, mode):
    for number in STEPS:
        verdict = ckptmgr.verify(job(world)[1] / mode, number, leaf_digests=True)
        assert verdict.good and verdict.verified and verdict.problems == ()
        assert verdict.unknown == () and verdict.notes == ()


@with_modes
def test_the_hook_is_called_by_process_0_alone_and_once_a_step(job, world, mode):
    first, *others = [facts["modes"][mode]["committed"] for facts in job(world)[0]]
    assert first == list(STEPS)
    assert others == [[]] * (world - 1)


def test_no_process_holds_more_host_memory_than_it_may(job):
    held = {mode: [facts["modes"][mode]["held"] for facts in job(2)[0]] for mode in MODES}
    assert all(0 < most <= BOUND for most in held["bounded"])
    assert max(held["copy_on_write"]) > BOUND


@with_modes
def test_all_processes_say_the_same_of_the_steps(job, world, mode):
    kind = mode if mode in ("sync", "heartbeat") else "async"
    for facts in job(world)[0]:
        assert facts["modes"][mode]["kinds"] == [kind] * len(STEPS)


def receipts(step):
    """Of each process, in rank order."""
    folder = step / "default" / "ckptmgr"
    found = [Receipt.from_json(path.read_text()) for path in folder.glob("receipt.*")]
    return sorted(found, key=lambda receipt: receipt.process)


@with_modes
def test_every_chunk_is_in_exactly_one_receipt(job, world, mode):
    for number in STEPS:
        step = job(world)[1] / mode / str(number)
        (leaves,) = ckptmgr.describe(step).leaves.values()
        wanted = [
            (leaf, index)
            for leaf, stored in enumerate(leaves)
            if stored.nbytes
            for index in np.ndindex(
                *(-(-n // c) for n, c in zip(stored.stored_shape, stored.chunk, strict=True))
            )
        ]
        found = receipts(step)
        assert [receipt.process for receipt in found] == list(range(world))
        written = [(chunk.leaf, tuple(chunk.index)) for each in found for chunk in each.chunks]
        assert sorted(written) == sorted(wanted)
        if mode in ("cut", "bounded"):
            assert max(collections.Counter(leaf for leaf, _ in written).values()) >= 8


@pytest.mark.parametrize(
    ("world", "mode"), [(2, "cut"), (2, "heartbeat"), (4, "cut"), (4, "heartbeat")]
)
def test_leaf_digests_are_those_of_the_same_values_saved_by_one_process(job, tmp_path, world, mode):
    rows = NamedSharding(Mesh(np.array(jax.devices()), "r"), P("r"))
    tree = {"arrays": values(2), "keys": keys(2), "own": own(2)}
    tree["arrays"]["all"] = jax.device_put(values(2)["all"], rows)
    trees.save(tmp_path, tree, integrity=Integrity(leaf_digests=True))
    wanted = ckptmgr.describe(tmp_path).leaf_digests["default"]
    assert len(wanted) == len(jax.tree.leaves(tree)) - 2  # a text and a long number
    assert ckptmgr.describe(job(world)[1] / mode, 2).leaf_digests["default"] == wanted


def test_without_the_option_no_leaf_digests_are_recorded(job):
    assert ckptmgr.describe(job(2)[1] / "zarr3", 2).leaf_digests == {}


@with_worlds
@pytest.mark.parametrize("name", EVEN)
def test_each_process_writes_as_much_as_the_others(job, world, name):
    step = job(world)[1] / "even" / str(list(EVEN).index(name))
    written = [sum(receipt.files.values()) for receipt in receipts(step)]
    even = ckptmgr.describe(step).info.nbytes / world
    assert all(abs(nbytes - even) <= 0.1 * even for nbytes in written), (written, even)
    trees.assert_same_leaves(ckptmgr.restore(step), tree_to_share(name))


@with_worlds
def test_two_managers_of_two_directories_save_by_turns(job, world):
    for name, first in (("a", 0), ("b", 100)):
        with ckptmgr.CheckpointManager(job(world)[1] / name, Options(read_only=True)) as manager:
            assert [info.step for info in manager.steps()] == list(range(20))
            for number in range(20):
                found = manager.restore(step=number)
                assert found["n"] == first + number and set(found["w"]) == {first + number}


@with_worlds
def test_a_step_is_replaced_by_all_together_and_verified_by_all_at_once(job, world):
    facts, root = job(world)
    assert [each["again"] for each in facts] == [[[]] * 5] * world
    with ckptmgr.CheckpointManager(root / "again", Options(read_only=True)) as manager:
        (info,) = manager.steps()
        assert info.verified and manager.restore()["n"] == 4


@with_worlds
def test_many_managers_in_a_row_save_while_one_process_is_late(job, world):
    with ckptmgr.CheckpointManager(job(world)[1] / "many", Options(read_only=True)) as manager:
        assert [info.step for info in manager.steps()] == list(range(30))
        assert [manager.restore(step=number)["n"] for number in range(30)] == list(range(30))


@with_worlds
def test_many_small_arrays_are_copied_by_a_program_and_are_right(job, world):
    facts, root = job(world)
    for each in facts:
        assert each["programs"] and all(each["programs"])
    for number in STEPS:
        found = ckptmgr.restore(root / "crowd", step=number)
        trees.assert_same_leaves(found, {f"l{i}": one_of_crowd(number, i) for i in range(300)})


@with_worlds
def test_nothing_but_the_steps_is_left(job, world):
    for root in job(world)[1].iterdir():
        assert [path.name for path in root.iterdir() if not path.name.isdigit()] == ["_ckptmgr"]
        found = [path for path in (root / "_ckptmgr").rglob("*") if path.is_file()]
        assert [path.parent.name for path in found] == ["verified"] * (root.name == "again")


def test_a_job_without_jaxs_preemption_service_saves(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_PREEMPTION_SERVICE", "0")
    job = """
        from jax._src import distributed
        from tests.multiprocess import test_saving as cases

        report(service=distributed.global_state.preemption_sync_manager is not None)
        grid = cases.grid()
        for watch in (False, True):
            chosen = cases.options("copy_on_write", schedule=Schedule(on_preemption=watch))
            with ckptmgr.CheckpointManager(f"{root}/{watch}", chosen) as manager:
                for number in cases.STEPS:
                    assert manager.should_save(number)
                    manager.save(number, cases.state(number, grid, put))
        """
    assert run(textwrap.dedent(job), tmp_path) == [{"service": False}] * 2
    for watch in (False, True):
        for number in STEPS:
            found = ckptmgr.restore(tmp_path / str(watch), step=number)
            trees.assert_same_leaves(found["arrays"], values(number))
            assert ckptmgr.verify(tmp_path / str(watch), number).good
