"""What a training loop may rely on."""

import asyncio
import dataclasses
import inspect
import logging
import os
import pathlib
import threading

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ckptmgr
from ckptmgr.testing import Fault, Hold
from tests.fault.common import LIMIT, assert_state, faulty, manager, numbers, reader, state
from tests.support import run_python

MODES = ["copy_on_write", "sync"]


def bits(array):
    array = np.asarray(array)
    return array.dtype, array.shape, array.tobytes()


@pytest.fixture
def held(tmp_path):
    """A manager with step 4, whose save of step 5 waits until `release()`."""
    store = faulty(tmp_path)
    with manager(tmp_path, store=store) as found:
        found.save(4, state(4)).result()
        hold = Hold("sync_tree")
        store.arm(hold)
        found.handle = found.save(5, state(5))
        found.release = hold.release
        assert hold.reached.wait(LIMIT)
        yield found
        hold.release()


def in_thread(call):
    """Starts `call`; gives the thread and the list that gets its result."""
    out = []
    thread = threading.Thread(target=lambda: out.append(call()))
    thread.start()
    return thread, out


# -- values at the time of the call -----------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_donated_state_is_saved_as_it_was_and_donation_still_happens(mode, mesh8, tmp_path):
    sharding = jax.sharding.NamedSharding(mesh8, jax.sharding.PartitionSpec("x", None))
    tree = {
        "w": jax.device_put(jnp.arange(64 * 64, dtype=jnp.float32).reshape(64, 64), sharding),
        "m": jax.device_put(jnp.ones((64, 64), jnp.float32), sharding),
    }
    step = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
    wanted = {name: np.array(value, copy=True) for name, value in tree.items()}
    with manager(tmp_path, snapshot=ckptmgr.Snapshot(mode=mode)) as found:
        for i in range(12):
            found.save(i, tree)
            old, tree = tree, step(tree)
            assert old["w"].is_deleted() and old["m"].is_deleted(), "donation was refused"
        found.wait()
        for i in range(12):
            got = found.restore(step=i)
            for name, value in wanted.items():
                assert bits(got[name]) == bits(value + np.float32(i)), (i, name)


def test_a_state_may_be_donated_or_deleted_while_its_save_waits(mesh8, tmp_path):
    hold = Hold("arrays")
    sharding = jax.sharding.NamedSharding(mesh8, jax.sharding.PartitionSpec("x"))
    donated = jax.device_put(jnp.arange(1024.0), sharding)
    deleted = jax.device_put(jnp.arange(1024.0), sharding)
    single = jnp.arange(10.0)
    wanted = np.arange(1024, dtype=np.float32)
    with manager(tmp_path, store=faulty(tmp_path, hold)) as found:
        handle = found.save(1, {"donated": donated, "deleted": deleted, "single": single})
        assert hold.reached.wait(LIMIT)
        jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(donated).block_until_ready()
        jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(single).block_until_ready()
        deleted.delete()
        assert donated.is_deleted() and single.is_deleted()
        hold.release()
        handle.result(LIMIT)
        got = found.restore()
    assert bits(got["donated"]) == bits(wanted)
    assert bits(got["deleted"]) == bits(wanted)
    assert bits(got["single"]) == bits(np.arange(10, dtype=np.float32))


@pytest.mark.parametrize("mode", MODES)
def test_donation_works_at_once_after_wait(mode, mesh8, tmp_path):
    sharding = jax.sharding.NamedSharding(mesh8, jax.sharding.PartitionSpec("x"))
    tree = [jax.device_put(jnp.arange(8.0 * n), sharding) for n in range(1, 9)]
    with manager(tmp_path, snapshot=ckptmgr.Snapshot(mode=mode)) as found:
        found.save(1, tree)
        found.wait()
        jax.jit(lambda t: [x + 1 for x in t], donate_argnums=0)(tree)
        assert [x.is_deleted() for x in tree] == [True] * 8


def test_an_array_that_was_deleted_before_the_call_is_named_and_nothing_is_written(tmp_path):
    gone = jnp.arange(3.0)
    gone.delete()
    with manager(tmp_path) as found:
        with pytest.raises(ckptmgr.SnapshotLost, match="gone") as caught:
            found.save(1, {"layer": {"gone": gone}})
        assert (caught.value.leaf, caught.value.step) == ("layer.gone", 1)
        assert found.saves_in_flight == 0
        assert [p.name for p in tmp_path.iterdir() if p.name != "_ckptmgr"] == []
        found.save(1, state(1)).result()


