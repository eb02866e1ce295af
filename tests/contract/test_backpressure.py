"""Saves in flight and host memory are bounded, and every wait is said in words."""

import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckptmgr
from ckptmgr import InvalidOption, KeepLast, Options, SaveFailed, Snapshot
from ckptmgr.engine import shardings
from ckptmgr.engine.memory import HostMemory
from ckptmgr.engine.store import Store
from ckptmgr.testing import Fault, FaultyStore, Hold
from tests.support.trees import assert_same_leaves

MIB = 2**20
MODES = ("copy_on_write", "double_buffer")

add_one = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)


def no_heartbeat(**snapshot):
    return Options(snapshot=Snapshot(**snapshot), heartbeat=None)


def writes_of(step):
    """The first wave of arrays of a step."""
    return lambda op: op.name == "arrays" and op.path.startswith(f"{step}.")


def flat_mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def leaves(mesh, number, count=6, rows=64):
    """`count` leaves of 1 MiB x rows / 64 each."""
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    return {
        f"l{i}": jax.device_put(np.full((rows, 4096), number + i, np.float32), sharding)
        for i in range(count)
    }


# -- saves in flight ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("snapshot", "slots"),
    [
        (dict(mode="copy_on_write"), 1),
        (dict(mode="double_buffer"), 2),
        (dict(mode="copy_on_write", in_flight=3), 3),
        (dict(mode="double_buffer", in_flight=1), 1),
    ],
)
def test_as_many_saves_are_in_flight_as_there_are_slots_and_the_next_is_skipped(
    tmp_path, snapshot, slots
):
    holds = [Hold(writes_of(step)) for step in range(slots)]
    store = FaultyStore(Store(str(tmp_path)), holds)
    events = []
    options = no_heartbeat(when_busy="skip", **snapshot)
    with ckptmgr.CheckpointManager(
        tmp_path, options, store=store, events=[events.append]
    ) as manager:
        state = {"x": jnp.arange(8.0)}
        handles = []
        for step in range(slots):
            handles.append(manager.save(step, state))
            state = add_one(state)
        assert manager.saves_in_flight == slots
        refused = manager.save(slots, state)
        assert not refused.accepted and "step 0 is still in flight" in refused.reason
        assert refused.result() is None and manager.saves_skipped == 1
        for hold in holds:
            hold.release()
        manager.wait()
        assert [info.step for info in manager.steps()] == list(range(slots))
        for step in range(slots):
            assert np.array_equal(manager.restore(step=step)["x"], np.arange(8.0) + step)
    skips = [event for event in events if event.phase == "skip"]
    assert [event.step for event in skips] == [slots]
    assert max(event.saves_in_flight for event in events) == slots


@pytest.mark.parametrize("mode", MODES)
def test_a_save_that_waits_says_for_how_long_and_why(tmp_path, mode):
    slots = Snapshot(mode=mode).slots
    holds = [Hold(writes_of(step)) for step in range(slots)]
    store = FaultyStore(Store(str(tmp_path)), holds)
    waits = []
    with ckptmgr.CheckpointManager(
        tmp_path,
        no_heartbeat(mode=mode),
        store=store,
        events=[lambda event: event.phase == "wait" and waits.append(event)],
    ) as manager:
        for step in range(slots):
            assert manager.save(step, {"x": jnp.arange(8.0) + step}).waited == 0.0
        assert holds[0].reached.wait(30)
        timer = threading.Timer(0.1, holds[0].release)
        timer.start()
        handle = manager.save(slots, {"x": jnp.arange(8.0) + slots})
        timer.join()
        assert handle.accepted and handle.waited > 0
        for hold in holds[1:]:
            hold.release()
    (wait,) = waits
    assert (wait.step, wait.seconds) == (slots, handle.waited)
    assert "the save of step 0, which was in flight" in wait.detail


