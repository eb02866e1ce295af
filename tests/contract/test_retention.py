"""What is kept on disk: policies, budgets, pins, leases, across restarts and from the shell."""

import json
import re
import threading

import numpy as np
import pytest

import ckptmgr
from ckptmgr import (
    Budget,
    CheckpointManager,
    KeepBest,
    KeepEvery,
    KeepLast,
    Options,
    Schedule,
    watch,
)
from ckptmgr.cli import main
from ckptmgr.engine.store import Store
from ckptmgr.testing import FaultyStore, Hold
from tests.support import run_python

LEAST = KeepLast(1)


def state(number):
    return {"w": np.full(1000, number, np.float32)}


def numbers(root):
    with CheckpointManager(root, Options(read_only=True)) as found:
        return [info.step for info in found.steps()]


def save(root, steps, policy, **options):
    """Saves `steps`: numbers, or step -> metrics; each in a manager of its own."""
    for step in steps:
        metrics = steps[step] if isinstance(steps, dict) else None
        with CheckpointManager(root, Options(retention=policy, heartbeat=None, **options)) as mgr:
            mgr.save(step, state(step), metrics=metrics)


def test_the_best_and_the_newest_stay_though_the_newest_is_the_worst(tmp_path):
    losses = {100 * n: {"err": n / 10} for n in range(1, 6)}
    save(tmp_path, losses, KeepBest(3, "err"))
    assert numbers(tmp_path) == [100, 200, 300, 500]
    save(tmp_path / "other", losses, KeepLast(1) | KeepBest(2, "err"))
    assert numbers(tmp_path / "other") == [100, 200, 500]


def test_a_save_off_the_grid_costs_no_step_of_the_grid(tmp_path):
    save(tmp_path, (100, 200, 237, 300, 400), KeepLast(1) | KeepEvery(steps=100))
    assert numbers(tmp_path) == [100, 200, 300, 400]


def test_metrics_kinds_pins_and_the_best_step_are_there_after_a_restart(tmp_path):
    save(
        tmp_path,
        {1: {"loss": 2.0}, 2: {"loss": 1.0}, 3: {"loss": float("nan")}},
        LEAST | KeepBest(2, "loss"),
    )
    with CheckpointManager(tmp_path, Options(retention=KeepBest(2, "loss"))) as found:
        assert found.best_step() == 2
        assert found.best_step("loss", "max") == 1
        assert found.best_step("accuracy") is None
        found.pin(1, "for the paper")
        assert found.info(1).pinned
    with CheckpointManager(tmp_path) as found:
        assert [info.pinned for info in found.steps()] == [True, False, False]
        assert found.info(2).metrics == {"loss": 1.0}
        with pytest.raises(ckptmgr.InvalidOption, match="needs a metric"):
            found.best_step()


def test_a_pinned_step_stays_through_retention_and_is_not_deleted_until_it_is_unpinned(tmp_path):
    save(tmp_path, (1, 2), ckptmgr.KeepAll())
    with CheckpointManager(tmp_path, Options(retention=LEAST)) as found:
        found.pin(1, "baseline")
        with pytest.raises(ckptmgr.InvalidOption, match=r"step 1 is pinned \(baseline\)"):
            found.delete(1)
        with pytest.raises(ckptmgr.StepNotFound):
            found.pin(7, "not there")
        with pytest.raises(ckptmgr.InvalidOption, match="reason"):
            found.pin(2, "")
    save(tmp_path, (3, 4), LEAST)
    assert numbers(tmp_path) == [1, 4]
    with CheckpointManager(tmp_path, Options(retention=LEAST)) as found:
        found.pin(4, "too")
        with pytest.raises(ckptmgr.InvalidOption, match="step 4 is pinned"):
            found.truncate_after(1)
        found.unpin(4)
        found.unpin(1)
        found.unpin(99)
    save(tmp_path, (5,), LEAST)
    assert numbers(tmp_path) == [5]
    assert not list((tmp_path / "_ckptmgr" / "pins").iterdir())


def test_a_pin_that_cannot_be_read_is_a_pin(tmp_path):
    save(tmp_path, (1,), LEAST)
    pins = tmp_path / "_ckptmgr" / "pins"
    pins.mkdir()
    (pins / "1.json").write_text("{")
    save(tmp_path, (2,), LEAST)
    assert numbers(tmp_path) == [1, 2]


