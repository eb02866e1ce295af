"""Sinks by themselves, and what the emitter counts."""

import errno
import json
import logging
import os
import pathlib
import threading
import urllib.request

import jax.monitoring
import pytest

from ckptmgr.errors import InvalidOption, StoreError
from ckptmgr.events import NUMBERS, Clock, Emitter, Event
from ckptmgr.sinks import JsonlSink, PrometheusSink, log_sink, monitoring_sink
from tests.support import run_python

SAVED = Event("save", 7, 2.0, 8_000_000, mode="copy_on_write", flush_latency=2.5)


class Hand(Clock):
    """A clock that is turned by hand."""

    now = 100.0

    def time(self):
        return self.now

    def monotonic(self):
        return self.now


def lines(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


# -- events and the emitter -------------------------------------------------------------------


def test_an_event_without_bytes_or_time_has_no_rate():
    assert SAVED.bytes_per_second == 4e6
    assert Event("save", 1, 0.0, 5).bytes_per_second is None
    assert Event("save", 1, 1.0).bytes_per_second is None


def test_every_number_is_a_field_that_starts_unknown():
    event = Event("write", 1, 1.0)
    assert [getattr(event, name) for name in NUMBERS] == [None] * 5
    assert event.numbers == {}
    assert SAVED.numbers == {"flush_latency": 2.5}


def test_the_emitter_counts_saves_in_flight_two_of_one_step_as_two_and_asks_for_the_bytes():
    events, clock, held = [], Hand(), [7]
    emitter = Emitter([events.append], clock, lambda: held[0])
    first, second = object(), object()

    def counted():
        emitter.emit(Event("x", 0, 0.0))
        return events[-1].saves_in_flight, events[-1].host_bytes

    assert counted() == (0, 7)
    for save in (first, second):
        with emitter.call(1) as call:
            call.accept(save, "sync")
    held[0] = 15
    assert counted() == (2, 15)
    emitter.settled(first)
    emitter.settled(first)
    assert counted() == (1, 15)
    emitter.settled(second)
    assert counted() == (0, 15)


def test_a_call_tells_its_stall_and_the_interval_since_the_last_accepted_one():
    events, clock = [], Hand()
    emitter = Emitter([events.append], clock)
    for now, accepted in ((100.0, True), (103.0, False), (110.0, True)):
        clock.now = now
        with emitter.call(1) as call:
            clock.now += 0.5
            if accepted:
                call.accept(object(), "sync")
    assert [(e.phase, e.stall, e.interval) for e in events] == [
        ("call", 0.5, None),
        ("call", 0.5, 10.0),
    ]


def test_a_call_that_is_skipped_says_so_and_has_no_stall():
    events = []
    with Emitter([events.append], Hand()).call(3) as call:
        call.skip()
    assert [(e.phase, e.step, e.stall) for e in events] == [("skip", 3, None)]


def test_a_block_that_raises_is_emitted_with_its_error():
    events = []
    emitter = Emitter([events.append], Hand())
    with pytest.raises(OSError), emitter.span("write", 1, mode="sync") as span:
        span.note(nbytes=3)
        raise OSError("full")
    (event,) = events
    assert (event.error, event.nbytes, event.mode) == ("OSError: full", 3, "sync")


# -- the log ----------------------------------------------------------------------------------


def test_the_log_has_one_line_per_save_and_none_for_anything_else(caplog):
    with caplog.at_level(logging.INFO, "ckptmgr"):
        for event in (SAVED, Event("write", 7, 1.0), Event("save", 8, 1.0, error="x")):
            log_sink(event)
    assert [r.getMessage() for r in caplog.records] == [
        "step 7 committed: 8.0 MB in 2.00 s, 0.00 GB/s"
    ]


def test_absl_shows_the_line_at_info_and_is_quiet_by_default():
    done = run_python(
        """
        from absl import logging
        from ckptmgr.events import Event
        from ckptmgr.sinks import log_sink
        logging.use_absl_handler()
        log_sink(Event("save", 1, 1.0))
        logging.set_verbosity(logging.INFO)
        log_sink(Event("save", 2, 1.0))
        """
    )
    assert done.stdout == ""
    (line,) = [line for line in done.stderr.splitlines() if "committed" in line]
    assert "step 2 committed" in line and "sinks.py" in line


# -- the JSONL file ---------------------------------------------------------------------------


def test_a_line_holds_every_field_the_rate_and_the_time(tmp_path):
    with JsonlSink(tmp_path / "new" / "events.jsonl", clock=Hand()) as sink:
        sink(SAVED)
        (found,) = lines(sink.path)  # flushed before it is closed
    assert set(found) == {*Event.__dataclass_fields__, "bytes_per_second", "time"}
    assert (found["phase"], found["step"], found["time"]) == ("save", 7, 100.0)
    assert (found["bytes_per_second"], found["stall"]) == (4e6, None)


def test_a_file_that_exists_is_appended_to(tmp_path):
    for _ in range(2):
        with JsonlSink(tmp_path / "e") as sink:
            sink(SAVED)
    assert len(lines(tmp_path / "e")) == 2


def test_half_a_line_left_by_a_dead_process_spoils_no_other(tmp_path):
    path = tmp_path / "e"
    path.write_text('{"phase": "sa')
    with JsonlSink(path) as sink:
        sink(SAVED)
        sink(SAVED)
    first, *others = path.read_text().splitlines()
    assert first == '{"phase": "sa'
    assert [json.loads(line)["step"] for line in others] == [7, 7]


def test_lines_of_several_threads_and_sinks_stay_whole(tmp_path):
    sinks = [JsonlSink(tmp_path / "e") for _ in range(2)]
    start = threading.Barrier(8)

    def emit(number):
        start.wait()
        for _ in range(200):
            sinks[number % 2](Event("write", number, 1.0, error="x" * 300))

    threads = [threading.Thread(target=emit, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [line["step"] for line in lines(tmp_path / "e")]
    assert sorted(found) == sorted(list(range(8)) * 200)
    for sink in sinks:
        sink.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_costs_one_warning_and_raises_nothing(caplog):
    with JsonlSink("/dev/full") as sink:
        sink(SAVED)
        sink(SAVED)
    (record,) = caplog.records
    assert os.strerror(errno.ENOSPC) in record.getMessage()


def test_a_closed_file_drops_events_without_a_word(tmp_path, caplog):
    sink = JsonlSink(tmp_path / "e")
    sink.close()
    sink.close()
    sink(SAVED)
    assert (tmp_path / "e").read_text() == "" and caplog.records == []


def test_a_path_that_cannot_be_opened_is_refused_at_once(tmp_path):
    with pytest.raises(StoreError, match="events cannot be written to"):
        JsonlSink(tmp_path)


# -- jax.monitoring ---------------------------------------------------------------------------


@pytest.fixture
def heard():
    """What the listeners of jax.monitoring got, as (name, value, keywords)."""
    found = []

    def valued(name, value, **about):
        if name.startswith("/ckptmgr"):
            found.append((name, value, about))

    def plain(name, **about):
        if name.startswith("/ckptmgr"):
            found.append((name, None, about))

    jax.monitoring.register_event_duration_secs_listener(valued)
    jax.monitoring.register_scalar_listener(valued)
    jax.monitoring.register_event_listener(plain)
    yield found
    jax.monitoring.unregister_event_duration_listener(valued)
    jax.monitoring.unregister_scalar_listener(valued)
    jax.monitoring.unregister_event_listener(plain)


def test_jax_listeners_hear_phases_numbers_and_rates(heard):
    monitoring_sink(SAVED)
    monitoring_sink(Event("call", 7, 0.1, mode="sync", stall=0.1, saves_in_flight=1, host_bytes=9))
    monitoring_sink(Event("order", 7, 0.1, staging_bytes=9))
    monitoring_sink(Event("restore", 7, 1.0))
    cow, sync = {"mode": "copy_on_write"}, {"mode": "sync"}
    assert heard == [
        ("/ckptmgr/save", 2.0, cow),
        ("/ckptmgr/save/bytes_per_second", 4e6, cow),
        ("/ckptmgr/save/flush_latency", 2.5, cow),
        ("/ckptmgr/save/call", 0.1, sync),
        ("/ckptmgr/save/stall", 0.1, sync),
        ("/ckptmgr/saves_in_flight", 1, {}),
        ("/ckptmgr/host_bytes", 9, {}),
        ("/ckptmgr/save/order", 0.1, {}),
        ("/ckptmgr/save/staging_bytes", 9, {}),
        ("/ckptmgr/restore", 1.0, {}),
    ]


def test_jax_listeners_hear_of_a_failure_instead_of_a_duration(heard):
    monitoring_sink(Event("write", 7, 1.0, 5, error="x"))
    assert heard == [("/ckptmgr/save/write/failed", None, {})]


# -- Prometheus -------------------------------------------------------------------------------


def test_the_endpoint_serves_text_until_it_is_closed():
    with PrometheusSink(port=0) as sink:
        sink(SAVED)
        sink(Event("write", 7, 1.0, error="x"))
        address = f"http://127.0.0.1:{sink.port}/metrics"
        text = urllib.request.urlopen(address, timeout=30).read().decode()
    for line in (
        "ckptmgr_flush_latency_seconds_sum 2.5",
        'ckptmgr_phase_seconds_count{phase="save"} 1.0',
        'ckptmgr_phase_bytes_total{phase="save"} 8e+06',
        'ckptmgr_phase_bytes_per_second{phase="save"} 4e+06',
        'ckptmgr_phase_failures_total{phase="write"} 1.0',
        "ckptmgr_last_saved_step 7.0",
    ):
        assert line in text.splitlines()
    assert sink.port is None
    with pytest.raises(OSError):
        urllib.request.urlopen(address, timeout=30)
    sink.close()


def test_metrics_go_into_a_registry_of_the_user_once():
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    PrometheusSink(registry=registry)(SAVED)
    assert registry.get_sample_value("ckptmgr_flush_latency_seconds_sum") == 2.5
    with pytest.raises(InvalidOption, match="may share one sink"):
        PrometheusSink(registry=registry)


def test_a_port_that_is_taken_is_refused_in_words():
    with PrometheusSink(port=0) as sink:
        with pytest.raises(InvalidOption, match=f"cannot serve metrics at .*:{sink.port}"):
            PrometheusSink(port=sink.port)
    with pytest.raises(InvalidOption, match="cannot serve metrics"):
        PrometheusSink(port=70_000)


def test_prometheus_is_imported_only_when_used_and_its_absence_names_the_extra():
    done = run_python(
        """
        import sys
        import ckptmgr.sinks
        print("prometheus_client" in sys.modules)
        sys.modules["prometheus_client"] = None  # as if it were not installed
        try:
            ckptmgr.sinks.PrometheusSink()
        except ImportError as exc:
            print(exc)
        """
    )
    assert done.stdout == (
        "False\nPrometheusSink needs prometheus-client: pip install 'ckptmgr[metrics]'\n"
    )
