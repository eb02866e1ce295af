"""What a save and a restore tell, through a real manager."""

import json
import threading
import urllib.request

import jax
import jax.monitoring
import numpy as np
import pytest

import ckptmgr
from ckptmgr.events import Clock
from ckptmgr.sinks import JsonlSink, PrometheusSink, monitoring_sink
from ckptmgr.testing import Fault, Hold
from tests.fault.common import LIMIT, assert_state, faulty, state

MODES = ["copy_on_write", "sync"]
PHASES = ["order", "open", "transfer", "write", "sync", "publish", "save", "retain"]


def watched(root, events, store=None, sinks=(), **options):
    options.setdefault("storage", ckptmgr.Storage(durable=False))
    return ckptmgr.CheckpointManager(
        root, ckptmgr.Options(**options), store=store, events=[events.append, *sinks]
    )


def only(events, phase, step=None):
    (found,) = [e for e in events if e.phase == phase and step in (None, e.step)]
    return found


def nbytes(tree):
    return sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("mode", MODES)
def test_a_save_tells_each_phase_once_with_its_mode(mode, tmp_path):
    events = []
    with watched(tmp_path, events, snapshot=ckptmgr.Snapshot(mode=mode)) as found:
        info = found.save(3, state(3)).result(LIMIT)
    assert sorted(e.phase for e in events) == sorted([*PHASES, "call"])
    assert {(e.step, e.mode, e.error) for e in events} == {(3, mode, None)}
    background = [e.phase for e in events if e.phase != "call"]
    assert background == PHASES
    for phase in ("order", "transfer", "write", "save"):
        assert only(events, phase).nbytes == info.nbytes


def test_a_save_that_is_synchronous_by_its_call_says_so(tmp_path):
    events = []
    with watched(tmp_path, events) as found:
        found.save(1, state(1), sync=True)
    assert {e.mode for e in events} == {"sync"}


@pytest.mark.parametrize("mode", MODES)
def test_each_of_the_five_numbers_comes_once_per_save_and_in_order(mode, tmp_path):
    events = []
    with watched(tmp_path, events, snapshot=ckptmgr.Snapshot(mode=mode)) as found:
        for step in (1, 2):
            found.save(step, state(step)).result(LIMIT)
    numbers = {}
    for event in (e for e in events if e.step == 2):
        assert not set(numbers) & set(event.numbers)
        numbers |= event.numbers
    assert sorted(numbers) == sorted(
        ["snapshot_latency", "flush_latency", "stall", "interval", "staging_bytes"]
    )
    assert only(events, "call", 1).interval is None
    assert 0 < numbers["snapshot_latency"] < numbers["flush_latency"]
    assert only(events, "order", 2).seconds <= numbers["stall"]
    assert only(events, "save", 2).seconds <= numbers["flush_latency"] <= 60
    if mode == "sync":
        assert numbers["flush_latency"] <= numbers["stall"] < numbers["interval"] + 60


@pytest.mark.parametrize("mode", MODES)
def test_staging_bytes_are_those_copied_to_the_host(mode, mesh8, tmp_path):
    events = []
    where = jax.sharding.NamedSharding(mesh8, jax.sharding.PartitionSpec("x"))
    everywhere = jax.sharding.NamedSharding(mesh8, jax.sharding.PartitionSpec())
    tree = {
        "cut": jax.device_put(np.ones((16, 4), np.float32), where),
        "same": jax.device_put(np.ones((5,), np.float32), everywhere),
        "host": np.ones(3, np.int64),
    }
    with watched(tmp_path, events, snapshot=ckptmgr.Snapshot(mode=mode)) as found:
        found.save(1, tree).result(LIMIT)
    host = tree["host"].nbytes
    assert only(events, "order").staging_bytes == (host if mode == "sync" else nbytes(tree))


def test_a_state_without_arrays_tells_of_no_transfer(tmp_path):
    events = []
    with watched(tmp_path, events) as found:
        found.save(1, {"empty": {}}).result(LIMIT)
    assert "transfer" not in {e.phase for e in events}
    assert only(events, "order").staging_bytes == 0


def test_a_save_counts_as_in_flight_until_it_is_durable_and_holds_bytes_until_written(tmp_path):
    events, store = [], faulty(tmp_path)
    with watched(tmp_path, events, store=store) as found:
        hold = Hold("sync_tree")
        store.arm(hold)
        handle = found.save(1, state(1))
        assert hold.reached.wait(LIMIT)
        hold.release()
        handle.result(LIMIT)
    staged = only(events, "order").staging_bytes
    assert staged > 0
    seen = {e.phase: (e.saves_in_flight, e.host_bytes) for e in events}
    assert seen["order"] == (0, staged)
    assert seen["open"] == seen["transfer"] == (1, staged)
    assert seen["write"] == seen["sync"] == seen["publish"] == (1, 0)
    assert seen["save"] == seen["retain"] == (0, 0)


class Leaping(Clock):
    """Leaps by 100 s after the thread named "second" has looked at it."""

    def __init__(self):
        self.looked = threading.Event()

    def monotonic(self):
        leapt = 100.0 * self.looked.is_set()
        if threading.current_thread().name == "second":
            self.looked.set()
        return super().monotonic() + leapt


