"""Where events go: the log, a JSONL file, `jax.monitoring`, Prometheus.

    with PrometheusSink(port=9400) as metrics, JsonlSink("runs/first/events.jsonl") as lines:
        manager = ckptmgr.CheckpointManager("runs/first", events=[lines, metrics, monitoring_sink])

Sinks are called from the caller's thread and from those of the saves.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from dataclasses import asdict
from typing import Any

import jax.monitoring

from ckptmgr.errors import InvalidOption, StoreError
from ckptmgr.events import NUMBERS, Clock, Event

logger = logging.getLogger("ckptmgr")


def log_sink(event: Event) -> None:
    """One line per finished save, at INFO; failures are raised elsewhere, not logged here.

    Python's default, and absl's, is to show warnings only.
    """
    if event.phase == "save" and event.error is None:
        rate = event.bytes_per_second
        logger.info(
            "step %d committed: %.1f MB in %.2f s%s",
            event.step,
            event.nbytes / 1e6,
            event.seconds,
            f", {rate / 1e9:.2f} GB/s" if rate else "",
        )


class JsonlSink:
    """Appends one line of JSON per event to a file: every field of `Event`, `bytes_per_second`,
    and `time`, in seconds since 1970.

    A line is one write, so several threads and processes may share a file, and what was emitted
    survives a crash of the process. What cannot be written is dropped, with one warning.

    Args:
      path: the file; made with the directories above it.
      clock: a seam for tests.

    Raises StoreError if the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Clock | None = None) -> None:
        self.path = os.path.abspath(path)
        self._clock = clock or Clock()
        self._lock = threading.Lock()
        self._warned = False
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            self._fd: int | None = os.open(
                self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666
            )
        except OSError as exc:
            raise StoreError(f"events cannot be written to {self.path}: {exc}") from exc
        self._torn = self._ends_within_a_line(self._fd)

    @staticmethod
    def _ends_within_a_line(fd: int) -> bool:
        """Whether a process that died, or a full disk, left half a line."""
        try:
            size = os.fstat(fd).st_size
            return size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        except OSError:  # not a plain file
            return False

    def __call__(self, event: Event) -> None:
        record = {
            "time": self._clock.time(),
            **asdict(event),
            "bytes_per_second": event.bytes_per_second,
        }
        line = json.dumps(record).encode() + b"\n"
        with self._lock:
            if self._fd is None:
                return
            try:
                data = b"\n" + line if self._torn else line
                written = os.write(self._fd, data)
                self._torn = written < len(data)
                error = f"{written} of {len(data)} bytes went in" if self._torn else ""
            except OSError as exc:
                error = str(exc)
            if error and not self._warned:
                self._warned = True
                logger.warning("an event could not be written to %s: %s", self.path, error)

    def close(self) -> None:
        """Closes the file; later events are dropped. Again is fine."""
        with self._lock:
            fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> JsonlSink:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def monitoring_sink(event: Event) -> None:
    """Hands events to the listeners of `jax.monitoring`.

    Durations: `/ckptmgr/save` and `/ckptmgr/restore` for the whole, `/ckptmgr/save/<phase>`,
    and `/ckptmgr/save/snapshot_latency`, `flush_latency`, `stall`, `interval`. Scalars:
    `/ckptmgr/save/staging_bytes`, `/ckptmgr/saves_in_flight`, `/ckptmgr/host_bytes`, and
    `<duration>/bytes_per_second`. An event `<duration>/failed` instead of the duration where the
    phase failed.
    """
    whole = event.phase in ("save", "restore")
    name = f"/ckptmgr/{event.phase}" if whole else f"/ckptmgr/save/{event.phase}"
    about: dict[str, str | int] = {} if event.mode is None else {"mode": event.mode}
    if event.error is not None:
        jax.monitoring.record_event(f"{name}/failed", **about)
    else:
        jax.monitoring.record_event_duration_secs(name, event.seconds, **about)
        if event.bytes_per_second is not None:
            jax.monitoring.record_scalar(
                f"{name}/bytes_per_second", event.bytes_per_second, **about
            )
    for number, value in event.numbers.items():
        if number.endswith("_bytes"):
            jax.monitoring.record_scalar(f"/ckptmgr/save/{number}", value, **about)
        else:
            jax.monitoring.record_event_duration_secs(f"/ckptmgr/save/{number}", value, **about)
    if event.saves_in_flight is not None:
        jax.monitoring.record_scalar("/ckptmgr/saves_in_flight", event.saves_in_flight)
    if event.host_bytes is not None:
        jax.monitoring.record_scalar("/ckptmgr/host_bytes", event.host_bytes)