def test_what_the_caller_changes_after_save_does_not_show(tmp_path):
    step, host, nested = np.array(5), np.arange(4.0), {"deep": [np.zeros(2)]}
    zero_dim = np.array(7)
    metrics, extra = {"loss": 1.0, "inner": {"x": 1}}, {"note": ["a"], "n": {"m": 1}}
    hold = Hold("make_dir")
    with manager(tmp_path, store=faulty(tmp_path, hold)) as found:
        tree = {"host": host, "nested": nested, "zero": zero_dim}
        handle = found.save(step, tree, metrics=metrics, extra=extra)
        assert hold.reached.wait(LIMIT)
        step[...] = 9
        host[:] = -1
        nested["deep"][0][:] = -1
        nested["deep"].append(3)
        zero_dim[...] = -1
        metrics["loss"], metrics["inner"]["x"] = 2.0, 2
        extra["note"].append("b")
        extra["n"]["m"] = 2
        hold.release()
        info = handle.result(LIMIT)
        assert numbers(found) == (5,) and info.step == 5 and handle.step == 5
        assert info == found.info(5)
        assert info.metrics == {"loss": 1.0, "inner": {"x": 1}}
        assert info.extra == {"note": ["a"], "n": {"m": 1}}
        got = found.restore()
    assert bits(got["host"]) == bits(np.arange(4.0))
    assert len(got["nested"]["deep"]) == 1 and bits(got["nested"]["deep"][0]) == bits(np.zeros(2))
    assert got["zero"] == 7


def test_a_train_state_comes_back_as_it_was_at_the_save(tmp_path):
    params = {"a": jnp.ones((3, 4)), "b": jnp.full((4,), 0.5)}
    tx = optax.adam(0.1)

    @flax.struct.dataclass
    class TrainState:
        params: dict
        opt_state: tuple
        step: jax.Array

    @jax.jit
    def update(now):
        grads = jax.grad(lambda p: ((p["a"] @ p["b"]) ** 2).sum())(now.params)
        updates, opt_state = tx.update(grads, now.opt_state)
        return TrainState(optax.apply_updates(now.params, updates), opt_state, now.step + 1)

    now = TrainState(params, tx.init(params), jnp.int32(0))
    for _ in range(3):
        now = update(now)
    captured = jax.tree.map(lambda x: np.array(x, copy=True), now)
    with manager(tmp_path) as found:
        found.save(3, now, sync=True)
        later = update(update(now))
        got = found.restore(later, step=3)
    assert type(got) is TrainState
    assert jax.tree.structure(got) == jax.tree.structure(captured)
    assert [bits(x) for x in jax.tree.leaves(got)] == [bits(x) for x in jax.tree.leaves(captured)]
    assert bits(later.params["a"]) != bits(captured.params["a"])


def test_leaves_in_pinned_host_memory_and_on_different_devices_are_saved(mesh8, tmp_path):
    devices = jax.devices()
    spec = jax.sharding.PartitionSpec
    first = jax.sharding.Mesh(np.array(devices[:4]), ("x",))
    second = jax.sharding.Mesh(np.array(devices[4:8]), ("x",))
    pinned = jax.sharding.NamedSharding(mesh8, spec("x"), memory_kind="pinned_host")
    values = np.arange(16, dtype=np.float32)
    tree = {
        "stage0": jax.device_put(values, jax.sharding.NamedSharding(first, spec("x"))),
        "stage1": jax.device_put(values + 1, jax.sharding.NamedSharding(second, spec("x"))),
        "pinned": jax.device_put(values + 2, pinned),
        "one": jax.device_put(values + 3, devices[5]),
    }
    with manager(tmp_path) as found:
        found.save(1, tree)
        tree["pinned"].delete()
        got = found.restore(step=1)
        onto = found.restore(
            {name: tree[name] for name in ("stage0", "stage1", "one")}
            | {"pinned": jax.ShapeDtypeStruct((16,), np.float32, sharding=pinned)}
        )
    for offset, name in enumerate(("stage0", "stage1", "pinned", "one")):
        assert bits(got[name]) == bits(values + np.float32(offset)), name
        assert bits(onto[name]) == bits(values + np.float32(offset)), name
        assert onto[name].sharding == (pinned if name == "pinned" else tree[name].sharding)


def test_a_tree_with_a_leading_device_axis_is_an_ordinary_array(mesh8, tmp_path):
    """As pmap and replicate make them."""
    stacked = jax.device_put(
        np.broadcast_to(np.arange(3, dtype=np.float32), (8, 3)).copy(),
        jax.sharding.NamedSharding(mesh8, jax.sharding.PartitionSpec("x")),
    )
    with manager(tmp_path) as found:
        found.save(1, {"w": stacked}).result()
        assert bits(found.restore()["w"]) == bits(stacked)


# -- failures ---------------------------------------------------------------------------------


def failing(tmp_path, **options):
    """A manager with step 1 whose save of step 2 has failed."""
    store = faulty(tmp_path)
    found = manager(tmp_path, store=store, **options)
    found.save(1, state(1)).result()
    found.wait()
    store.arm(Fault("sync_tree"))
    found.save(2, state(2)).join(LIMIT)
    store.arm()
    return found


@pytest.mark.parametrize("how", ["save", "wait", "check", "close"])
def test_a_failed_background_save_is_told_once_by_the_next_call(how, tmp_path):
    found = failing(tmp_path)
    call = {
        "save": lambda: found.save(3, state(3)),
        "wait": found.wait,
        "check": found.check,
        "close": found.close,
    }[how]
    with pytest.raises(ckptmgr.SaveFailed, match="step 2 .*Input/output error") as caught:
        call()
    assert caught.value.step == 2
    assert isinstance(caught.value.__cause__, ckptmgr.StoreError)
    assert isinstance(caught.value.__cause__.__cause__, OSError)
    assert numbers(reader(tmp_path)) == (1,)
    if how != "close":
        found.check()
        for step in (2, 3):
            found.save(step, state(step)).result()
        found.wait()
        assert numbers(found) == (1, 2, 3)
    found.close()