def test_the_newest_verified_step_stays(tmp_path):
    save(tmp_path, (1,), LEAST)
    with CheckpointManager(tmp_path) as found:
        assert found.verify(1) == ()
    save(tmp_path, (2, 3), LEAST)
    assert numbers(tmp_path) == [1, 3]


def test_a_budget_gives_up_the_lowest_steps_and_says_so(tmp_path, caplog):
    save(tmp_path, (1,), KeepLast(9))
    with CheckpointManager(tmp_path) as found:
        info = found.info(1)
    files = [path for path in (tmp_path / "1").rglob("*") if path.is_file()]
    manifest = tmp_path / "1" / "_CKPTMGR"
    assert info.stored_files == len(files) - 1
    assert info.stored_bytes == sum(f.stat().st_size for f in files) - manifest.stat().st_size
    room = KeepLast(9) & Budget(bytes=int(3.5 * info.stored_bytes))
    save(tmp_path, (2, 3), room)
    assert any("are used" in r.getMessage() for r in caplog.records)
    save(tmp_path, (4,), room)
    assert numbers(tmp_path) == [2, 3, 4]
    assert any("does not allow to keep step 1 (last 9)" in r.getMessage() for r in caplog.records)


def test_a_budget_smaller_than_what_must_stay_is_exceeded_with_a_warning(tmp_path, caplog):
    save(tmp_path, (1, 2), KeepLast(2) & Budget(files=3))
    assert numbers(tmp_path) == [2]
    assert any("budget of 3 files is exceeded" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize(
    "call",
    [
        lambda: KeepBest(0, "x"),
        lambda: KeepBest(1, ""),
        lambda: KeepBest(1, "x", "low"),
        lambda: KeepEvery(steps=0),
        lambda: ckptmgr.KeepEverySeconds(0),
        lambda: ckptmgr.KeepEverySeconds(float("inf")),
        lambda: ckptmgr.KeepHeartbeats(-1),
        lambda: ckptmgr.KeepLogSpaced(True),
        lambda: Budget(),
        lambda: Budget(bytes=-5),
        lambda: (KeepLast(1) & Budget(files=1)) | KeepLast(2),
        lambda: KeepLast(1) | Budget(files=1),
        lambda: KeepLast(1) & KeepLast(2),
        lambda: Budget(files=1) & KeepLast(2),
        lambda: Budget(bytes=1.5),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_in_one_sentence(call):
    with pytest.raises(ckptmgr.InvalidOption) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_a_metric_that_is_misspelt_costs_no_step_and_is_said_to_be_so(tmp_path, caplog):
    save(tmp_path, {n: {"loss": float(n)} for n in range(1, 4)}, KeepLast(1) | KeepBest(1, "los"))
    assert numbers(tmp_path) == [1, 2, 3]
    assert any("'los'" in r.getMessage() and "'loss'" in r.getMessage() for r in caplog.records)
    assert Budget(bytes=5e9) == Budget(bytes=5 * 10**9)


# -- watching ---------------------------------------------------------------------------------


def test_an_evaluator_gets_each_new_step_and_retention_leaves_it_while_it_reads(tmp_path):
    save(tmp_path, (1,), LEAST)
    found = watch(tmp_path, poll_seconds=0.01, timeout_seconds=30)
    assert next(found).step == 1
    save(tmp_path, (2, 3), LEAST)
    assert numbers(tmp_path) == [1, 3]
    assert ckptmgr.restore(tmp_path, step=1)["w"][0] == 1
    assert next(found).step == 3
    save(tmp_path, (4,), LEAST)
    assert numbers(tmp_path) == [3, 4]
    found.close()
    save(tmp_path, (5,), LEAST)
    assert numbers(tmp_path) == [5]
    assert not list((tmp_path / "_ckptmgr" / "leases").iterdir())


def test_only_the_newest_is_yielded_unless_every_step_is_asked_for(tmp_path):
    save(tmp_path, (1, 2, 3), KeepLast(9))
    fast = {"poll_seconds": 0.01, "timeout_seconds": 0.05}
    assert [info.step for info in watch(tmp_path, **fast)] == [3]
    assert [info.step for info in watch(tmp_path, every=True, **fast)] == [1, 2, 3]
    assert [info.step for info in watch(tmp_path, after=2, every=True, **fast)] == [3]
    ended = watch(tmp_path, every=True, until=lambda info: info.step == 2, poll_seconds=0.01)
    assert [info.step for info in ended] == [1, 2]


def test_a_step_that_is_saved_again_is_new(tmp_path):
    save(tmp_path, (1,), KeepLast(9))
    found = watch(tmp_path, poll_seconds=0.01, timeout_seconds=0.05)
    assert next(found).metrics == {}
    with CheckpointManager(tmp_path) as mgr:
        mgr.save(1, state(9), metrics={"again": 1}, overwrite=True)
    assert next(found).metrics == {"again": 1}
    assert next(found, None) is None


def test_watching_may_begin_before_the_directory_is_there_and_ends_when_told(tmp_path):
    stop = threading.Event()
    got = []

    def evaluate():
        for info in watch(tmp_path / "later", poll_seconds=0.01, stop=stop):
            got.append(info.step)
            if info.step == 2:
                stop.set()

    thread = threading.Thread(target=evaluate)
    thread.start()
    save(tmp_path / "later", (1, 2), KeepLast(9))
    thread.join(30)
    assert not thread.is_alive()
    assert got[-1] == 2


def test_the_lease_of_a_process_that_was_killed_holds_nothing(tmp_path):
    save(tmp_path, (1,), LEAST)
    run_python(
        """
        import os, signal, sys, ckptmgr
        for info in ckptmgr.watch(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
        check=False,
    )
    assert list((tmp_path / "_ckptmgr" / "leases").iterdir())
    save(tmp_path, (2,), LEAST)
    assert numbers(tmp_path) == [2]
    assert not list((tmp_path / "_ckptmgr" / "leases").iterdir())


@pytest.mark.parametrize(
    "wrong", [{"poll_seconds": 0}, {"timeout_seconds": -1}, {"lease_seconds": 0}, {"after": -1}]
)
def test_watching_with_senseless_times_is_refused_at_once(tmp_path, wrong):
    with pytest.raises(ckptmgr.InvalidOption):
        watch(tmp_path, **wrong)


# -- pruning ----------------------------------------------------------------------------------


def test_prune_says_why_and_a_dry_run_deletes_nothing(tmp_path, capsys):
    save(tmp_path, {n: {"loss": abs(n - 3)} for n in range(1, 7)}, KeepLast(9))
    with CheckpointManager(tmp_path) as found:
        found.pin(1, "why not")
    call = ["prune", str(tmp_path), "--keep-last", "2", "--keep-best", "1:loss"]
    assert main([*call, "--dry-run"]) == 0
    rows = [re.split(" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [
        ["1", "kept", "pinned"],
        ["2", "would go", "nothing keeps it"],
        ["3", "kept", "best loss (min)"],
        ["4", "would go", "nothing keeps it"],
        ["5", "kept", "last 2"],
        ["6", "kept", "last 2"],
    ]
    assert numbers(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert main([*call, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["deleted"] == [2, 4]
    assert {entry["step"] for entry in told["keep"]} == {1, 3, 5, 6}
    assert numbers(tmp_path) == [1, 3, 5, 6]


def test_prune_decides_as_the_manager_does(tmp_path):
    policy = KeepLast(2) | KeepEvery(steps=4)
    save(tmp_path / "a", range(1, 10), policy)
    save(tmp_path / "b", range(1, 10), KeepLast(99))
    decision = ckptmgr.prune(tmp_path / "b", policy)
    assert sorted(decision.keep) == numbers(tmp_path / "a")
    assert numbers(tmp_path / "b") == list(range(1, 10))
    ckptmgr.prune(tmp_path / "b", policy, dry_run=False)
    assert numbers(tmp_path / "b") == numbers(tmp_path / "a")


@pytest.mark.parametrize(
    ("call", "status"),
    [
        (["--keep-last", "0"], 2),
        ([], 2),
        (["--budget-bytes", "1"], 0),
    ],
)
def test_prune_refuses_what_makes_no_sense(tmp_path, call, status, capsys):
    save(tmp_path, (1, 2), KeepLast(9))
    assert main(["prune", str(tmp_path), "--dry-run", *call]) == status
    assert numbers(tmp_path) == [1, 2]


@pytest.mark.parametrize("wrong", ["--keep-best=loss", "--keep-best=1:", "--budget-bytes=5XB"])
def test_prune_refuses_what_it_cannot_read(tmp_path, wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["prune", str(tmp_path), wrong])
    assert ended.value.code == 2
    assert "is not" in capsys.readouterr().err


def test_prune_of_a_directory_without_steps_says_so(tmp_path, capsys):
    assert main(["prune", str(tmp_path), "--keep-last", "1"]) == 3
    assert main(["prune", str(tmp_path / "none"), "--keep-last", "1"]) == 1


# -- when -------------------------------------------------------------------------------------


class Turned(ckptmgr.events.Clock):
    """A clock that a test turns."""

    def __init__(self):
        self.now = 0.0

    def time(self):
        return 1e9 + self.now

    def monotonic(self):
        return self.now


def test_a_schedule_by_seconds_is_due_so_long_after_the_last_accepted_save(tmp_path):
    clock = Turned()
    options = Options(schedule=Schedule(every_seconds=60))
    with CheckpointManager(tmp_path, options, clock=clock) as found:
        assert not found.should_save(1)
        clock.now = 59.9
        assert not found.should_save(2)
        clock.now = 60.0
        assert found.should_save(3) and found.save(3, state(3)).accepted
        assert not found.should_save(3) and not found.should_save(4)
        clock.now = 130.0
        assert found.save(5, state(5)).accepted
        clock.now = 100.0  # back
        assert not found.save(6, state(6)).accepted


def test_a_continuous_schedule_saves_whenever_nothing_is_in_flight(tmp_path):
    clock, hold = Turned(), Hold("sync_tree")
    store = FaultyStore(Store(str(tmp_path)))
    store.arm(hold)
    options = Options(schedule=Schedule(continuous_seconds=5))
    with CheckpointManager(tmp_path, options, clock=clock, store=store) as found:
        clock.now = 5.0
        assert found.save(1, state(1)).accepted
        clock.now = 50.0
        assert not found.should_save(2)
        hold.release()
        found.wait()
        assert found.should_save(3) and found.save(3, state(3)).accepted
        found.wait()
        clock.now = 54.0
        assert not found.should_save(4)


def test_an_adaptive_schedule_stays_within_its_bounds_and_says_why_it_changes(tmp_path):
    clock, events = Turned(), []
    adaptive = ckptmgr.Adaptive(shortest_seconds=10, longest_seconds=1000)
    options = Options(schedule=Schedule(adaptive=adaptive), heartbeat=None)
    with CheckpointManager(tmp_path, options, clock=clock, events=[events.append]) as found:
        for step in range(1, 41):
            clock.now += 10.0
            found.save(step, state(step))
            found.wait()
    changes = [event for event in events if event.phase == "adapt"]
    assert all(10 <= event.seconds <= 1000 and event.detail for event in changes)
    known = json.loads((tmp_path / "_ckptmgr" / "pace.json").read_text())
    assert known["at_work"] is False and known["measured"]["saves"] > 0
    assert known["measured"]["failures"] == 0


def test_a_run_that_was_killed_counts_as_a_failure_of_the_adaptive_schedule(tmp_path):
    run_python(
        """
        import os, signal, sys, ckptmgr
        schedule = ckptmgr.Schedule(adaptive=ckptmgr.Adaptive(), every_steps=1)
        manager = ckptmgr.CheckpointManager(sys.argv[1], ckptmgr.Options(schedule=schedule))
        manager.save(1, {"n": 1}).result()
        manager.wait()
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
        check=False,
    )
    options = Options(schedule=Schedule(adaptive=ckptmgr.Adaptive()))
    for _ in range(2):  # the second start follows an end as it should be
        CheckpointManager(tmp_path, options).close()
    known = json.loads((tmp_path / "_ckptmgr" / "pace.json").read_text())
    assert known["measured"]["failures"] == 1
    assert known["measured"]["saves"] == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"every_seconds": 0},
        {"every_seconds": True},
        {"continuous_seconds": -1},
        {"adaptive": 5},
        {"every_steps": 0},
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ckptmgr.InvalidOption):
        Schedule(**wrong)