def test_waiting_for_a_busy_slot_is_part_of_the_stall(tmp_path):
    events, store, clock = [], faulty(tmp_path), Leaping()
    with ckptmgr.CheckpointManager(
        tmp_path, store=store, clock=clock, events=[events.append]
    ) as found:
        hold = Hold("sync_tree")
        store.arm(hold)
        found.save(1, state(1))
        assert hold.reached.wait(LIMIT)
        second = threading.Thread(target=lambda: found.save(2, state(2)), name="second")
        second.start()
        assert clock.looked.wait(LIMIT)  # it is inside save(), whose slot is taken
        hold.release()
        second.join(LIMIT)
        found.wait()
    told = [(e.phase, e.step) for e in events]
    assert told.index(("save", 1)) < told.index(("order", 2)) < told.index(("call", 2))
    assert only(events, "call", 2).stall >= 100 > only(events, "order", 2).seconds
    assert only(events, "save", 2).flush_latency >= 100 > only(events, "save", 2).seconds


def test_a_save_that_a_busy_slot_keeps_out_is_told_as_skipped(tmp_path):
    events, store = [], faulty(tmp_path)
    with watched(
        tmp_path, events, store=store, snapshot=ckptmgr.Snapshot(when_busy="skip")
    ) as found:
        hold = Hold("sync_tree")
        store.arm(hold)
        found.save(1, state(1))
        assert hold.reached.wait(LIMIT)
        assert not found.save(2, state(2)).accepted
        hold.release()
    assert [e.phase for e in events if e.step == 2] == ["skip"]


def test_a_step_that_the_schedule_does_not_want_is_told_to_nobody(tmp_path):
    events = []
    with watched(tmp_path, events, schedule=ckptmgr.Schedule(every_steps=10)) as found:
        for step in range(1, 10):
            assert not found.save(step, state(step)).accepted
    assert events == []


def test_a_save_that_fails_tells_where_and_is_no_longer_in_flight(tmp_path):
    events = []
    with watched(tmp_path, events, store=faulty(tmp_path, Fault("sync_tree"))) as found:
        with pytest.raises(ckptmgr.SaveFailed):
            found.save(1, state(1)).result(LIMIT)
        found.save(2, state(2)).result(LIMIT)
    failed = {e.phase for e in events if e.step == 1 and e.error}
    assert failed == {"sync", "save"}
    assert only(events, "save", 1).flush_latency is None
    assert only(events, "save", 1).saves_in_flight == 0
    assert only(events, "save", 2).saves_in_flight == 0


def test_a_restore_is_told(tmp_path):
    events = []
    with watched(tmp_path, events) as found:
        found.save(1, state(1)).result(LIMIT)
        found.wait()
        found.restore()
    event = events[-1]
    assert (event.phase, event.step, event.error, event.mode) == ("restore", 1, None, None)
    assert (event.saves_in_flight, event.host_bytes) == (0, 0)


def test_the_file_of_a_run_has_a_line_for_every_event(tmp_path):
    events = []
    with JsonlSink(tmp_path / "events.jsonl") as sink:
        with watched(tmp_path / "run", events, sinks=[sink]) as found:
            for step in (1, 2, 3):
                found.save(step, state(step))
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    told = sorted((line["step"], line["phase"], line["seconds"]) for line in lines)
    assert told == sorted((e.step, e.phase, e.seconds) for e in events)


def test_prometheus_serves_the_numbers_of_a_run(tmp_path):
    events = []
    with PrometheusSink(port=0) as sink:
        with watched(tmp_path, events, sinks=[sink]) as found:
            for step in (1, 2, 3):
                found.save(step, state(step))
            found.wait()
            address = f"http://127.0.0.1:{sink.port}/metrics"
            text = urllib.request.urlopen(address, timeout=LIMIT).read().decode()
    lines = text.splitlines()
    for name, count in (
        ("snapshot_latency", 3),
        ("flush_latency", 3),
        ("stall", 3),
        ("interval", 2),
    ):
        assert f"ckptmgr_{name}_seconds_count {count}.0" in lines
    staged = float(only(events, "order", 3).staging_bytes)
    assert f"ckptmgr_staging_bytes {staged}" in lines
    assert "ckptmgr_last_saved_step 3.0" in lines


def test_listeners_of_jax_hear_the_stall_of_every_save(tmp_path):
    heard = []

    def listen(name, value, **about):
        if name == "/ckptmgr/save/stall":
            heard.append(value)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        events = []
        with watched(tmp_path, events, sinks=[monitoring_sink]) as found:
            for step in (1, 2):
                found.save(step, state(step))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert heard == [e.stall for e in events if e.phase == "call"]


@pytest.mark.parametrize("mode", MODES)
def test_sinks_that_raise_at_every_phase_disturb_no_save_and_no_restore(mode, tmp_path, caplog):
    def broken(event):
        raise RuntimeError("of the sink")

    def listener(name, value, **about):
        if name.startswith("/ckptmgr"):
            raise RuntimeError("of the listener")

    jax.monitoring.register_event_duration_secs_listener(listener)
    events = []
    try:
        with ckptmgr.CheckpointManager(
            tmp_path,
            ckptmgr.Options(snapshot=ckptmgr.Snapshot(mode=mode)),
            events=[broken, monitoring_sink, events.append],
        ) as found:
            for step in (1, 2):
                found.save(step, state(step)).result(LIMIT)
            assert_state(found.restore(), 2)
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert sum(e.phase == "save" for e in events) == 2
    assert sum("event sink" in r.getMessage() for r in caplog.records) == 2
