"""Roots that vanish, clocks that jump, and managers that share one directory."""

import contextlib
import errno
import os
import threading

import jax
import pytest

import ckptmgr
from ckptmgr.core import layout
from ckptmgr.engine.store import Store
from ckptmgr.testing import Fault, Hold, TornStager
from tests.fault.common import (
    LIMIT,
    faulty,
    join_sweep,
    leftovers,
    manager,
    numbers,
    reader,
    remove,
    swept,
)
from tests.fault.scenarios import number_of, tree
from tests.support import run_python

# -- a root that vanishes -----------------------------------------------------------------------


def operations_of_a_save(root):
    store = faulty(root)
    with manager(root, store=store, heartbeat=None) as found:
        found.save(1, tree(1)).result(LIMIT)
        store.arm()
        found.save(2, tree(2)).result(LIMIT)
    return list(store.operations)


def move_away(root):
    root.rename(root.with_name(root.name + "-away"))


def put_a_file_there(root):
    while not root.is_file():
        remove(root)
        with contextlib.suppress(IsADirectoryError):  # made again by what is still being written
            root.write_text("a file")


@pytest.mark.parametrize("vanish", [remove, move_away, put_a_file_there])
def test_a_root_that_vanishes_under_a_save_is_told_or_the_step_is_whole_and_the_next_works(
    vanish, tmp_path
):
    wrong = []
    operations = operations_of_a_save(tmp_path / "count")
    commit = next(operation.number for operation in operations if operation.name == "rename")
    for operation in operations:
        root = tmp_path / str(operation.number)
        hold = Hold(operation.number)
        store = faulty(root)
        with manager(root, store=store, heartbeat=None) as found:
            found.save(1, tree(1)).result(LIMIT)
            store.arm(hold)
            handle = found.save(2, tree(2))
            assert hold.reached.wait(LIMIT)
            try:
                vanish(root)
            finally:
                hold.release()
            told = False
            try:
                handle.result(LIMIT)
            except ckptmgr.SaveFailed as exc:
                told = exc.step == 2 and exc.__cause__ is not None
            there = root.is_dir() and 2 in numbers(reader(root))
            if there:
                number_of(reader(root).restore(step=2))
            if not (told or there) and operation.number <= commit:  # later it went as a step
                wrong.append(f"{operation.number} {operation.name} {operation.path}")
            if root.is_file():
                root.unlink()
            found.save(3, tree(3)).result(LIMIT)
            assert number_of(found.restore(step=3)) == 3
        if vanish is move_away:
            away = root.with_name(root.name + "-away")
            assert number_of(reader(away).restore(step=1)) == 1
    assert wrong == []


def test_a_root_that_comes_back_is_the_one_it_was(tmp_path):
    root = tmp_path / "run"
    with manager(root, heartbeat=None, retention=ckptmgr.KeepLast(2)) as found:
        for step in (1, 2):
            found.save(step, tree(step)).result(LIMIT)
        found.wait()
        move_away(root)
        assert found.steps() == () and found.latest_step() is None
        with pytest.raises(ckptmgr.StepNotFound, match=str(root)):
            found.restore()
        (tmp_path / "run-away").rename(root)
        assert numbers(found) == (1, 2)
        assert number_of(found.restore()) == 2


# -- a clock that jumps -------------------------------------------------------------------------


class Clock:
    """A clock that is set by hand."""

    def __init__(self, now):
        self.now = now

    def time(self):
        return self.now

    def monotonic(self):
        return self.now


@pytest.mark.parametrize("jump", [3600.0, 0.0, -3600.0], ids=["on", "nowhere", "back"])
def test_whatever_the_clock_does_torn_copies_since_the_last_heartbeat_are_marked(jump, tmp_path):
    options = ckptmgr.Options(
        heartbeat=ckptmgr.Heartbeat(every_saves=3), storage=ckptmgr.Storage(durable=False)
    )
    clock = Clock(1e9)
    stager = TornStager(options.snapshot, "w")
    stager.armed = False
    with ckptmgr.CheckpointManager(tmp_path, options, clock=clock, stager=stager) as found:
        for step in (1, 2, 3):
            clock.now += 1
            found.save(step, tree(step)).result(LIMIT)
        clock.now += jump
        for step in (4, 5):
            clock.now += 1
            found.save(step, tree(step)).result(LIMIT)
        stager.armed = True
        with pytest.raises(ckptmgr.SaveFailed) as caught:
            found.save(6, tree(6))
        assert caught.value.__cause__.suspects == (4, 5)
        assert found.restore_latest(None).step == 3


