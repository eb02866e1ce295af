"""Several processes restore: on other meshes, each what it needs, and all the same step or none."""

import re

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckptmgr
from ckptmgr import Coordination, Items, Options
from tests.multiprocess import test_saving
from tests.support import trees

pytestmark = pytest.mark.timeout(200)

MIB = 2**20
DEADLINE = 30.0
SPECS = test_saving.SPECS

MESHES = {1: [(8, 1), (2, 4)], 2: [(4, 1), (1, 4), (2, 2)], 8: [(8, 1), (2, 4)]}
"""Processes that restore -> the meshes on which they do."""

SWAPPED = {**SPECS, "both": P("y", "x"), "rows": P("y"), "copies": P(), "large": P(None, "x")}


def options(**rest):
    return Options(coordination=Coordination(deadline_seconds=DEADLINE), **rest)


def grid(shape):
    return Mesh(np.array(jax.devices()).reshape(shape), ("x", "y"))


def like(mesh, specs):
    """A target for the arrays of `test_saving.values`."""
    return {
        name: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=NamedSharding(mesh, specs[name]))
        for name, x in test_saving.values(1).items()
    }


def stages():
    """Two meshes, each over half of the processes."""
    devices = np.array(jax.devices())
    return [Mesh(half, "s") for half in np.split(devices, 2)]


def staged(number, mesh, spec):
    """An array that lies on the devices of some processes; the others only know of it."""
    value = np.arange(32, dtype=np.float32).reshape(8, 4) + number
    sharding = NamedSharding(mesh, spec)
    return value, jax.make_array_from_callback(
        value.shape, sharding, lambda index: value[index], dtype=value.dtype
    )


def wide():
    """16 MiB."""
    return np.arange(4 * MIB, dtype=np.float32).reshape(4096, 1024)


class Reader:
    """A data iterator of one process, which goes through its own part of the data."""

    def __init__(self, process, at=0):
        self.state = {"process": process, "at": at}

    def get_state(self):
        return dict(self.state)

    def set_state(self, state):
        self.state = dict(state)


def records(process, processes):
    """A real iterator over every `processes`-th record."""
    part = grain.MapDataset.range(1000)[process::processes]
    return iter(part.shuffle(seed=process).to_iter_dataset())


SAVE = """
from ckptmgr import Storage
from tests.multiprocess import test_restoring as cases, test_saving

grid = test_saving.grid()
chosen = cases.options(storage=Storage(chunk_bytes=2**16))
with ckptmgr.CheckpointManager(f"{root}/run", chosen) as manager:
    arrays = test_saving.state(1, grid, put)["arrays"]
    manager.save(1, arrays)

with ckptmgr.CheckpointManager(f"{root}/wide", cases.options(storage=Storage(chunk_bytes=2**20))) as manager:
    manager.save(1, {"w": put(cases.wide(), NamedSharding(grid, P(("x", "y"))))})

# -- stages of a pipeline, each on the devices of some processes

first, second = cases.stages()
parts = [(first, P("s")), (second, P("s")), (first, P()), (second, P(None, "s"))]
made = {f"s{i}": cases.staged(i, *part) for i, part in enumerate(parts)}
here = {name: array for name, (_, array) in made.items()}
there = {f"s{i}": here[f"s{i ^ 1}"] for i in range(4)}
right = []

def restore_stages():
    with ckptmgr.CheckpointManager(f"{root}/stages", cases.options(heartbeat=Heartbeat(every_saves=2))) as manager:
        for step in (1, 2):  # the second is a heartbeat
            manager.save(step, here)
        manager.wait()
        for target in (here, there):
            for step in (1, 2):
                found = manager.restore(target, step=step)
                right.append(all(same(found[name], value) for name, (value, _) in made.items()))

report(stages_failed=outcome(restore_stages), stages=right)

# -- iterators

sharded = NamedSharding(grid, P(("x", "y")))
state = {"w": put(np.arange(8.0, dtype=np.float32), sharded)}
data, real = cases.Reader(rank, at=10 + rank), cases.records(rank, world)
for _ in range(5 + rank):
    next(real)
with ckptmgr.CheckpointManager(f"{root}/items", cases.options()) as manager:
    handle = manager.save(1, Items(state=state, data=data, real=real))
    following = [int(next(real)) for _ in range(20)]
    handle.result()
    fresh, again = cases.Reader(-1), cases.records(rank, world)
    back = manager.restore(Items(state=state, data=fresh, real=again))
    report(
        state=same(back.state["w"], np.arange(8.0, dtype=np.float32)),
        data=fresh.state,
        real=[int(next(again)) for _ in range(20)] == following,
        without_target=manager.restore(item="data"),
    )
    latest = cases.Reader(-1)
    found = manager.restore_latest(Items(state=state, data=latest, real=cases.records(rank, world)))
    report(latest=[found.step, latest.state])

# -- a process by itself

alone = Coordination(alone=True)
if rank == 1:
    with ckptmgr.CheckpointManager(
        f"{root}/wide", Options(read_only=True, coordination=alone)
    ) as evaluator:
        target = {"w": np.zeros_like(cases.wide())}
        found = evaluator.restore_latest(target)
        report(
            evaluator=[
                [info.step for info in evaluator.steps()],
                found.step,
                bool((found.state["w"] == cases.wide()).all()),
                bool((evaluator.restore()["w"] == cases.wide()).all()),
            ]
        )
    with ckptmgr.CheckpointManager(f"{root}/alone", Options(coordination=alone)) as mine:
        own = {"w": jnp.arange(4.0), "n": 3}
        mine.save(1, Items(state=own, data=cases.Reader(1, at=3)))
        mine.wait()
        data = cases.Reader(-1)
        back = mine.restore(Items(state=own, data=data))
        report(mine=[back.state["w"].tolist(), back.state["n"], data.state, mine.verify() == ()])
        report(refused=outcome(lambda: mine.save(2, state, sync=True)))
with ckptmgr.CheckpointManager(f"{root}/wide", cases.options()) as manager:
    manager.save(2, state)
    manager.wait()
    report(together=[info.step for info in manager.steps()])
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(where 4 processes have saved, what they reported)."""
    root = tmp_path_factory.mktemp("saved")
    return root, test_saving.run(SAVE, root, world=4, timeout=100)