def test_saves_in_flight_become_durable_in_their_order(tmp_path):
    mesh = flat_mesh()
    order = []
    options = Options(
        snapshot=Snapshot(mode="double_buffer"),
        heartbeat=None,
        on_committed=lambda info: order.append(info.step),
    )
    with ckptmgr.CheckpointManager(tmp_path, options) as manager:
        for step in range(6):  # large and small by turns: the small one could overtake
            manager.save(step, leaves(mesh, step) if step % 2 == 0 else {"x": jnp.ones(8)})
    assert order == list(range(6))


def test_the_second_save_is_on_the_host_while_the_first_is_still_written(tmp_path):
    hold = Hold(writes_of(1))
    store = FaultyStore(Store(str(tmp_path)), [hold])
    options = no_heartbeat(mode="double_buffer")
    with ckptmgr.CheckpointManager(tmp_path, options, store=store) as manager:
        first = manager.save(1, {"x": jnp.ones(8)})
        second = manager.save(2, {"x": jnp.ones(8)})
        second.staged(30)
        assert not first.settled and not second.settled
        hold.release()


def test_the_save_after_one_that_failed_becomes_durable(tmp_path):
    store = FaultyStore(Store(str(tmp_path)), [Fault(writes_of(1))])
    options = no_heartbeat(mode="double_buffer")
    with ckptmgr.CheckpointManager(tmp_path, options, store=store) as manager:
        manager.save(1, {"x": jnp.ones(8)})
        second = None
        try:
            second = manager.save(2, {"x": jnp.ones(8)})
        except SaveFailed:  # the first had failed already, and was told of
            second = manager.save(2, {"x": jnp.ones(8)})
        assert second.result().step == 2
        try:
            manager.wait()
        except SaveFailed as error:
            assert error.step == 1
        assert manager.latest_step() == 2


# -- host memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [3 * MIB, 2 * MIB])
def test_snapshots_stay_within_their_budget_and_are_right_under_donation(tmp_path, mode, budget):
    mesh = flat_mesh()
    events = []
    options = Options(
        snapshot=Snapshot(mode=mode, host_bytes=budget), heartbeat=None, retention=KeepLast(2)
    )
    with ckptmgr.CheckpointManager(tmp_path, options, events=[events.append]) as manager:
        state = leaves(mesh, 0)
        waited = 0.0
        for step in range(5):
            old = state
            waited += manager.save(step, state).waited
            state = add_one(state)
            assert all(leaf.is_deleted() for leaf in old.values())
        manager.wait()
        assert waited > 0
        assert_same_leaves(manager.restore(), leaves(mesh, 4))
        assert_same_leaves(manager.restore(step=3), leaves(mesh, 3))
    assert max(event.host_bytes for event in events) <= budget
    waits = [event for event in events if event.phase == "wait"]
    assert any("host memory" in event.detail for event in waits)


@pytest.mark.parametrize("mode", MODES)
def test_a_writer_that_waits_for_one_wave_does_not_let_the_next_pass_the_bound(
    tmp_path, monkeypatch, mode
):
    held = []
    real = HostMemory.reserve

    def reserve(memory, wanted, at_once):
        found = real(memory, wanted, at_once)
        held.append(memory.held)
        return found

    monkeypatch.setattr(HostMemory, "reserve", reserve)
    tree = {f"l{i}": np.full(64_000, i, np.uint8) for i in range(40)}
    budget = 4 * 64_000
    storage = ckptmgr.Storage(durable=False)
    options = Options(
        snapshot=Snapshot(mode=mode, host_bytes=budget),
        heartbeat=None,
        storage=storage,
        retention=KeepLast(1),
    )
    with ckptmgr.CheckpointManager(tmp_path, options) as manager:
        for step in range(15):
            manager.save(step, tree)
    assert len(held) == 15 * 40 and max(held) <= budget