def test_an_attempt_of_another_host_from_the_future_is_left_alone(tmp_path):
    hold = Hold("sync_tree")
    with manager(tmp_path, store=faulty(tmp_path, hold), heartbeat=None) as found:
        handle = found.save(5, tree(5))
        assert hold.reached.wait(LIMIT)
        (intent,) = (tmp_path / layout.intents_dir()).iterdir()
        text = intent.read_text()
        intent.write_text(text.replace(os.uname().nodename, "elsewhere"))
        clock = Clock(1.0)  # long before anything in the directory was written
        ckptmgr.CheckpointManager(tmp_path, clock=clock).close()
        join_sweep()
        hold.release()
        handle.result(LIMIT)
        assert number_of(found.restore()) == 5


# -- two managers on one directory --------------------------------------------------------------


def test_the_second_of_two_managers_that_save_a_step_is_told_before_or_after(tmp_path):
    first, second = manager(tmp_path, heartbeat=None), manager(tmp_path, heartbeat=None)
    first.save(1, tree(1)).result(LIMIT)
    with pytest.raises(ckptmgr.StepExists):  # it looks into the directory, not into its memory
        second.save(1, tree(10))
    hold = Hold("rename")
    with manager(tmp_path, store=faulty(tmp_path, hold), heartbeat=None) as slow:
        handle = slow.save(2, tree(20))
        assert hold.reached.wait(LIMIT)
        second.save(2, tree(2)).result(LIMIT)
        hold.release()
        with pytest.raises(ckptmgr.SaveFailed, match="step 2 exists already"):
            handle.result(LIMIT)
    for found in (first, second):
        assert numbers(found) == (1, 2)
        assert number_of(found.restore(step=1)) == 1
        assert number_of(found.restore(step=2)) == 2
        found.close()
    assert leftovers(tmp_path) == []


def test_retention_of_one_manager_never_deletes_the_newest_steps_of_another(tmp_path):
    """Two managers take turns; at any time the last two steps that were told of are there."""
    policy = ckptmgr.KeepLast(2)
    both = [manager(tmp_path, heartbeat=None, retention=policy) for _ in range(2)]
    for step in range(1, 25):
        found = both[step % 2]
        found.save(step, tree(step)).result(LIMIT)
        found.wait()
        there = numbers(reader(tmp_path))
        assert there == tuple(range(max(1, step - 1), step + 1))
        assert number_of(reader(tmp_path).restore()) == step
    for found in both:
        found.close()


def test_retention_never_deletes_what_another_manager_replaced_as_the_newest(tmp_path):
    hold = Hold(lambda op: op.name == "rename" and op.path == "1")  # the first deletion
    store = faulty(tmp_path)
    policy = ckptmgr.KeepLast(1)
    with manager(tmp_path, heartbeat=None) as other:
        for step in (1, 2):
            other.save(step, tree(step)).result(LIMIT)
        with manager(tmp_path, store=store, heartbeat=None, retention=policy) as found:
            store.arm(hold)
            handle = found.save(3, tree(3))
            assert hold.reached.wait(LIMIT)
            other.save(3, tree(30), overwrite=True).result(LIMIT)
            other.save(4, tree(4)).result(LIMIT)
            hold.release()
            handle.result(LIMIT)
            found.wait()
        assert {3, 4} <= set(numbers(other))
        assert number_of(other.restore(step=3)) == 30
        assert number_of(other.restore(step=4)) == 4


def test_a_rollback_while_another_managers_retention_runs_leaves_a_step(tmp_path):
    hold = Hold(lambda op: op.name == "rename" and op.path == "1")
    store = faulty(tmp_path)
    with manager(tmp_path, heartbeat=None) as other:
        for step in (1, 2):
            other.save(step, tree(step)).result(LIMIT)
        policy = ckptmgr.KeepLast(1)
        with manager(tmp_path, store=store, heartbeat=None, retention=policy) as found:
            store.arm(hold)
            handle = found.save(3, tree(3))
            assert hold.reached.wait(LIMIT)
            with contextlib.suppress(ckptmgr.InvalidOption):
                other.truncate_after(2)  # it sees the steps 1, 2, and 3
            hold.release()
            handle.result(LIMIT)
            found.wait()
        assert numbers(other) != (), "the rollback kept 1 and 2, retention kept 3: all are gone"


TOGETHER = """
    import os, sys
    import jax, jax.numpy, numpy, ckptmgr
    from tests.fault import common
    from tests.fault.scenarios import number_of, tree

    root, steps = sys.argv[1], int(sys.argv[2])

    def live(first, out):
        found = common.manager(root, heartbeat=None, retention=ckptmgr.KeepLast(3))
        for step in range(first, steps, 2):  # each its own steps
            found.save(step, tree(step)).result(common.LIMIT)
            os.write(out, f"{step}\\n".encode())
            got = found.restore_latest(None)
            assert got.skipped == () and number_of(got.state) == got.step >= step
        found.close()

    ours, theirs = os.pipe()
    pids = []
    for first in (0, 1):
        pid = os.fork()
        if pid == 0:
            status = 9
            try:
                live(first, theirs)
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    os.close(theirs)
    print([os.waitpid(pid, 0)[1] for pid in pids])
    """


