"""Every Nth save is synchronous, complete, audited, and read back from storage."""

import errno
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckptmgr
from ckptmgr import AuditFailed, Heartbeat, InvalidOption, KeepLast, Options, SaveFailed, Snapshot
from ckptmgr.engine.store import Store
from ckptmgr.testing import Fault, FaultyStore, Hold, TornStager
from tests.support.trees import assert_same_leaves

ASYNC = ("copy_on_write", "double_buffer")


def options(every=3, mode="copy_on_write", **rest):
    heartbeat = Heartbeat(every_saves=every, audit=rest.pop("audit", True))
    return Options(snapshot=Snapshot(mode=mode), heartbeat=heartbeat, **rest)


def state(mesh, number):
    """One large sharded leaf, a replicated one, a host one, and more small ones than are
    transferred one by one."""
    rows = jax.NamedSharding(mesh, jax.P(mesh.axis_names[0]))
    same = jax.NamedSharding(mesh, jax.P())
    size = mesh.size
    small = {
        f"s{i}": jax.device_put(np.full((size, 3 + i % 3), number + i, np.float32), rows)
        for i in range(60)
    }
    return {
        "large": jax.device_put(np.full((size * 64, 300), number, np.float32), rows),
        "same": jax.device_put(np.full((70, 5), number, np.int32), same),
        "host": np.full((9, 2), number, np.float64),
        "small": small,
    }


def flat_mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def kinds(manager):
    return {info.step: info.kind for info in manager.steps()}


# -- when -------------------------------------------------------------------------------------


def test_every_nth_accepted_save_is_a_heartbeat_and_is_durable_when_save_returns(tmp_path):
    with ckptmgr.CheckpointManager(tmp_path, options(3)) as manager:
        for step in range(1, 8):
            handle = manager.save(step, {"x": jnp.full(8, step)})
            if step % 3 == 0:
                assert handle.done and handle.result().kind == "heartbeat"
        manager.wait()
        assert kinds(manager) == {
            **dict.fromkeys((1, 2, 4, 5, 7), "async"),
            **dict.fromkeys((3, 6), "heartbeat"),
        }


def test_saves_that_are_not_accepted_do_not_count(tmp_path):
    schedule = ckptmgr.Schedule(every_steps=10)
    with ckptmgr.CheckpointManager(tmp_path, options(2, schedule=schedule)) as manager:
        accepted = [manager.save(step, {"x": 1}).accepted for step in range(5, 31)]
        manager.wait()
        assert sum(accepted) == 3
        assert kinds(manager) == {10: "async", 20: "heartbeat", 30: "async"}


def test_the_count_survives_a_restart(tmp_path):
    for first in (1, 3, 5):
        with ckptmgr.CheckpointManager(tmp_path, options(3)) as manager:
            for step in (first, first + 1):
                manager.save(step, {"x": step})
    with ckptmgr.CheckpointManager(tmp_path, options(3)) as manager:
        assert [step for step, kind in kinds(manager).items() if kind == "heartbeat"] == [3, 6]


def test_without_heartbeats_there_are_none(tmp_path):
    with ckptmgr.CheckpointManager(tmp_path, Options(heartbeat=None)) as manager:
        for step in range(5):
            manager.save(step, {"x": step})
        manager.wait()
        assert set(kinds(manager).values()) == {"async"}


def test_a_heartbeat_on_a_step_that_is_saved_anyway_is_stored_once(tmp_path):
    with ckptmgr.CheckpointManager(tmp_path, options(1)) as manager:
        manager.save(4, {"x": 1}, sync=True)
        assert kinds(manager) == {4: "heartbeat"}
        assert sorted(name for name in os.listdir(tmp_path) if name.isdigit()) == ["4"]


def test_a_heartbeat_waits_for_the_saves_in_flight(tmp_path):
    hold = Hold("rename")
    store = FaultyStore(Store(str(tmp_path)), [hold])
    waits = []
    with ckptmgr.CheckpointManager(
        tmp_path,
        options(2),
        store=store,
        events=[lambda e: e.phase == "wait" and waits.append(e)],
    ) as manager:
        first = manager.save(1, {"x": jnp.ones(4)})
        assert hold.reached.wait(30)
        timer = threading.Timer(0.05, hold.release)
        timer.start()
        second = manager.save(2, {"x": jnp.ones(4)})
        timer.join()
        assert first.done and second.done and second.result().kind == "heartbeat"
        assert second.waited > 0
    (wait,) = waits
    assert wait.step == 2 and "step 1" in wait.detail and wait.seconds == second.waited


def test_every_saves_of_nothing_is_refused_with_one_sentence():
    with pytest.raises(InvalidOption, match=r"at least 1, got 0; Options\(heartbeat=None\)"):
        Heartbeat(every_saves=0)
    for wrong in (-1, 2.5, True, None, "3"):
        with pytest.raises(InvalidOption, match=r"Heartbeat\.every_saves"):
            Heartbeat(every_saves=wrong)
    with pytest.raises(InvalidOption, match=r"Options\.heartbeat"):
        Options(heartbeat=3)


