"""What happened, as values: one `Event` per phase of a save or restore.

A sink is any callable that takes an `Event`; those that come with the library lie in `sinks`. A
sink that raises is reported once and never disturbs the save it watches.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

logger = logging.getLogger("ckptmgr")

NUMBERS: Mapping[str, str] = {
    "snapshot_latency": "from the call of save() until the last value is on the host",
    "flush_latency": "from the call of save() until the step is durable",
    "stall": "inside save() on the caller's thread, waiting for a busy slot included",
    "interval": "between the calls of two accepted saves",
    "staging_bytes": "host memory that a save takes for its copies",
}
"""The five numbers that users ask for; each is a field of the one event that knows it. Seconds,
but for the last."""


class Clock:
    """Wall and monotonic time, in seconds; an argument so that tests can turn it."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


@dataclass(frozen=True, slots=True)
class Event:
    """One finished phase. A field is None where its value is not known, or not of this phase.

    Attributes:
      phase: of a save "call" (all of save(), on the caller's thread), "order", "open", "transfer"
        (copies ordered until the last value is on the host; none without arrays), "write" (which
        overlaps it), "sync", "publish", "retain", and "save" for the whole in the background;
        "audit" and "readback" of a heartbeat; "wait" where the caller had to wait for a save in
        flight or for host memory; "skip" for a save that a busy slot kept from happening;
        "adapt" where the interval of an adaptive schedule changes: `seconds` is the new one;
        "compression" when `Storage(compression="auto")` has chosen: `seconds` is what that took;
        "restore".
      step: the step concerned.
      seconds: how long it took.
      nbytes: array bytes it moved, 0 where none.
      error: None, or the type and text of the exception that ended it.
      mode: how the snapshot was taken, of a save.
      saves_in_flight: accepted saves neither durable nor failed, when the event was emitted.
      host_bytes: host memory that snapshots hold at that time, kept buffers included.
      detail: of "wait", for what; of "readback", from where: "storage", or "page cache" where
        the data could not be put out of it; of "retain", what a budget gave up; of "adapt", why;
        of "compression", what and why.
      snapshot_latency: of "transfer"; see `NUMBERS` for this one and the next four.
      flush_latency: of a "save" that succeeded.
      stall: of "call".
      interval: of "call", but for a manager's first.
      staging_bytes: of "order".
    """

    phase: str
    step: int
    seconds: float
    nbytes: int = 0
    error: str | None = None
    mode: str | None = None
    saves_in_flight: int | None = None
    host_bytes: int | None = None
    detail: str | None = None
    snapshot_latency: float | None = None
    flush_latency: float | None = None
    stall: float | None = None
    interval: float | None = None
    staging_bytes: int | None = None

    @property
    def bytes_per_second(self) -> float | None:
        """None where no bytes moved, or no time passed."""
        return self.nbytes / self.seconds if self.nbytes and self.seconds > 0 else None

    @property
    def numbers(self) -> dict[str, float]:
        """Those of the five numbers that this event knows, by name."""
        found = {name: getattr(self, name) for name in NUMBERS}
        return {name: value for name, value in found.items() if value is not None}


Sink = Callable[[Event], None]


class Span:
    """An event under way."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def note(self, **fields: Any) -> None:
        """Sets fields of the event that the block will emit."""
        self.fields.update(fields)


class Call:
    """One call of save(), of which most are turned down without a word.

    Attributes:
      started: monotonic time of the call.
    """

    def __init__(self, emitter: Emitter, step: int) -> None:
        self.started = emitter.clock.monotonic()
        self.phase: str | None = None
        self.fields: dict[str, Any] = {}
        self._emitter = emitter
        self._step = step

    def accept(self, save: object, mode: str) -> None:
        """From now on the save counts as in flight, until `Emitter.settled(save)`."""
        interval = self._emitter._accepted(save, self.started)
        self.phase, self.fields = "call", {"mode": mode, "interval": interval}

    def skip(self) -> None:
        """The save does not happen, for another one is in flight."""
        self.phase = "skip"


class Emitter:
    """Hands each event to every sink, and counts the saves in flight; used from any thread.

    Args:
      host_bytes: tells how much host memory snapshots hold.
    """

    def __init__(
        self, sinks: Sequence[Sink], clock: Clock, host_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        self._sinks = tuple(sinks)
        self._broken: set[int] = set()
        self._lock = threading.Lock()
        self._in_flight: set[int] = set()
        self._host_bytes = host_bytes
        self._last_call: float | None = None
        self.clock = clock

    def emit(self, event: Event) -> None:
        with self._lock:
            count = len(self._in_flight)
        event = replace(event, saves_in_flight=count, host_bytes=self._host_bytes())
        for sink in self._sinks:
            try:
                sink(event)
            except Exception:
                if id(sink) not in self._broken:
                    self._broken.add(id(sink))
                    logger.exception("event sink %r failed; the save goes on", sink)

    @contextmanager
    def span(
        self, phase: str, step: int, nbytes: int = 0, mode: str | None = None
    ) -> Iterator[Span]:
        """Times the block and emits one event however it ends."""
        span = Span(nbytes=nbytes, mode=mode)
        started = self.clock.monotonic()
        error: str | None = None
        try:
            yield span
        except BaseException as exc:
            error = f"{type(exc).__name__}: {exc}"
            raise
        finally:
            self.emit(Event(phase, step, self.since(started), error=error, **span.fields))

    @contextmanager
    def call(self, step: int) -> Iterator[Call]:
        """Times a call of save(); emits "call" if it was accepted, "skip" if a busy slot said no."""
        call = Call(self, step)
        error: str | None = None
        try:
            yield call
        except BaseException as exc:
            error = f"{type(exc).__name__}: {exc}"
            raise
        finally:
            if call.phase is not None:
                seconds = self.since(call.started)
                stall = seconds if call.phase == "call" else None
                self.emit(Event(call.phase, step, seconds, error=error, stall=stall, **call.fields))

    def since(self, started: float) -> float:
        """Seconds since a monotonic time, never less than none."""
        return max(0.0, self.clock.monotonic() - started)

    def _accepted(self, save: object, called: float) -> float | None:
        with self._lock:
            self._in_flight.add(id(save))
            before, self._last_call = self._last_call, called
        return None if before is None else max(0.0, called - before)

    @property
    def in_flight(self) -> int:
        """Accepted saves that are neither durable nor failed."""
        with self._lock:
            return len(self._in_flight)

    def settled(self, save: object) -> None:
        """A save is durable, or failed."""
        with self._lock:
            self._in_flight.discard(id(save))
