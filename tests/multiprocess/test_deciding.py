"""What depends on a clock, a signal, a listing or on what is busy is decided once, for all."""

import jax.numpy as jnp
import pytest

import ckptmgr
from ckptmgr import Coordination, Heartbeat, Options
from ckptmgr.events import Clock
from tests.multiprocess import test_saving

pytestmark = pytest.mark.timeout(150)

DEADLINE = 30.0


def options(**rest):
    return Options(coordination=Coordination(deadline_seconds=DEADLINE), **rest)


class Turned(Clock):
    """A clock that goes on when it is told, in strides of its own."""

    def __init__(self, ahead, stride):
        self.now = 1e9 + ahead
        self.stride = stride

    def tick(self):
        self.now += self.stride

    def time(self):
        return self.now

    def monotonic(self):
        return self.now


CLOCKS = {
    "others run ahead": [(0, 1.0), (300, 7.3)],
    "others stand still": [(0, 1.0), (-300, 0.0)],
    "others go back": [(0, 1.0), (0, -2.0)],
    "others are late": [(500, 3.0), (0, 0.9)],
}
"""Of each process, how many seconds its clock is ahead and how many a step takes there."""

DECIDE = """
import random, shutil, threading
from jax.experimental import multihost_utils
from ckptmgr import KeepLast, Storage
from ckptmgr.engine.store import Store
from ckptmgr.testing import FaultyStore, Hold
from tests.multiprocess import test_deciding as cases

places = NamedSharding(mesh(4), P("x"))

def state(number):
    return {"w": put(np.full(8, number, np.float32), places)}

def number_of(found):
    (number,) = {float(x) for shard in found["w"].addressable_shards for x in np.asarray(shard.data)}
    return number

def open_at(name, clock=None, store=None, **rest):
    return ckptmgr.CheckpointManager(f"{root}/{name}", cases.options(**rest), clock=clock, store=store)

def meet(where):
    multihost_utils.sync_global_devices(where)

def numbers(manager):
    return [info.step for info in manager.steps()]

# -- by time

by_time = {}
for name, clocks in cases.CLOCKS.items():
    clock = cases.Turned(*clocks[rank])
    schedule = Schedule(every_seconds=3.0, at_steps=(10,))
    with open_at(name, clock, schedule=schedule) as manager:
        asked, saved = [], []
        for step in range(1, 25):
            clock.tick()
            if step % 2:  # every other step is asked for before
                asked.append([step, manager.should_save(step)])
            handle = manager.save(step, state(step))
            if handle.accepted:
                saved.append(step)
        manager.wait()
        by_time[name] = dict(asked=asked, saved=saved, listed=numbers(manager))
report(by_time=by_time)

# -- busy

def skipping(hold, who, name):
    store = FaultyStore(Store(f"{root}/{name}", durable=False), [hold] if rank == who else [])
    with open_at(name, store=store, snapshot=Snapshot(when_busy="skip")) as manager:
        first = manager.save(1, state(1))
        if rank == who:
            hold.reached.wait()
        meet(f"{name} is held")
        skipped = [manager.save(step, state(step)) for step in (2, 3)]
        meet(f"{name} is let go")
        hold.release()
        first.result()
        meet(f"{name} is over")
        last = manager.save(4, state(4))
        manager.wait()
        return dict(
            first=[first.accepted, last.accepted],
            skipped=[[handle.accepted, handle.reason] for handle in skipped],
            count=manager.saves_skipped,
            listed=numbers(manager),
        )

report(
    slow_write=skipping(Hold("arrays"), 1, "slow write"),
    slow_publish=skipping(Hold(lambda op: op.name == "rename"), 0, "slow publish"),
)

class Slow(Store):
    "Takes its time now and then."

    def arrays(self, name):
        if rank:
            time.sleep(random.uniform(0, 0.02))
        return super().arrays(name)

random.seed(rank)
store = Slow(f"{root}/jitter", durable=False)
with open_at("jitter", store=store, snapshot=Snapshot(when_busy="skip")) as manager:
    taken = []
    for step in range(60):
        time.sleep(random.uniform(0, 0.005))
        if step % 10 == 0:
            manager.wait()
        if manager.save(step, state(step)).accepted:
            taken.append(step)
    manager.wait()
    report(jitter=[taken, numbers(manager), manager.saves_skipped])

# -- heartbeats after a restart: one process has saved steps 1 to 6

with open_at("beats", heartbeat=Heartbeat(every_saves=4)) as manager:
    kinds = {step: manager.save(step, state(step)).result().kind for step in range(7, 14)}
    report(beats=kinds)

# -- retention, while somebody removes steps

lossy = dict(storage=Storage(durable=False), retention=KeepLast(1))
stop = threading.Event()
removed = []

def remove(folder):
    while not stop.wait(0.001):
        found = sorted(int(name) for name in os.listdir(folder) if name.isdigit())
        if len(found) > 1:
            victim = random.choice(found[:-1])
            shutil.rmtree(f"{folder}/{victim}", ignore_errors=True)
            removed.append(victim)

with open_at("removed", **lossy) as manager:
    thread = threading.Thread(target=remove, args=(f"{root}/removed",))
    if rank == 1:
        thread.start()
    for step in range(60):
        manager.save(step, state(step))
    manager.wait()
    stop.set()
    if rank == 1:
        thread.join()
    meet("nobody removes any more")
    report(removed=[numbers(manager), number_of(manager.restore(state(0))), bool(removed)])

with open_at("kept", retention=KeepLast(3)) as manager:
    for step in range(10):
        manager.save(step, state(step))
    manager.wait()
    meet("retention has run")
    report(kept=numbers(manager))

# -- by hand

with open_at("deleted") as manager:
    for step in range(1, 9):
        manager.save(step, state(step))
    manager.delete(3)
    after = numbers(manager)
    gone = manager.truncate_after(5)
    report(
        deleted=[after, list(gone), numbers(manager), number_of(manager.restore(state(0)))],
        not_there=outcome(lambda: manager.delete(3)),
        nothing_left=outcome(lambda: manager.truncate_after(0)),
    )
    manager.save(6, state(66), sync=True)
    report(saved_anew=[numbers(manager), number_of(manager.restore(state(0)))])

# -- a notice of preemption comes to one process

def preempted(name, who):
    schedule = Schedule(every_steps=None, on_preemption=True)
    with open_at(name, schedule=schedule) as manager:
        handles, step = [], 0
        while not manager.preempted:
            step += 1
            if step == 20 and rank == who:
                os.kill(os.getpid(), signal.SIGTERM)
            if manager.should_save(step):
                handles.append(manager.save(step, state(step)))
        later = [manager.should_save(step + n) for n in (1, 2)]
        return dict(
            saved=[[handle.step, handle.result().kind, handle.done] for handle in handles],
            step=step, later=later, right=number_of(manager.restore(state(0))) == step,
        )

report(preempted=preempted("preempted", int(arguments[0])))
"""