def test_the_next_save_after_a_failure_can_be_tried_again_and_retention_goes_on(tmp_path):
    found = failing(tmp_path, retention=ckptmgr.KeepLast(2))
    for step in (2, 3):
        try:
            found.save(step, state(step))
        except ckptmgr.SaveFailed:
            found.save(step, state(step))
    found.close()
    assert numbers(reader(tmp_path)) == (2, 3)


def test_leaving_the_block_tells_a_failed_save(tmp_path):
    store = faulty(tmp_path)
    with pytest.raises(ckptmgr.SaveFailed, match="step 9"):
        with manager(tmp_path, store=store) as found:
            store.arm(Fault("arrays"))
            found.save(9, state(9))


def test_an_error_of_the_block_is_not_replaced_by_that_of_a_save(tmp_path):
    store = faulty(tmp_path)
    with pytest.raises(ValueError) as caught:
        with manager(tmp_path, store=store) as found:
            store.arm(Fault("arrays"))
            found.save(9, state(9))
            raise ValueError("train")
    assert str(caught.value) == "train"
    assert any("SaveFailed" in note and "step 9" in note for note in caught.value.__notes__)


def test_close_is_quiet_the_second_time_and_after_wait_has_told(tmp_path):
    found = failing(tmp_path)
    with pytest.raises(ckptmgr.SaveFailed):
        found.wait()
    found.close()
    found.close()
    other = failing(tmp_path / "other")
    with pytest.raises(ckptmgr.SaveFailed):
        other.close()
    other.close()


def test_a_failure_told_by_its_handle_is_not_told_again(tmp_path):
    store = faulty(tmp_path)
    with manager(tmp_path, store=store) as found:
        store.arm(Fault("arrays"))
        handle = found.save(1, state(1))
        for call in (handle.result, handle.staged, handle.result):
            with pytest.raises(ckptmgr.SaveFailed, match="step 1"):
                call(LIMIT)
        found.check()
        found.wait()


def test_with_warn_a_failed_save_is_logged_and_training_goes_on(tmp_path, caplog):
    found = failing(tmp_path, on_save_error="warn")
    found.save(3, state(3)).result()
    found.close()
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len([text for text in said if "step 2" in text and "Input/output" in text]) == 1
    assert numbers(reader(tmp_path)) == (1, 3)


def test_a_synchronous_save_raises_its_own_failure(tmp_path):
    store = faulty(tmp_path)
    with manager(tmp_path, store=store) as found:
        store.arm(Fault("rename"))
        with pytest.raises(ckptmgr.SaveFailed, match="step 1"):
            found.save(1, state(1), sync=True)
        found.check()
        assert found.save(1, state(1), sync=True).done
        assert found.info(1).kind == "sync"


# -- a save in flight -------------------------------------------------------------------------


def test_a_save_in_flight_is_not_listed_and_others_see_the_step_before(held, tmp_path):
    assert held.saves_in_flight == 1 and not held.handle.done
    for found in (held, reader(tmp_path)):
        assert found.latest_step() == 4
        assert numbers(found) == (4,)
    other = reader(tmp_path)
    assert_state(other.restore(), 4)
    assert other.restore_latest(None).step == 4
    with pytest.raises(ckptmgr.StepNotFound, match="no step 5"):
        other.restore(step=5)
    assert_state(held.restore(), 4)
    with pytest.raises(TimeoutError, match="step 5"):
        held.handle.result(0)
    held.handle.staged(LIMIT)  # the values are on the host, though nothing is durable
    held.release()
    held.handle.result(LIMIT)
    assert_state(other.restore(step=5), 5)


def test_restore_of_the_step_in_flight_waits_for_it(held):
    thread, out = in_thread(lambda: held.restore(step=5))
    thread.join(0.2)
    assert thread.is_alive() and out == []
    held.release()
    thread.join(LIMIT)
    assert_state(out[0], 5)


def test_a_second_save_of_the_step_in_flight_is_refused(held):
    with pytest.raises(ckptmgr.StepExists, match="step 5 .*in flight"):
        held.save(5, state(50))


def test_a_busy_snapshot_skips_when_told_so_and_says_why(tmp_path):
    store = faulty(tmp_path)
    skip = ckptmgr.Snapshot(when_busy="skip")
    with manager(tmp_path, store=store, snapshot=skip) as found:
        hold = Hold("sync_tree")
        store.arm(hold)
        first = found.save(1, state(1))
        assert hold.reached.wait(LIMIT)
        second = found.save(2, state(2))
        assert first.accepted and first.reason == ""
        assert not second.accepted and "step 1" in second.reason
        assert second.result(0) is None and second.staged(0) is None and second.done
        hold.release()
        assert first.result(LIMIT).step == 1
        assert found.save(3, state(3)).result(LIMIT).step == 3
        assert numbers(found) == (1, 3)