RESTORE = """
import re
from tests.multiprocess import test_restoring as cases, test_saving

def wrong_in(got):
    return [name for name, x in test_saving.values(1).items() if not same(got[name], x)]

wrong = {}
manager = ckptmgr.CheckpointManager(f"{root}/run", cases.options(read_only=True))
for shape in cases.MESHES[world]:
    mesh_of = cases.grid(shape)
    wrong[f"{shape}, as saved"] = wrong_in(manager.restore(cases.like(mesh_of, cases.SPECS)))
    wrong[f"{shape}, otherwise"] = wrong_in(manager.restore(cases.like(mesh_of, cases.SWAPPED)))
    wrong[f"{shape}, mesh alone"] = wrong_in(ckptmgr.restore(f"{root}/run", mesh=mesh_of))
latest = manager.restore_latest(cases.like(mesh_of, cases.SWAPPED))
wrong["latest"] = wrong_in(latest.state)
manager.close()
report(wrong=wrong, latest=latest.step)

# -- what each reads

def read_by_this_process():
    text = open("/proc/self/io").read()
    return int(re.search(r"rchar: (\\d+)", text)[1])

mesh_of = Mesh(np.array(jax.devices()), "x")
for name, spec in (("rows", P("x")), ("columns", P(None, "x")), ("copies", P())):
    target = {
        "w": jax.ShapeDtypeStruct((4096, 1024), np.float32, sharding=NamedSharding(mesh_of, spec))
    }
    plan = ckptmgr.plan_restore(f"{root}/wide", target, step=1)
    before = read_by_this_process()
    found = ckptmgr.restore(f"{root}/wide", target, step=1)
    report(**{name: dict(
        right=same(found["w"], cases.wide()),
        wanted=plan.wanted_bytes,
        planned=plan.read_bytes,
        read=read_by_this_process() - before,
    )})

# -- iterators of another number of processes

places = NamedSharding(mesh_of, P("x"))
target = {"w": jax.ShapeDtypeStruct((8,), np.float32, sharding=places)}
with ckptmgr.CheckpointManager(f"{root}/items", cases.options(read_only=True)) as manager:
    data = cases.Reader(-1)
    with_data = Items(state=target, data=data, real=cases.records(rank, world))
    report(
        refused=outcome(lambda: manager.restore(with_data)),
        latest_refused=outcome(lambda: manager.restore_latest(with_data)),
        data=data.state,
    )
    rest = manager.restore(Items(state=target), partial=True)
    every = manager.restore(item="data")
    report(
        rest=[sorted(rest), same(rest.state["w"], np.arange(8.0, dtype=np.float32))],
        every=[type(every) is ckptmgr.PerProcess, list(every)],
    )
"""


@pytest.fixture(scope="module")
def job(saved):
    """Gives what a number of processes report that restore it."""

    @test_saving.once
    def made(world):
        devices = 1 if world == 8 else 2
        return test_saving.run(RESTORE, saved[0], world=world, devices=devices, timeout=100)

    return made