# -- kept -------------------------------------------------------------------------------------


def test_the_newest_heartbeat_is_kept_whatever_the_policy_says(tmp_path):
    with ckptmgr.CheckpointManager(tmp_path, options(4, retention=KeepLast(1))) as manager:
        for step in range(1, 8):
            manager.save(step, {"x": step})
        manager.wait()
        assert kinds(manager) == {4: "heartbeat", 7: "async"}
        manager.save(8, {"x": 8})
        manager.wait()
        assert kinds(manager) == {8: "heartbeat"}


# -- the audit --------------------------------------------------------------------------------

LEAVES = ("large", "same", "host", "small.s0", "small.s59")


@pytest.mark.parametrize("mode", ASYNC)
@pytest.mark.parametrize("leaf", LEAVES)
def test_a_torn_copy_is_caught_names_its_leaf_and_makes_its_saves_suspect(tmp_path, mode, leaf):
    mesh = flat_mesh()
    wanted = options(4, mode)
    stager = TornStager(wanted.snapshot, leaf, at=7)
    stager.armed = False
    with ckptmgr.CheckpointManager(tmp_path, wanted, stager=stager) as manager:
        for step in range(1, 7):  # 4 is a good heartbeat
            if step == 5:
                stager.programs.wait()  # gathered from now on
                stager.armed = True
            manager.save(step, state(mesh, step))
        manager.save(7, state(mesh, 7))
        with pytest.raises(SaveFailed) as caught:
            manager.save(8, state(mesh, 8))
        assert stager.torn == 4
        cause = caught.value.__cause__
        assert isinstance(cause, AuditFailed)
        assert (cause.step, cause.leaves, cause.suspects) == (8, (leaf,), (5, 6, 7))
        assert repr(leaf) in str(caught.value)
        status = {info.step: info.status for info in manager.steps()}
        assert status == {
            **dict.fromkeys((1, 2, 3, 4), "good"),
            **dict.fromkeys((5, 6, 7), "suspect"),
        }
        found = manager.restore_latest(None)
        assert found.step == 4 and [skipped.step for skipped in found.skipped] == [7, 6, 5]
        assert "suspect" in found.skipped[0].reason
        assert_same_leaves(found.state, state(mesh, 4))
        assert manager.restore(step=7)["large"].shape == (512, 300)

        stager.armed = False  # repaired: the heartbeat is tried again, and held
        manager.save(8, state(mesh, 8))
        assert manager.info(8).kind == "heartbeat"
        assert_same_leaves(manager.restore_latest(None).state, state(mesh, 8))


def test_a_torn_copy_is_caught_every_time(tmp_path):
    mesh = flat_mesh()
    wanted = options(1, "double_buffer")
    size = state(mesh, 0)["large"].nbytes // 8
    for at in range(0, size, size // 20 + 1):
        stager = TornStager(wanted.snapshot, "large", at)
        with ckptmgr.CheckpointManager(tmp_path, wanted, stager=stager) as manager:
            with pytest.raises(SaveFailed, match="'large'"):
                manager.save(at, state(mesh, at))
            assert manager.latest_step() is None


def test_without_an_audit_nothing_is_staged_besides(tmp_path):
    mesh = flat_mesh()
    wanted = options(1, audit=False)
    stager = TornStager(wanted.snapshot, "large")
    phases = []
    with ckptmgr.CheckpointManager(
        tmp_path, wanted, stager=stager, events=[lambda e: phases.append(e.phase)]
    ) as manager:
        manager.save(1, state(mesh, 1))
        assert_same_leaves(manager.restore(), state(mesh, 1))
    assert stager.torn == 0 and "audit" not in phases and "readback" in phases


def test_where_nothing_is_staged_there_is_nothing_to_audit(tmp_path):
    mesh = flat_mesh()
    wanted = options(1, "sync")
    phases = []
    with ckptmgr.CheckpointManager(
        tmp_path, wanted, events=[lambda e: phases.append(e.phase)]
    ) as manager:
        manager.save(1, state(mesh, 1))
        assert kinds(manager) == {1: "heartbeat"}
    assert "audit" not in phases and "readback" in phases


def test_restore_passes_over_suspect_steps_and_takes_one_where_there_is_no_other(tmp_path):
    mesh = flat_mesh()
    wanted = options(3)
    stager = TornStager(wanted.snapshot, "large")
    with ckptmgr.CheckpointManager(tmp_path, wanted, stager=stager) as manager:
        manager.save(1, state(mesh, 1))
        manager.save(2, state(mesh, 2))
        with pytest.raises(SaveFailed):
            manager.save(3, state(mesh, 3))
        with pytest.raises(ckptmgr.CorruptCheckpoint, match=r"suspect.*restore\(step=2\)"):
            manager.restore_latest(None)
        assert not np.array_equal(manager.restore()["large"], state(mesh, 2)["large"])
        stager.armed = False
        manager.save(3, state(mesh, 3))
        assert_same_leaves(manager.restore(), state(mesh, 3))


def test_a_suspect_step_that_is_saved_again_or_deleted_is_suspect_no_more(tmp_path):
    mesh = flat_mesh()
    wanted = options(3)
    stager = TornStager(wanted.snapshot, "large")
    with ckptmgr.CheckpointManager(tmp_path, wanted, stager=stager) as manager:
        manager.save(1, state(mesh, 1))
        manager.save(2, state(mesh, 2))
        with pytest.raises(SaveFailed):
            manager.save(3, state(mesh, 3))
        stager.armed = False
        manager.save(2, state(mesh, 2), overwrite=True)  # the heartbeat that is due
        manager.delete(1)
        manager.save(1, state(mesh, 1), sync=True)
        assert {info.step: info.status for info in manager.steps()} == {1: "good", 2: "good"}
        assert os.listdir(tmp_path / "_ckptmgr" / "suspect") in ([], ["2.json"])


def test_suspect_steps_do_not_count_for_retention(tmp_path):
    mesh = flat_mesh()
    wanted = options(3, retention=KeepLast(2))
    stager = TornStager(wanted.snapshot, "large")
    stager.armed = False
    with ckptmgr.CheckpointManager(tmp_path, wanted, stager=stager) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(mesh, step))
        stager.armed = True
        for step in (4, 5):
            manager.save(step, state(mesh, step))
        with pytest.raises(SaveFailed):
            manager.save(6, state(mesh, 6))
        stager.armed = False
        for step in (6, 7):
            manager.save(step, state(mesh, step))
        manager.wait()
        good = [info.step for info in manager.steps() if info.status == "good"]
        assert good == [6, 7]