def test_a_busy_snapshot_waits_by_default_and_saves_in_order(tmp_path):
    store = faulty(tmp_path)
    committed = []
    with manager(tmp_path, store=store, on_committed=lambda i: committed.append(i.step)) as found:
        hold = Hold("sync_tree")
        store.arm(hold)
        found.save(1, state(1))
        assert hold.reached.wait(LIMIT)
        thread, out = in_thread(lambda: found.save(2, state(2)))
        thread.join(0.2)
        assert thread.is_alive() and out == []
        hold.release()
        thread.join(LIMIT)
        out[0].result(LIMIT)
        found.wait()
        assert committed == [1, 2]
        assert numbers(found) == (1, 2)


# -- hooks ------------------------------------------------------------------------------------


def test_the_hook_runs_after_the_commit_in_step_order_and_sees_the_step(tmp_path):
    seen = []

    def hook(info):
        with reader(tmp_path) as other:
            seen.append((info.step, other.latest_step(), other.restore(step=info.step)["n"]))

    store = faulty(tmp_path)
    with manager(tmp_path, store=store, on_committed=hook) as found:
        hold = Hold("rename")
        store.arm(hold)
        handle = found.save(1, state(1))
        assert hold.reached.wait(LIMIT)
        assert seen == []  # asked for, not done
        hold.release()
        handle.result(LIMIT)
        for step in (2, 3):
            found.save(step, state(step))
        found.wait()
        assert seen == [(1, 1, 1), (2, 2, 2), (3, 3, 3)]


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_an_error_of_the_hook_is_logged_and_undoes_nothing(error, tmp_path, caplog):
    def hook(info):
        raise error("of the hook")

    with manager(tmp_path, on_committed=hook) as found:
        handle = found.save(1, state(1))
        assert handle.join(LIMIT)
        assert handle.result(LIMIT).step == 1
        found.wait()
        assert numbers(found) == (1,)
    assert any("step 1" in r.getMessage() and r.exc_info for r in caplog.records)


HOOK_CALLS = """
    import ckptmgr, sys
    from tests.fault import common

    said = {}

    def hook(info):
        if info.step != 2 or said:
            return
        calls = {
            "wait": found.wait,
            "close": found.close,
            "save": lambda: found.save(9, {}),
            "check": found.check,
            "latest_step": found.latest_step,
            "steps": lambda: common.numbers(found),
            "info": lambda: found.info(2).step,
            "should_save": lambda: found.should_save(3),
            "restore earlier": lambda: found.restore(step=1)["n"],
            "restore newest": lambda: found.restore()["n"],
            "result": lambda: handles[2].result().step,
            "delete": lambda: found.delete(1),
            "restore this": lambda: found.restore(step=2)["n"],
            "restore_latest": lambda: found.restore_latest(None).step,
        }
        for name, call in calls.items():
            said[name] = "hangs"
            print("calling", name, flush=True)
            try:
                said[name] = call()
            except ckptmgr.NotAllowedHere:
                said[name] = "NotAllowedHere"
            print(name, said[name], flush=True)

    found = common.manager(sys.argv[1], on_committed=hook)
    handles = {}
    found.save(1, common.state(1)).result()
    found.wait()
    handles[2] = found.save(2, common.state(2))
    found.wait()  # the lock is held here while the hook runs
    found.close()
    """


def test_no_call_in_a_hook_hangs(tmp_path):
    done = run_python(HOOK_CALLS, tmp_path, timeout=15, check=False)
    said = dict(
        line.rsplit(" ", 1)
        for line in done.stdout.splitlines()
        if not line.startswith(("calling", "steps"))
    )
    assert said == {
        "wait": "NotAllowedHere",
        "close": "NotAllowedHere",
        "save": "NotAllowedHere",
        "check": "None",
        "latest_step": "2",
        "info": "2",
        "should_save": "True",
        "restore earlier": "1",
        "restore newest": "2",
        "result": "2",
        "delete": "None",
        "restore this": "2",
        "restore_latest": "2",
    }, done.stderr