WORLDS = pytest.mark.parametrize("world", [2, 8], ids="{} processes".format)


@WORLDS
def test_what_4_processes_saved_is_restored_by_another_number_on_other_meshes(job, world):
    for facts in job(world):
        assert len(facts["wrong"]) == 3 * len(MESHES[world]) + 1
        assert {where: names for where, names in facts["wrong"].items() if names} == {}
        assert facts["latest"] == 1


@pytest.mark.parametrize("shape", MESHES[1], ids="{0[0]} x {0[1]}".format)
def test_what_4_processes_saved_is_restored_by_one_on_other_meshes(saved, shape):
    root, mesh = saved[0] / "run", grid(shape)
    for specs in (SPECS, SWAPPED):
        target = like(mesh, specs)
        found = ckptmgr.restore(root, target)
        trees.assert_same_leaves(found, test_saving.values(1))
        trees.assert_same_placement(found, jax.tree.map(
            lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), target
        ))  # fmt: skip
    trees.assert_same_leaves(ckptmgr.restore(root, mesh=mesh), test_saving.values(1))


@WORLDS
def test_each_process_reads_only_what_its_devices_need(job, world):
    part = 16 * MIB // world
    for facts in job(world):
        for name in ("rows", "columns", "copies"):
            assert facts[name]["right"]
            metadata = facts[name]["read"] - facts[name]["planned"]
            assert 0 <= metadata < MIB / 4, (name, facts[name])
        assert facts["rows"]["wanted"] == facts["rows"]["planned"] == part
        assert facts["columns"]["wanted"] == part
        assert facts["copies"]["wanted"] == facts["copies"]["planned"] == 16 * MIB


def test_stages_of_a_pipeline_are_saved_by_those_that_hold_them(saved):
    for step in (1, 2):
        found = ckptmgr.restore(saved[0] / "stages", step=step)
        value = np.arange(32, dtype=np.float32).reshape(8, 4)
        trees.assert_same_leaves(found, {f"s{i}": value + i for i in range(4)})
        assert ckptmgr.verify(saved[0] / "stages", step).good


def test_stages_of_a_pipeline_are_restored_on_the_same_and_on_other_processes(saved):
    for facts in saved[1]:
        assert facts["stages_failed"] == [] and facts["stages"] == [True] * 4


def test_each_process_gets_back_the_state_of_its_own_iterator(saved):
    for rank, facts in enumerate(saved[1]):
        mine = {"process": rank, "at": 10 + rank}
        assert facts["state"] and facts["data"] == facts["without_target"] == mine
        assert facts["real"]
        assert facts["latest"] == [1, mine]


@WORLDS
def test_iterators_of_another_number_of_processes_are_refused_in_words(job, world):
    for facts in job(world):
        for said in (facts["refused"], facts["latest_refused"]):
            assert re.match(
                rf"InvalidOption: step 1, item 'data': .* saved by 4 processes.* this job has {world};"
                ".* without a target .* partial=True restores the rest",
                said[0],
            )
        assert facts["data"] == {"process": -1, "at": 0}


@WORLDS
def test_the_rest_is_restored_without_the_iterators(job, world):
    for facts in job(world):
        assert facts["rest"] == [["state"], True]


@WORLDS
def test_the_states_of_all_iterators_are_given_to_divide_them_anew(job, world):
    every = [{"process": rank, "at": 10 + rank} for rank in range(4)]
    for facts in job(world):
        assert facts["every"] == [True, every]


def test_one_process_is_told_the_same_of_the_iterators_of_several(saved):
    state = {"w": np.zeros(8, np.float32)}
    with pytest.raises(ckptmgr.InvalidOption, match="saved by 4 processes.*this job has 1;"):
        ckptmgr.restore(saved[0] / "items", Items(state=state, data=Reader(0), real=records(0, 1)))
    rest = ckptmgr.restore(saved[0] / "items", Items(state=state), partial=True)
    assert rest.state["w"].tolist() == list(range(8))
    every = ckptmgr.restore(saved[0] / "items", item="data")
    assert every == ckptmgr.PerProcess({"process": rank, "at": 10 + rank} for rank in range(4))


def test_an_evaluator_in_one_process_reads_by_itself(saved):
    assert [facts.get("evaluator") for facts in saved[1]] == [
        None,
        [[1], 1, True, True],
        None,
        None,
    ]


def test_a_manager_of_one_process_alone_saves_and_restores_what_is_its_own(saved):
    own = [[0.0, 1.0, 2.0, 3.0], 3, {"process": 1, "at": 3}, True]
    assert [facts.get("mine") for facts in saved[1]] == [None, own, None, None]