_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class PrometheusSink:
    """Metrics for Prometheus; needs the extra `metrics`.

    `ckptmgr_snapshot_latency_seconds`, `ckptmgr_flush_latency_seconds`, `ckptmgr_stall_seconds`,
    `ckptmgr_interval_seconds`, `ckptmgr_staging_bytes`; by phase `ckptmgr_phase_seconds`,
    `ckptmgr_phase_bytes_total`, `ckptmgr_phase_bytes_per_second`, `ckptmgr_phase_failures_total`;
    and `ckptmgr_saves_in_flight`, `ckptmgr_host_bytes`, `ckptmgr_last_saved_step`.

    Args:
      port: serve them as text at `http://<address>:<port>/metrics`; 0 takes a free port, None
        serves nothing.
      address: where to listen; this machine only, unless told otherwise.
      registry: a `CollectorRegistry` to put them into; None: one of their own.

    Raises ImportError without `prometheus-client`, InvalidOption for a registry that has these
    metrics already or a port that is taken.
    """

    def __init__(
        self, port: int | None = None, address: str = "127.0.0.1", registry: Any = None
    ) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError as exc:
            raise ImportError(
                "PrometheusSink needs prometheus-client: pip install 'ckptmgr[metrics]'"
            ) from exc
        self.registry = prometheus.CollectorRegistry() if registry is None else registry
        self.port: int | None = None
        self._server: Any = None
        try:
            self._make(prometheus)
        except ValueError as exc:
            raise InvalidOption(
                f"the registry cannot take ckptmgr's metrics; several managers may share one sink: {exc}"
            ) from exc
        if port is not None:
            try:
                self._server, self._thread = prometheus.start_http_server(
                    port, address, self.registry
                )
            except (OSError, OverflowError) as exc:
                raise InvalidOption(f"cannot serve metrics at {address}:{port}: {exc}") from exc
            self.port = self._server.server_port

    def _make(self, prometheus: Any) -> None:
        def histogram(name: str, text: str, *labels: str) -> Any:
            return prometheus.Histogram(
                f"ckptmgr_{name}_seconds", text, labels, buckets=_BUCKETS, registry=self.registry
            )

        def gauge(name: str, text: str, *labels: str) -> Any:
            return prometheus.Gauge(f"ckptmgr_{name}", text, labels, registry=self.registry)

        def counter(name: str, text: str) -> Any:
            return prometheus.Counter(f"ckptmgr_{name}", text, ["phase"], registry=self.registry)

        self._numbers = {
            name: gauge(name, text) if name.endswith("_bytes") else histogram(name, text)
            for name, text in NUMBERS.items()
        }
        self._seconds = histogram("phase", "how long a phase took", "phase")
        self._bytes = counter("phase_bytes", "array bytes that a phase moved")
        self._rate = gauge("phase_bytes_per_second", "of the latest such phase", "phase")
        self._failures = counter("phase_failures", "phases that failed")
        self._in_flight = gauge("saves_in_flight", "saves neither durable nor failed")
        self._held = gauge("host_bytes", "staging bytes held")
        self._step = gauge("last_saved_step", "the step that became durable last")

    def __call__(self, event: Event) -> None:
        for name, value in event.numbers.items():
            metric = self._numbers[name]
            (metric.set if name.endswith("_bytes") else metric.observe)(value)
        if event.saves_in_flight is not None:
            self._in_flight.set(event.saves_in_flight)
        if event.host_bytes is not None:
            self._held.set(event.host_bytes)
        if event.error is not None:
            self._failures.labels(event.phase).inc()
            return
        self._seconds.labels(event.phase).observe(event.seconds)
        self._bytes.labels(event.phase).inc(event.nbytes)
        if event.bytes_per_second is not None:
            self._rate.labels(event.phase).set(event.bytes_per_second)
        if event.phase == "save":
            self._step.set(event.step)

    def close(self) -> None:
        """Ends the endpoint, if there is one; the metrics stay. Again is fine."""
        server, self._server, self.port = self._server, None, None
        if server is not None:
            server.shutdown()
            server.server_close()
            self._thread.join()

    def __enter__(self) -> PrometheusSink:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
