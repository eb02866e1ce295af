"""What happened, as values: one `Event` per phase of a save or restore.

A sink is any callable that takes an `Event`. A sink that raises is reported once and never
disturbs the save it watches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger("ckptmgr")


class Clock:
    """Wall and monotonic time, in seconds; an argument so that tests can turn it."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


@dataclass(frozen=True, slots=True)
class Event:
    """One finished phase.

    Attributes:
      phase: "order", "open", "write", "sync", "publish", "retain", "save", "restore".
      step: the step concerned.
      seconds: how long it took.
      nbytes: array bytes it moved, 0 where none.
      error: None, or the type and text of the exception that ended it.
    """

    phase: str
    step: int
    seconds: float
    nbytes: int = 0
    error: str | None = None


Sink = Callable[[Event], None]


class Emitter:
    """Hands each event to every sink; used from any thread."""

    def __init__(self, sinks: Sequence[Sink], clock: Clock) -> None:
        self._sinks = tuple(sinks)
        self._broken: set[int] = set()
        self.clock = clock

    def emit(self, event: Event) -> None:
        for sink in self._sinks:
            try:
                sink(event)
            except Exception:
                if id(sink) not in self._broken:
                    self._broken.add(id(sink))
                    logger.exception("event sink %r failed; the save goes on", sink)

    @contextmanager
    def span(self, phase: str, step: int, nbytes: int = 0) -> Iterator[None]:
        """Times the block and emits one event however it ends."""
        started = self.clock.monotonic()
        error: str | None = None
        try:
            yield
        except BaseException as exc:
            error = f"{type(exc).__name__}: {exc}"
            raise
        finally:
            seconds = max(0.0, self.clock.monotonic() - started)
            self.emit(Event(phase, step, seconds, nbytes, error))


def log_sink(event: Event) -> None:
    """One line per finished save, at INFO; failures are raised elsewhere, not logged here."""
    if event.phase == "save" and event.error is None:
        rate = f", {event.nbytes / event.seconds / 1e9:.2f} GB/s" if event.seconds > 0 else ""
        logger.info(
            "step %d committed: %.1f MB in %.2f s%s",
            event.step,
            event.nbytes / 1e6,
            event.seconds,
            rate,
        )