# -- reading back -----------------------------------------------------------------------------


class Flipping(Store):
    """Turns over one byte of the largest file after it was synced."""

    def sync_tree(self, name, skip=lambda path: False):
        sizes = super().sync_tree(name, skip)
        largest = max((path for path in sizes if "/d/" in path), key=sizes.get)
        with open(self.path(f"{name}/{largest}"), "r+b") as file:
            file.seek(sizes[largest] // 2)
            byte = file.read(1)[0]
            file.seek(sizes[largest] // 2)
            file.write(bytes([byte ^ 1]))
            file.flush()
            os.fsync(file.fileno())
        return sizes


def test_what_storage_gives_back_altered_fails_the_heartbeat(tmp_path):
    mesh = flat_mesh()
    with ckptmgr.CheckpointManager(tmp_path, options(2)) as manager:
        manager.save(1, state(mesh, 1))
    with ckptmgr.CheckpointManager(tmp_path, options(2), store=Flipping(str(tmp_path))) as manager:
        with pytest.raises(SaveFailed, match="step 2.*large"):
            manager.save(2, state(mesh, 2))
        assert kinds(manager) == {1: "async"}
        assert manager.info(1).status == "good"
        assert not [name for name in os.listdir(tmp_path) if "tmp" in name]


def test_the_event_says_whether_it_was_read_from_storage(tmp_path):
    events = []
    with ckptmgr.CheckpointManager(tmp_path, options(1), events=[events.append]) as manager:
        manager.save(1, state(flat_mesh(), 1))
    (event,) = [e for e in events if e.phase == "readback"]
    assert event.detail in ("storage", "page cache") and event.nbytes > 0
    assert [e.phase for e in events if e.phase in ("audit", "sync", "readback", "publish")] == [
        "audit",
        "sync",
        "readback",
        "publish",
    ]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mode", ASYNC)
@pytest.mark.parametrize("operation", range(1, 8))
def test_a_heartbeat_that_fails_early_lets_a_caller_go_that_waits_for_host_memory(
    tmp_path, mode, operation
):
    mesh = flat_mesh()
    budget = Snapshot(mode=mode, host_bytes=2**17)
    wanted = Options(snapshot=budget, heartbeat=Heartbeat(every_saves=1))
    store = FaultyStore(Store(str(tmp_path)))
    with ckptmgr.CheckpointManager(tmp_path, wanted, store=store) as manager:
        store.arm(Fault(operation, for_good=True))
        with pytest.raises(SaveFailed, match="step 1"):
            manager.save(1, state(mesh, 1))
        store.arm()
        manager.save(1, state(mesh, 1))
        assert_same_leaves(manager.restore(), state(mesh, 1))


@pytest.mark.parametrize("operation", ["arrays", "sync_tree", "rename"])
def test_a_heartbeat_that_fails_is_tried_again_with_the_next_save(tmp_path, operation):
    store = FaultyStore(Store(str(tmp_path)))
    with ckptmgr.CheckpointManager(tmp_path, options(2), store=store) as manager:
        manager.save(1, {"x": jnp.ones(4)})
        manager.wait()
        store.arm(Fault(operation, error=errno.ENOSPC))
        with pytest.raises(SaveFailed, match="step 2"):
            manager.save(2, {"x": jnp.ones(4)})
        manager.save(3, {"x": jnp.ones(4)})
        assert kinds(manager) == {1: "async", 3: "heartbeat"}
        assert manager.info(1).status == "good"