@pytest.mark.parametrize("mode", MODES)
def test_many_small_leaves_stay_within_the_budget_too(tmp_path, mode):
    mesh = flat_mesh()
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    events = []

    def state(number):
        tree = {
            f"s{i}": jax.device_put(np.full((8, 64 + i % 5), number + i, np.float32), sharding)
            for i in range(300)
        }
        return tree | {"host": np.full(1000, number), "step": number}

    budget = sum(leaf.nbytes for leaf in state(0).values() if hasattr(leaf, "nbytes")) // 3
    options = no_heartbeat(mode=mode, host_bytes=budget)
    with ckptmgr.CheckpointManager(tmp_path, options, events=[events.append]) as manager:
        for step in range(4):
            tree = state(step)
            manager.save(step, tree)
            jax.tree.map(lambda x: x.delete() if isinstance(x, jax.Array) else None, tree)
            tree["host"][:] = -1
        manager.wait()
        for step in range(4):
            assert_same_leaves(manager.restore(step=step), state(step))
    assert max(event.host_bytes for event in events) <= budget


def test_a_shard_larger_than_the_budget_runs_alone_with_one_warning(tmp_path, caplog):
    mesh = flat_mesh()
    options = no_heartbeat(host_bytes=MIB)  # a shard of these has 2 MiB
    with (
        caplog.at_level(logging.WARNING, "ckptmgr"),
        ckptmgr.CheckpointManager(tmp_path, options) as manager,
    ):
        for step in range(3):
            manager.save(step, leaves(mesh, step, count=2, rows=1024))
        manager.wait()
        for step in range(3):
            assert_same_leaves(manager.restore(step=step), leaves(mesh, step, count=2, rows=1024))
    said = [record.getMessage() for record in caplog.records if "host_bytes" in record.getMessage()]
    assert len(said) == 1 and str(MIB) in said[0] and str(2 * MIB) in said[0]


def test_a_shard_larger_than_the_budget_is_refused_when_strict(tmp_path):
    mesh = flat_mesh()
    options = no_heartbeat(host_bytes=MIB, strict=True)
    with ckptmgr.CheckpointManager(tmp_path, options) as manager:
        with pytest.raises(InvalidOption, match=r"leaf 'l0'.*2097152 bytes.*host_bytes=1048576"):
            manager.save(0, leaves(mesh, 0, rows=1024))
        with pytest.raises(InvalidOption, match="leaf 'big'"):
            manager.save(0, {"big": np.zeros(2 * MIB, np.uint8)})
        manager.save(1, leaves(mesh, 1))
        manager.wait()
        assert [info.step for info in manager.steps()] == [1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wave", [1, 2, 4])
def test_a_write_that_fails_ends_the_wait_for_host_memory(tmp_path, mode, wave):
    mesh = flat_mesh()
    seen = []
    store = FaultyStore(
        Store(str(tmp_path)),
        [Fault(lambda op: op.name == "arrays" and (seen.append(op) or len(seen) == wave))],
    )
    options = no_heartbeat(mode=mode, host_bytes=2 * MIB)
    events = []
    with ckptmgr.CheckpointManager(
        tmp_path, options, store=store, events=[events.append]
    ) as manager:
        handle = manager.save(1, leaves(mesh, 1))
        with pytest.raises(SaveFailed, match="step 1"):
            handle.result()
        manager.save(2, leaves(mesh, 2))
        manager.wait()
        assert_same_leaves(manager.restore(), leaves(mesh, 2))
    held = events[-1].host_bytes
    assert held == 0 if mode == "copy_on_write" else held <= 2 * MIB


def test_memory_is_given_back_when_a_save_fails(tmp_path):
    mesh = flat_mesh()
    for mode in MODES:
        root = tmp_path / mode
        store = FaultyStore(Store(str(root)), [Fault("arrays", for_good=True)])
        events = []
        options = Options(snapshot=Snapshot(mode=mode), heartbeat=None, on_save_error="warn")
        with ckptmgr.CheckpointManager(
            root, options, store=store, events=[events.append]
        ) as manager:
            for step in range(4):
                manager.save(step, leaves(mesh, step))
                manager.wait()
            manager.save(9, {"x": 1})
        size = sum(leaf.nbytes for leaf in leaves(mesh, 0).values())
        assert max(event.host_bytes for event in events) <= 2 * size
        assert events[-1].host_bytes <= (0 if mode == "copy_on_write" else 2 * size)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "1 GB"])