def test_a_manager_of_one_process_alone_refuses_arrays_of_several(saved):
    said = saved[1][1]["refused"]
    assert said and "several processes" in " ".join(said), said


def test_a_manager_of_one_process_alone_does_not_disturb_those_of_all(saved):
    assert [facts["together"] for facts in saved[1]] == [[1, 2]] * 4


# -- one step or none ---------------------------------------------------------------------------

AGREE = """
from ckptmgr.engine.reader import Reader
from tests.multiprocess import test_restoring as cases

places = NamedSharding(mesh(4), P("x"))
target = {"w": jax.ShapeDtypeStruct((8,), np.float32, sharding=places)}
damaged, slow = set(), []
start = Reader.start

def patched(self, *args):
    if self._step in damaged:
        raise CorruptCheckpoint(self._step, [Problem("default/d/1", "seen by a test alone")])
    if slow:
        time.sleep(slow.pop())
    return start(self, *args)

Reader.start = patched

def state(number):
    return {"w": put(np.full(8, number, np.float32), places)}

def number_of(found):
    (number,) = {float(x) for shard in found["w"].addressable_shards for x in np.asarray(shard.data)}
    return number

def told(found):
    return [found.step, number_of(found.state), [[s.step, s.reason] for s in found.skipped]]

def with_steps(name, count=3):
    manager = ckptmgr.CheckpointManager(f"{root}/{name}", cases.options())
    for step in range(1, count + 1):
        manager.save(step, state(step))
    manager.wait()
    return manager

def blind(manager, *steps):
    "The manager does not see these steps."
    look = manager._catalog._look
    manager._catalog._look = lambda step: None if step in steps else look(step)

# the newest is damaged, as one process alone finds
for who in (0, 1):
    manager = with_steps(f"damaged for {who}")
    damaged |= {3} if rank == who else set()
    failed = outcome(manager.restore)
    found = told(manager.restore_latest(target))
    listed = [info.step for info in manager.steps()]
    again = told(manager.restore_latest(target))
    damaged.clear()
    manager.save(3, state(33), sync=True)
    report(**{f"damaged for {who}": dict(
        failed=failed, found=found, listed=listed, again=again,
        saved_anew=told(manager.restore_latest(target)),
    )})
    manager.close()

# the newest is not there, as one process alone finds
for who in (0, 1):
    manager = with_steps(f"not seen by {who}")
    if rank == who:
        blind(manager, 3)
    failed, got = [], []
    failed = outcome(lambda: got.append(number_of(manager.restore(target))))
    report(**{f"not seen by {who}": dict(
        failed=failed, got=got, found=told(manager.restore_latest(target)),
    )})
    manager.close()

# all are damaged: some for one process, some for the other
manager = with_steps("all damaged")
damaged |= {1, 3} if rank == 0 else {2}
report(all_damaged=outcome(lambda: manager.restore_latest(target)))
report(all_damaged_again=outcome(lambda: manager.restore_latest(target)))
report(none_listed=outcome(lambda: manager.restore(target)))
damaged.clear()
manager.close()

# one process does not see the only step, and the other cannot read it, or can
manager = with_steps("only step", 1)
if rank == 1:
    blind(manager, 1)
report(not_seen=outcome(lambda: manager.restore_latest(target)))
damaged |= {1} if rank == 0 else set()
report(nowhere_seen=outcome(lambda: manager.restore_latest(target)))
damaged.clear()
manager.close()

# there is none
manager = with_steps("none", 0)
report(none=[repr(manager.restore_latest(target)), outcome(lambda: manager.restore(target))])
manager.close()

# the target does not fit in one process
manager = with_steps("misfit")
other = {"v": target["w"]} if rank == 1 else target
report(misfit=[outcome(lambda: manager.restore(other)), outcome(lambda: manager.restore_latest(other))])
report(after_misfit=told(manager.restore_latest(target)))

# a process is behind while the other fails, and fails, and goes on
hear = manager._coordinator._hear

def late(phase, seconds):
    if behind and phase.endswith("/step"):
        time.sleep(behind.pop())
    return hear(phase, seconds)

behind = [1.0] if rank == 1 else []
if rank == 1:
    manager._coordinator._hear = late
misfit = {"v": target["w"]}
report(
    behind=[
        outcome(lambda: manager.restore(misfit)),
        outcome(lambda: manager.restore_latest(misfit)),
        number_of(manager.restore(target)),
        behind,
    ]
)

# process 0 is slow
slow += [3.0] if rank == 0 else []
report(slow=number_of(manager.restore(target)), waited=not slow)
manager.close()
"""


