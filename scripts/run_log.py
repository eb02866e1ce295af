"""What a training run shows and measures: a progress line, exact losses, times of its saves."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ckptmgr

WARM_UP_STEPS = 3
SECONDS_BETWEEN_LINES = 1.0  # where the output is no terminal


class RunLog:
    """`quiet`: of a process other than the first, which writes and prints nothing."""

    def __init__(self, steps: int, losses: str | None, quiet: bool = False):
        self._steps = steps
        self._quiet = quiet
        self._losses = None if quiet else losses
        self._start = 0
        self._save_called: dict[int, float] = {}  # by step
        self._last_committed: int | None = None
        self._step_seconds: list[float] = []
        self._save_seconds: list[float] = []
        self._durable_seconds: list[float] = []
        self._step_ended = time.perf_counter()
        self._line_due = 0.0

    def start(self, step: int) -> None:
        """The step of the checkpoint that the run continues, 0 for a new run."""
        self._start = step
        self._last_committed = step or None
        if not self._quiet:
            print(f"resumed from step {step}" if step else "a new run", flush=True)
        self._step_ended = time.perf_counter()

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        begun = self._save_called[step] = time.perf_counter()
        yield
        self._save_seconds.append(time.perf_counter() - begun)

    def committed(self, info: ckptmgr.StepInfo) -> None:
        """For `Options.on_committed`, so called on the manager's thread."""
        self._durable_seconds.append(time.perf_counter() - self._save_called[info.step])
        self._last_committed = info.step

    def step(self, step: int, loss: float, in_flight: int) -> None:
        if self._losses:
            with open(self._losses, "a") as file:
                print(json.dumps({"step": step, "loss": loss.hex()}), file=file)
        now = time.perf_counter()
        self._step_seconds.append(now - self._step_ended)
        self._step_ended = now
        self._progress(step, loss, in_flight)

    def _progress(self, step: int, loss: float, in_flight: int) -> None:
        terminal, last = sys.stdout.isatty(), step == self._steps
        if self._quiet or (not (terminal or last) and self._step_ended < self._line_due):
            return
        self._line_due = self._step_ended + SECONDS_BETWEEN_LINES
        line = (
            f"step {step}/{self._steps}  loss {loss:.4f}"
            f"  {1 / statistics.median(self._step_seconds[-10:]):.1f} steps/s"
            f"  saves in flight {in_flight}  last committed {self._last_committed}"
        )
        # On a terminal each line is written over the one before.
        print(f"\r{line:<79}" if terminal else line, end="" if terminal and not last else "\n")
        sys.stdout.flush()

    def write_summary(self, path: str, **more: Any) -> None:
        """Times in seconds; the steps in which programs were compiled do not count."""
        steps = self._step_seconds[WARM_UP_STEPS:]
        summary = {
            "start": self._start,
            "saves": len(self._save_seconds),
            "step_median": _or_none(statistics.median, steps),
            "step_mean": _or_none(statistics.mean, steps),
            "save_median": _or_none(statistics.median, self._save_seconds),
            "durable_median": _or_none(statistics.median, self._durable_seconds),
            **more,
        }
        Path(path).write_text(json.dumps(summary, indent=2) + "\n")


def _or_none(statistic: Callable[[list[float]], float], values: list[float]) -> float | None:
    return statistic(values) if values else None