def test_two_processes_that_train_into_one_directory_lose_no_newest_step(tmp_path):
    steps = 60
    assert run_python(TOGETHER, tmp_path, steps).stdout.strip() == "[0, 0]"
    with swept(tmp_path) as found:
        there = numbers(found)
        assert there[-1] == steps - 1 and len(there) >= 3
        for step in there:
            assert number_of(found.restore(step=step)) == step
        assert leftovers(tmp_path) == []


def test_a_deletion_and_an_overwrite_at_once_leave_the_new_step_or_none(tmp_path):
    with manager(tmp_path, heartbeat=None) as one, manager(tmp_path, heartbeat=None) as two:
        for turn in range(15):
            one.save(7, tree(1), overwrite=True).result(LIMIT)
            start, told = threading.Barrier(2), []

            def write(start=start, told=told, number=100 + turn):
                start.wait(LIMIT)
                one.save(7, tree(number), overwrite=True).result(LIMIT)
                told.append(number)

            def delete(start=start):
                start.wait(LIMIT)
                with contextlib.suppress(ckptmgr.StepNotFound):
                    two.delete(7)

            threads = [threading.Thread(target=act) for act in (write, delete)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LIMIT)
            assert told == [100 + turn]
            if numbers(one):
                assert number_of(one.restore(step=7)) == 100 + turn
    assert leftovers(tmp_path) == []


# -- a reader beside a manager whose retention runs ---------------------------------------------


class Busy(Store):
    """After the root was listed, or an array is about to be read, another manager goes on."""

    def __init__(self, root, other):
        super().__init__(str(root), durable=False)
        self.other, self.newest, self.left = other, 1, 1

    def names(self, name=""):
        found = super().names(name)
        if name == "" and self.left:
            self.left -= 1
            self.newest += 1
            self.other.save(self.newest, tree(self.newest)).result(LIMIT)
            self.other.wait()
        return found


ASK = {
    "latest_step": lambda found: found.latest_step(),
    "restore": lambda found: number_of(found.restore()),
    "restore_latest": lambda found: number_of(found.restore_latest(None).state),
    "steps": lambda found: found.steps()[-1].step,
}


@pytest.mark.parametrize("call", ASK)
@pytest.mark.parametrize("times", [1, 3])
def test_steps_that_come_and_go_while_the_directory_is_listed_do_not_make_it_seem_empty(
    times, call, tmp_path
):
    with manager(tmp_path, heartbeat=None, retention=ckptmgr.KeepLast(1)) as other:
        other.save(1, tree(1)).result(LIMIT)
        store = Busy(tmp_path, other)
        store.left = times
        with manager(tmp_path, store=store, read_only=True) as found:
            assert ASK[call](found) >= 1


BESIDE = """
    import collections, sys, threading
    import numpy, ckptmgr
    from tests.fault import common
    from tests.fault.scenarios import number_of, tree

    root, told, over = sys.argv[1], collections.Counter(), threading.Event()
    big = lambda number: {**tree(number), "big": numpy.full(100_000, number, numpy.float32)}

    def write():
        with common.manager(root, heartbeat=None, retention=ckptmgr.KeepLast(1)) as found:
            for number in range(2, 120):
                found.save(number, big(number)).result()
        over.set()

    with common.manager(root) as found:
        found.save(1, big(1)).result()
    thread = threading.Thread(target=write)
    thread.start()
    with common.reader(root) as found:
        calls = {
            "restore_latest": lambda: found.restore_latest(None).state,
            "restore": found.restore,
            "ckptmgr.restore": lambda: ckptmgr.restore(root),
        }
        while not over.is_set():
            for name, call in calls.items():
                try:
                    got = call()
                except Exception as exc:
                    told[f"{name}: {type(exc).__name__}"] += 1
                    continue
                big_one = got.pop("big")
                assert (big_one == number_of(got)).all()
    thread.join()
    print(dict(told))
    """


def test_a_reader_beside_a_manager_that_keeps_one_step_always_gets_a_step(tmp_path):
    assert run_python(BESIDE, tmp_path).stdout.strip() == "{}"


# -- a full disk at a restart -------------------------------------------------------------------


def test_a_restart_on_a_full_disk_passes_over_a_damaged_step(tmp_path):
    with manager(tmp_path, heartbeat=None) as found:
        for step in (1, 2):
            found.save(step, tree(step)).result(LIMIT)
    file = tmp_path / "2" / layout.tree_file("default")
    file.write_bytes(file.read_bytes() + b" ")
    full = Fault(lambda op: op.name != "remove_file", error=errno.ENOSPC, for_good=True)
    with manager(tmp_path, store=faulty(tmp_path, full), heartbeat=None) as found:
        latest = found.restore_latest(jax.eval_shape(lambda: tree(0)) | {"n": 0})
        assert latest.step == 1 and [skipped.step for skipped in latest.skipped] == [2]