def test_a_budget_of_nothing_or_less_is_refused_with_one_sentence(wrong):
    for name in ("host_bytes", "in_flight"):
        with pytest.raises(InvalidOption, match=rf"Snapshot\.{name} must be a whole number"):
            Snapshot(**{name: wrong})


def test_a_mode_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(InvalidOption, match="'sync', 'copy_on_write', 'double_buffer'"):
        Snapshot(mode="magic")


# -- buffers used again ---------------------------------------------------------------------------


def test_two_sets_of_buffers_are_allocated_once_and_used_again(tmp_path):
    mesh = flat_mesh()
    events = []
    size = sum(leaf.nbytes for leaf in leaves(mesh, 0).values())
    options = no_heartbeat(mode="double_buffer")
    with ckptmgr.CheckpointManager(tmp_path, options, events=[events.append]) as manager:
        before = live_bytes()
        for step in range(12):
            manager.save(step, leaves(mesh, step))
            if step == 3:
                manager.wait()
                after_few = live_bytes()
        manager.wait()
        assert live_bytes() <= after_few <= before + 2 * size
        assert max(event.host_bytes for event in events) == 2 * size
        for step in range(12):
            assert_same_leaves(manager.restore(step=step), leaves(mesh, step))
    assert live_bytes() <= before + 2 * size


def live_bytes():
    """Bytes of all buffers that some array holds, each counted once."""
    buffers = {
        shard.data.unsafe_buffer_pointer(): shard.data.nbytes
        for array in jax.live_arrays()
        for shard in array.addressable_shards
    }
    return sum(buffers.values())


def test_buffers_grow_with_the_tree_and_those_of_other_shapes_go(tmp_path):
    mesh = flat_mesh()
    events = []
    options = no_heartbeat(mode="double_buffer")
    with ckptmgr.CheckpointManager(tmp_path, options, events=[events.append]) as manager:
        trees = [leaves(mesh, 1), leaves(mesh, 2, count=9), leaves(mesh, 3, count=2, rows=128)]
        for step, tree in enumerate([*trees, *trees, *trees]):
            manager.save(step, tree)
            manager.wait()
        for step, tree in enumerate([*trees, *trees, *trees]):
            assert_same_leaves(manager.restore(step=step), tree)
    assert max(event.host_bytes for event in events) <= 2 * 9 * MIB


# -- backends that cannot -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_without_pinned_host_memory_save_copies_at_once_and_says_so_once(
    tmp_path, monkeypatch, caplog, mode
):
    monkeypatch.setattr(shardings, "has_pinned_host", lambda device: False)
    mesh = flat_mesh()
    with (
        caplog.at_level(logging.WARNING, "ckptmgr"),
        ckptmgr.CheckpointManager(tmp_path, no_heartbeat(mode=mode)) as manager,
    ):
        for step in range(3):
            state = leaves(mesh, step)
            manager.save(step, state)
            add_one(state)
        for step in range(3):
            manager.wait()
            assert_same_leaves(manager.restore(step=step), leaves(mesh, step))
    said = [r.getMessage() for r in caplog.records if "pinned_host" in r.getMessage()]
    assert len(said) == 1 and mode in said[0]


@pytest.mark.parametrize("mode", MODES)
def test_without_pinned_host_memory_strict_refuses(tmp_path, monkeypatch, mode):
    monkeypatch.setattr(shardings, "has_pinned_host", lambda device: False)
    options = no_heartbeat(mode=mode, strict=True)
    with ckptmgr.CheckpointManager(tmp_path, options) as manager:
        with pytest.raises(InvalidOption, match=r"no pinned_host memory.*mode='sync'"):
            manager.save(1, {"x": jnp.ones(8)})
        assert manager.latest_step() is None