@pytest.fixture(scope="module")
def decided(tmp_path_factory):
    """(where, what two processes reported)."""
    root = tmp_path_factory.mktemp("decided")
    with ckptmgr.CheckpointManager(
        root / "beats", options(heartbeat=Heartbeat(every_saves=4))
    ) as m:
        for step in range(1, 7):
            m.save(step, {"w": jnp.full(8, step, jnp.float32)})
    return root, test_saving.run(DECIDE, root, 1, timeout=110)


def both(decided, name):
    return [facts[name] for facts in decided[1]]


@pytest.mark.parametrize("name", CLOCKS)
def test_process_0s_clock_says_for_all_when_it_is_time_to_save(decided, name):
    stride = CLOCKS[name][0][1]
    wanted, since = [], 0.0
    for step in range(1, 25):
        since += stride
        if since >= 3.0 or step == 10:
            wanted.append(step)
            since = 0.0
    for facts in both(decided, "by_time"):
        assert facts[name]["saved"] == facts[name]["listed"] == wanted
        assert facts[name]["asked"] == [[step, step in wanted] for step in range(1, 25, 2)]


@pytest.mark.parametrize("name", ["slow_write", "slow_publish"])
def test_while_one_process_is_busy_all_skip_the_same_steps(decided, name):
    for facts in both(decided, name):
        assert facts["first"] == [True, True] and facts["listed"] == [1, 4]
        assert facts["skipped"] == [[False, "the save of step 1 is still in flight"]] * 2
        assert facts["count"] == 2


def test_all_skip_the_same_steps_however_their_threads_run(decided):
    first, second = both(decided, "jitter")
    assert first == second
    taken, listed, skipped = first
    assert taken == listed and len(taken) + skipped == 60
    assert set(range(0, 60, 10)) <= set(taken) and skipped > 0


def test_heartbeats_fall_on_the_same_saves_after_a_restart_by_more_processes(decided):
    wanted = {str(step): "async" for step in range(7, 14)} | {"8": "heartbeat", "12": "heartbeat"}
    assert both(decided, "beats") == [wanted, wanted]
    with ckptmgr.CheckpointManager(
        decided[0] / "beats", options(heartbeat=Heartbeat(every_saves=4))
    ) as manager:  # and again in one process: one save since the last
        kinds = [manager.save(n, {"w": jnp.zeros(8)}).result().kind for n in range(14, 18)]
        assert kinds == ["async", "async", "heartbeat", "async"]
        assert [info.kind for info in manager.steps()[:6]] == [
            *["async"] * 3, "heartbeat", *["async"] * 2,
        ]  # fmt: skip


def test_retention_goes_on_while_somebody_removes_older_steps(decided):
    assert both(decided, "removed") == [[[59], 59.0, False], [[59], 59.0, True]]


def test_retention_keeps_the_same_steps_for_all(decided):
    assert both(decided, "kept") == [[7, 8, 9]] * 2


def test_steps_are_deleted_by_all_together(decided):
    wanted = [[1, 2, 4, 5, 6, 7, 8], [8, 7, 6], [1, 2, 4, 5], 5.0]
    assert both(decided, "deleted") == [wanted, wanted]
    assert both(decided, "saved_anew") == [[[1, 2, 4, 5, 6], 66.0]] * 2


def test_a_step_that_cannot_be_deleted_is_an_error_for_all(decided):
    first, second = both(decided, "not_there")
    assert first[0].startswith("StepNotFound: there is no step 3")
    assert "process 0: StepNotFound: there is no step 3" in second[0]
    first, second = both(decided, "nothing_left")
    assert first[0].startswith("InvalidOption: no good step at or below 0 would remain")
    assert "process 0: InvalidOption: no good step at or below 0" in second[0]


def assert_preempted(found):
    first, second = found
    assert first == second
    assert first["saved"] == [[first["step"], "preemption", True]]
    assert first["step"] >= 20 and first["later"] == [False, False] and first["right"]


def test_a_notice_to_one_process_makes_all_save_the_same_step(decided):
    assert_preempted(both(decided, "preempted"))


def test_without_jaxs_service_a_notice_to_process_0_makes_all_save_the_same_step(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("JAX_ENABLE_PREEMPTION_SERVICE", "0")
    begin = DECIDE.index("# -- by time")
    end = DECIDE.index("# -- a notice")
    found = test_saving.run(DECIDE[:begin] + DECIDE[end:], tmp_path, 0)
    assert_preempted([facts["preempted"] for facts in found])
    assert found[0]["preempted"]["step"] == 20