@pytest.fixture(scope="module")
def agreed(tmp_path_factory):
    """(where, what two processes reported)."""
    root = tmp_path_factory.mktemp("agreed")
    return root, test_saving.run(AGREE, root, timeout=100)


def both(agreed, name):
    return [facts[name] for facts in agreed[1]]


@pytest.mark.parametrize("who", [0, 1])
def test_a_step_that_one_process_finds_damaged_is_passed_over_by_all(agreed, who):
    for facts in both(agreed, f"damaged for {who}"):
        step, number, skipped = facts["found"]
        assert (step, number) == (2, 2.0)
        assert len(skipped) == 1 and skipped[0][0] == 3
        assert f"process {who}: " in skipped[0][1] and "seen by a test alone" in skipped[0][1]


@pytest.mark.parametrize("who", [0, 1])
def test_the_damage_that_one_process_found_is_on_record_for_all(agreed, who):
    for facts in both(agreed, f"damaged for {who}"):
        assert facts["listed"] == [1, 2]
        step, number, skipped = facts["again"]
        assert (step, number) == (2, 2.0)
        assert [passed for passed, _ in skipped] == [3] and "earlier restore" in skipped[0][1]
        assert facts["saved_anew"] == [3, 33.0, []]


@pytest.mark.parametrize("who", [0, 1])
def test_no_process_goes_on_with_the_latest_step_where_one_finds_it_damaged(agreed, who):
    for rank, facts in enumerate(both(agreed, f"damaged for {who}")):
        kind = "CorruptCheckpoint" if rank == who else "PeerFailed"
        assert facts["failed"][0].startswith(kind), facts["failed"]
        assert "seen by a test alone" in facts["failed"][0]


def test_a_step_that_another_process_does_not_see_is_passed_over_by_all(agreed):
    for facts in both(agreed, "not seen by 1"):
        step, number, skipped = facts["found"]
        assert (step, number) == (2, 2.0)
        assert [passed for passed, _ in skipped] == [3] and "process 1" in skipped[0][1], skipped
        assert facts["got"] == []
    first, second = both(agreed, "not seen by 1")
    assert first["failed"][0].startswith("PeerFailed") and "no step 3" in first["failed"][0]
    assert second["failed"][0].startswith("StepNotFound: there is no step 3")
    assert not (agreed[0] / "not seen by 1" / "_ckptmgr" / "damaged").exists()


def test_a_step_that_process_0_does_not_see_is_not_there_for_any(agreed):
    for facts in both(agreed, "not seen by 0"):
        assert facts["failed"] == [] and facts["got"] == [2.0]
        assert facts["found"] == [2, 2.0, []]


def test_where_every_step_is_damaged_for_some_process_all_raise(agreed):
    for name in ("all_damaged", "all_damaged_again"):
        for said in both(agreed, name):
            assert said[0].startswith("CorruptCheckpoint: step 3 is damaged"), said
    for said in both(agreed, "none_listed"):
        assert said[0].startswith("StepNotFound: there is no committed step"), said


def test_a_step_that_only_process_0_sees_is_no_reason_for_any_to_begin_anew(agreed):
    for name in ("not_seen", "nowhere_seen"):
        for said in both(agreed, name):
            assert said[0].startswith("CorruptCheckpoint: step 1 is damaged"), said
            assert "there is no step 1" in said[0] or name == "nowhere_seen"


def test_where_there_is_no_step_all_say_so(agreed):
    for nothing, said in both(agreed, "none"):
        assert nothing == "None"
        assert len(said) == 1 and said[0].startswith("StepNotFound: there is no committed step")


def test_where_the_target_fits_in_all_processes_but_one_none_goes_on(agreed):
    for first, second in zip(*both(agreed, "misfit"), strict=True):
        assert first[0].startswith("PeerFailed") and "process 1: TreeMismatch" in first[0]
        assert second[0].startswith("TreeMismatch") and "missing in checkpoint" in second[0]
    assert both(agreed, "after_misfit") == [[3, 3.0, []]] * 2


def test_a_process_that_is_behind_hears_how_a_restore_went_that_failed_elsewhere(agreed):
    for first, latest, number, left in both(agreed, "behind"):
        assert first[0].startswith("TreeMismatch") and latest[0].startswith("TreeMismatch")
        assert number == 3.0 and left == []


def test_a_slow_process_is_waited_for(agreed):
    assert both(agreed, "slow") == [3.0, 3.0]
    assert both(agreed, "waited") == [True, True]