def test_saves_waits_and_looks_from_three_threads_never_hang(tmp_path):
    errors = []
    with manager(tmp_path, retention=ckptmgr.KeepLast(3)) as found:
        over = threading.Event()

        def save():
            for step in range(40):
                found.save(step, state(step))
            over.set()

        def look(call):
            while not over.is_set():
                call()

        def guarded(call, *args):
            try:
                call(*args)
            except Exception as exc:
                errors.append(exc)
                over.set()

        jobs = [(save,), (look, found.wait), (look, found.latest_step)]
        threads = [threading.Thread(target=guarded, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
            assert not thread.is_alive()
        found.wait()
        assert errors == []
        assert numbers(found) == (37, 38, 39)
        assert_state(found.restore(), 39)


def test_two_managers_interleave_and_close_in_reverse_order(tmp_path):
    first = manager(tmp_path / "params")
    second = manager(tmp_path / "buffer")
    for step in range(15):
        first.save(step, state(step))
        second.save(step, state(100 + step))
    second.close()
    first.close()
    for name, offset in (("params", 0), ("buffer", 100)):
        found = reader(tmp_path / name)
        assert numbers(found) == tuple(range(15))
        for step in range(15):
            assert_state(found.restore(step=step), offset + step)


# -- where it is called from ------------------------------------------------------------------


def test_it_works_inside_a_running_event_loop(tmp_path):
    before = (asyncio.run, asyncio.BaseEventLoop.run_until_complete, asyncio.get_event_loop)

    async def main():
        with manager(tmp_path) as found:
            handle = found.save(1, state(1))
            await asyncio.sleep(0)
            await asyncio.to_thread(handle.result)
            found.save(2, state(2), sync=True)
            found.wait()
            return found.restore(step=1), found.restore_latest(None)

    one, latest = asyncio.run(main())
    assert_state(one, 1)
    assert latest.step == 2
    assert before == (
        asyncio.run,
        asyncio.BaseEventLoop.run_until_complete,
        asyncio.get_event_loop,
    )


def test_saves_from_a_thread_beside_a_running_loop(tmp_path):
    async def main(found):
        def save():
            for step in range(30):
                found.save(step, {"n": step})
            found.wait()

        await asyncio.to_thread(save)

    with manager(tmp_path) as found:
        asyncio.run(main(found))
        assert numbers(found) == tuple(range(30))


IMPORT = """
    import asyncio, logging, sys
    asked = [asyncio.run, asyncio.BaseEventLoop.run_until_complete]
    import absl.logging, jax
    before = [
        list(logging.getLogger().handlers), logging.getLogger().level,
        absl.logging.get_verbosity(), logging.raiseExceptions,
    ]
    import ckptmgr
    after = [
        list(logging.getLogger().handlers), logging.getLogger().level,
        absl.logging.get_verbosity(), logging.raiseExceptions,
    ]
    print(before == after, asked == [asyncio.run, asyncio.BaseEventLoop.run_until_complete])
    print(logging.getLogger("ckptmgr").handlers, logging.getLogger("ckptmgr").level)
    print([name for name in sys.modules if name.split(".")[0] in ("orbax", "nest_asyncio")])
    from absl import flags
    print(flags.FLAGS.is_parsed())
    from tests.fault import common
    with common.manager(sys.argv[1]) as found:  # without absl.app, a distributed job or a mesh
        found.save(1, common.state(1)).result()
        common.assert_state(found.restore(), 1)
    print(flags.FLAGS.is_parsed(), jax.process_count())
    """


def test_import_and_use_touch_no_logging_flags_event_loop_and_no_orbax(tmp_path):
    done = run_python(IMPORT, tmp_path, "--unknown_flag=1")
    assert done.stdout.splitlines() == ["True True", "[] 0", "[]", "False", "False 1"]
    assert done.stderr == ""


def test_a_save_says_at_most_two_lines_and_only_to_its_own_logger(tmp_path, caplog, capfd):
    caplog.set_level(logging.INFO)
    hold = Hold("rename")
    store = faulty(tmp_path)
    with manager(tmp_path, store=store) as found:
        store.arm(hold)
        handle = found.save(1, state(1))
        assert hold.reached.wait(LIMIT)
        assert not any("committed" in record.getMessage() for record in caplog.records)
        hold.release()
        handle.result(LIMIT)
        found.wait()
        assert any("step 1 committed" in record.getMessage() for record in caplog.records)
        caplog.clear()
        for step in range(2, 12):
            found.save(step, state(step))
        found.restore()
    ours = [record for record in caplog.records if record.name.startswith("ckptmgr")]
    assert 10 <= len(ours) <= 20
    assert {record.levelno for record in ours} == {logging.INFO}
    assert {record.name for record in caplog.records} == {"ckptmgr"}
    caplog.clear()
    caplog.set_level(logging.ERROR, logger="ckptmgr")
    with manager(tmp_path) as found:
        found.save(20, state(20)).result()
        found.restore()
    assert caplog.records == []
    assert capfd.readouterr().out == ""


# -- which step -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step", [5, np.int64(5), np.array(5), np.uint8(5)], ids=["int", "int64", "0-d", "uint8"]
)
def test_a_step_is_taken_by_value(step, tmp_path):
    with manager(tmp_path) as found:
        assert found.save(step, state(5)).result().step == 5
        assert type(found.latest_step()) is int
        assert_state(found.restore(step=step), 5)
        assert found.info(step).step == 5
        found.delete(step)
        assert found.steps() == ()


def test_a_jax_integer_is_a_step(tmp_path):
    with manager(tmp_path) as found:
        assert found.save(jnp.int32(5), state(5)).result().step == 5
        assert_state(found.restore(step=jnp.int32(5)), 5)


@pytest.mark.parametrize(
    "step", [True, np.True_, 5.0, np.float32(5), "5", None, -1, np.array([5]), 1 + 0j], ids=repr
)
def test_what_is_no_step_is_refused_by_every_call(step, tmp_path):
    with manager(tmp_path) as found:
        calls = [found.should_save, found.info, found.delete, found.truncate_after]
        calls += [lambda s: found.save(s, state(1))]
        if step is not None:
            calls += [lambda s: found.restore(step=s)]
        for call in calls:
            with pytest.raises(ckptmgr.InvalidOption, match="step must"):
                call(step)
        assert found.steps() == ()


def test_steps_of_any_size_are_ordered_by_number(tmp_path):
    order = [8, 9, 10, 11, 99, 100, 101, 999, 1000, 0, 2**40, 123456789]
    with manager(tmp_path) as found:
        for step in order:
            found.save(step, {"n": 1}).result()
        assert numbers(found) == tuple(sorted(order))
        assert found.latest_step() == 2**40
        assert found.restore_latest(None).step == 2**40


def test_the_schedule_decides_and_force_passes_it_by(tmp_path):
    schedule = ckptmgr.Schedule(every_steps=10, at_steps=[3])
    with manager(tmp_path, schedule=schedule) as found:
        saved = [step for step in range(25) if found.save(step, state(step)).accepted]
        assert saved == [0, 3, 10, 20] == [step for step in range(25) if found.should_save(step)]
        refused = found.save(21, state(21))
        assert not refused.accepted and "schedule" in refused.reason
        assert refused.result() is None and refused.staged() is None
        assert found.save(21, state(21), force=True).result().step == 21
        assert numbers(found) == (0, 3, 10, 20, 21)
    with manager(tmp_path, schedule=ckptmgr.Schedule(every_steps=None)) as found:
        assert not found.should_save(10)


@pytest.mark.parametrize("every", [0, -5, True, 2.0, "3"], ids=repr)
def test_a_senseless_interval_is_refused_when_it_is_made(every):
    with pytest.raises(ckptmgr.InvalidOption, match="every_steps"):
        ckptmgr.Schedule(every_steps=every)


def test_a_step_that_exists_is_refused_before_anything_is_copied(tmp_path):
    gone = jnp.arange(3.0)
    gone.delete()  # would be found out as soon as a copy is tried
    with manager(tmp_path) as found:
        found.save(5, state(5)).result()
        for force in (False, True):
            with pytest.raises(ckptmgr.StepExists, match="step 5 .*overwrite=True") as caught:
                found.save(5, {"gone": gone}, force=force)
            assert caught.value.step == 5
        assert_state(found.restore(), 5)
        assert found.save(5, state(50), overwrite=True).result().step == 5
        assert_state(found.restore(), 50)


def test_an_overwrite_replaces_one_step_and_leaves_newer_ones(tmp_path):
    with manager(tmp_path) as found:
        for step in (1, 2, 3, 4, 5):
            found.save(step, state(step)).result()
        found.save(3, state(30), overwrite=True).result()
        assert numbers(found) == (1, 2, 3, 4, 5)
        for step in (1, 2, 3, 4, 5):
            assert_state(found.restore(step=step), 30 if step == 3 else step)


def test_a_new_process_learns_the_last_step_and_overwrites_nothing_by_mistake(tmp_path):
    with manager(tmp_path) as found:
        for step in (10, 20, 30):
            found.save(step, state(step))
    with manager(tmp_path) as found:
        latest = found.restore_latest(None)
        assert latest.step == 30
        assert_state(latest.state, 30)
        found.save(31, state(31)).result()
        for step in (10, 30):
            with pytest.raises(ckptmgr.StepExists):
                found.save(step, state(0))
        assert_state(found.restore(step=10), 10)


def test_delete_and_truncate_remove_what_was_asked_and_nothing_else(tmp_path):
    with manager(tmp_path) as found:
        for step in range(6):
            found.save(step, state(step))
        found.delete(5)  # also what was in flight when it was called
        assert numbers(found) == (0, 1, 2, 3, 4)
        found.delete(1)
        with pytest.raises(ckptmgr.StepNotFound, match="step 1"):
            found.delete(1)
        assert found.truncate_after(2) == (4, 3)
        assert numbers(found) == (0, 2)
        assert found.truncate_after(2) == ()
        found.save(3, state(33)).result()
        assert_state(found.restore(), 33)


def test_info_tells_of_one_step_and_names_what_there_is_when_it_is_missing(tmp_path):
    with manager(tmp_path) as found:
        assert found.latest_step() is None and found.steps() == ()
        with pytest.raises(ckptmgr.StepNotFound, match="no committed step"):
            found.restore()
        handle = found.save(3, state(3), metrics={"loss": 0.5}, extra=["x"], sync=True)
        info = found.info(3)
        assert info == handle.result() == found.steps()[0]
        assert (info.step, info.kind, info.status) == (3, "sync", "good")
        assert info.metrics == {"loss": 0.5} and info.extra == ["x"]
        assert info.nbytes == 6 * 4 + 2 * 8 + 8
        for call in (lambda: found.info(7), lambda: found.restore(step=7)):
            with pytest.raises(ckptmgr.StepNotFound, match="no step 7 .*latest: 3") as caught:
                call()
            assert caught.value.step == 7


# -- retention --------------------------------------------------------------------------------


def kept(tmp_path, n, steps):
    with manager(tmp_path, retention=ckptmgr.KeepLast(n)) as found:
        for step in steps:
            found.save(step, {"n": step}).result()
        found.wait()
        assert found.latest_step() == max(steps)
        return numbers(found)


def test_the_last_steps_by_number_are_kept(tmp_path):
    steps = (8, 9, 10, 11, 99, 100, 101, 999, 1000, 9900, 10000)
    assert kept(tmp_path, 3, steps) == (1000, 9900, 10000)


def test_a_limit_of_one_keeps_exactly_the_newest(tmp_path):
    assert kept(tmp_path, 1, (1, 2, 3)) == (3,)


def test_a_save_out_of_order_is_kept_until_the_next_and_breaks_nothing(tmp_path):
    assert kept(tmp_path, 2, (125, 5, 130, 6, 126)) == (126, 130)
    assert kept(tmp_path / "other", 2, (125, 130, 6)) == (6, 125, 130)


def test_a_failed_save_never_costs_a_good_step(tmp_path):
    found = failing(tmp_path, retention=ckptmgr.KeepLast(1))
    assert numbers(found) == (1,)
    with pytest.raises(ckptmgr.SaveFailed):
        found.wait()
    found.save(3, state(3)).result()
    found.wait()
    assert numbers(found) == (3,)
    found.close()


def test_a_failure_of_retention_leaves_the_step_saved_and_is_logged(tmp_path, caplog):
    store = faulty(tmp_path)
    with manager(tmp_path, store=store, retention=ckptmgr.KeepLast(1)) as found:
        found.save(1, state(1)).result()
        found.wait()
        store.arm(Fault(lambda op: op.name == "rename" and op.path == "1"))
        assert found.save(2, state(2)).result().step == 2
        found.wait()
        assert numbers(found) == (1, 2)
        assert any("step 2 is saved" in record.getMessage() for record in caplog.records)
        found.save(3, state(3)).result()
        found.wait()
        assert numbers(found) == (3,)


@pytest.mark.parametrize("n", [None, 0, -1, False, True, 2.0, "3"], ids=repr)
def test_a_senseless_number_to_keep_is_refused_and_deletes_nothing(n):
    with pytest.raises(ckptmgr.InvalidOption, match="KeepLast"):
        ckptmgr.KeepLast(n)


@pytest.mark.parametrize("value", [None, 0, 3, -1, False], ids=repr)
def test_what_is_no_policy_is_refused_by_the_options(value):
    with pytest.raises(ckptmgr.InvalidOption, match="retention"):
        ckptmgr.Options(retention=value)


def test_without_a_policy_everything_is_kept(tmp_path):
    with manager(tmp_path) as found:
        for step in range(12):
            found.save(step, {"n": step})
        found.wait()
        assert numbers(found) == tuple(range(12))


# -- items, metrics ---------------------------------------------------------------------------


class Iterator:
    """A data iterator whose position moves with every batch."""

    def __init__(self):
        self.at, self.window = 0, [0, 1, 2]

    def next(self):
        self.at += 1
        self.window.append(self.at + 2)
        return self.window.pop(self.at * 7 % 3)

    def get_state(self):
        return {"at": self.at, "window": self.window}  # its own list, not a copy

    def set_state(self, found):
        self.at, self.window = found["at"], list(found["window"])


def test_the_state_of_an_iterator_is_that_of_the_call_and_goes_on_from_there(tmp_path):
    data, hold = Iterator(), Hold("make_dir")
    for _ in range(5):
        data.next()
    with manager(tmp_path, store=faulty(tmp_path, hold)) as found:
        handle = found.save(5, ckptmgr.Items(model=state(5), data=data))
        assert hold.reached.wait(LIMIT)
        uninterrupted = [data.next() for _ in range(20)]
        hold.release()
        handle.result(LIMIT)
        fresh = Iterator()
        got = found.restore(ckptmgr.Items(model={**state(0)}, data=fresh))
        assert got.data is fresh
        assert [fresh.next() for _ in range(20)] == uninterrupted
        assert_state(got.model, 5)
        assert found.restore(item="data")["at"] == 5
        latest = found.restore_latest(ckptmgr.Items(model={**state(0)}, data=Iterator()))
        assert latest.step == 5 and latest.state.data.at == 5
        with pytest.raises(ckptmgr.StepNotFound, match=r"no item 'x'.*'data', 'model'"):
            found.restore(item="x")


def test_metrics_of_numpy_and_jax_are_kept_exactly_and_others_refused_before_writing(tmp_path):
    metrics = {
        "l": np.float32(1.5),
        "j": jnp.bfloat16(2),
        "n": float("nan"),
        "i": float("-inf"),
        "d": {"x": np.int64(3)},
        "b": np.bool_(True),
        "half": np.float16(0.1),
    }
    with manager(tmp_path) as found:
        info = found.save(1, state(1), metrics=metrics).result()
        for got in (info.metrics, found.info(1).metrics, reader(tmp_path).info(1).metrics):
            assert got["l"] == 1.5 and type(got["l"]) is float
            assert got["j"] == 2.0 and type(got["j"]) is float
            assert np.isnan(got["n"]) and got["i"] == float("-inf")
            assert got["d"] == {"x": 3} and type(got["d"]["x"]) is int
            assert got["b"] is True
            assert got["half"] == float(np.float16(0.1))
        for wrong in ({"o": object()}, {"deep": {"o": {1, 2}}}):
            with pytest.raises(ckptmgr.InvalidOption, match="metrics.*'o'"):
                found.save(2, state(2), metrics=wrong)
        with pytest.raises(ckptmgr.InvalidOption, match="metrics must be a dict"):
            found.save(2, state(2), metrics=1.0)
        with pytest.raises(ckptmgr.InvalidOption, match="extra"):
            found.save(2, state(2), extra=object())
        assert sorted(os.listdir(tmp_path)) == ["1", "_ckptmgr"]


@pytest.mark.parametrize(
    "value", [np.ones(3, np.float32), b"raw", 1 + 2j, {1: 2.0}, (1, 2), 2**70], ids=repr
)
def test_an_unusual_metric_is_kept_or_refused_by_the_call_itself(value, tmp_path):
    with manager(tmp_path) as found:
        try:
            handle = found.save(1, state(1), metrics={"odd": value})
        except ckptmgr.InvalidOption as exc:
            assert "odd" in str(exc)
            return
        got = handle.result().metrics["odd"]
        assert type(got) is type(value) and np.array_equal(got, value)


# -- life of a manager ------------------------------------------------------------------------


def test_a_closed_manager_raises_and_still_answers_what_needs_no_manager(tmp_path):
    found = manager(tmp_path)
    found.save(1, state(1))
    found.close()
    for call in (
        lambda: found.save(2, state(2)),
        found.restore,
        lambda: found.restore_latest(None),
        found.wait,
        found.check,
        lambda: found.delete(1),
        lambda: found.truncate_after(0),
    ):
        with pytest.raises(ckptmgr.ManagerClosed, match="closed"):
            call()
    assert numbers(reader(tmp_path)) == (1,)
    assert found.directory == str(tmp_path)


def test_the_block_closes_the_manager_and_commits_what_was_in_flight(tmp_path):
    with manager(tmp_path) as found:
        found.save(1, state(1))
    with pytest.raises(ckptmgr.ManagerClosed):
        found.wait()
    assert_state(reader(tmp_path).restore(), 1)


def test_options_must_be_options(tmp_path):
    with pytest.raises(ckptmgr.InvalidOption, match="options must be"):
        ckptmgr.CheckpointManager(tmp_path, {"read_only": True})
    for changes in ({"on_save_error": "ignore"}, {"schedule": 5}, {"snapshot": "sync"}):
        with pytest.raises(ckptmgr.InvalidOption):
            ckptmgr.Options(**changes)


def test_a_sink_that_raises_is_told_of_once_and_disturbs_nothing(tmp_path, caplog):
    def broken(event):
        raise RuntimeError("of the sink")

    events = []
    with ckptmgr.CheckpointManager(tmp_path, events=[broken, events.append]) as found:
        for step in (1, 2):
            found.save(step, state(step)).result()
        found.restore()
    phases = [event.phase for event in events if event.step == 1]
    assert {"order", "open", "write", "sync", "publish", "save", "retain"} <= set(phases)
    assert sum("sink" in record.getMessage() for record in caplog.records) == 1


# -- the public face --------------------------------------------------------------------------

API = pathlib.Path(__file__).with_name("public_api.txt")


def describe_api():
    """Every public name, with signatures, fields and bases."""
    lines = []
    for name in sorted(ckptmgr.__all__):
        value = getattr(ckptmgr, name)
        if not inspect.isclass(value):
            lines.append(f"{name}{inspect.signature(value)}")
            continue
        bases = ", ".join(base.__name__ for base in value.__bases__)
        lines.append(f"class {name}({bases})")
        if dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                given = field.default is not dataclasses.MISSING
                default = f" = {field.default!r}" if given else ""
                if field.default_factory is not dataclasses.MISSING:
                    default = " = ..."
                lines.append(f"  {field.name}: {field.type}{default}")
        elif "__init__" in vars(value):
            lines.append(f"  __init__{inspect.signature(value.__init__)}")
        for member, found in sorted(vars(value).items()):
            if member.startswith("_") or isinstance(found, type(SLOT)):
                continue
            if inspect.isfunction(found):
                lines.append(f"  {member}{inspect.signature(found)}")
            elif isinstance(found, property):
                lines.append(f"  {member} (property)")
    return "\n".join(lines) + "\n"


class _Slotted:
    __slots__ = ("slot",)


SLOT = _Slotted.slot


def test_the_public_names_and_signatures_are_those_written_down():
    """After a wanted change: python -m tests.contract.test_manager"""
    assert describe_api() == API.read_text()


if __name__ == "__main__":
    API.write_text(describe_api())
