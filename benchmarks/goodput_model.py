"""A job that saves, fails and starts again, simulated event by event, on failures drawn before.

One call of `simulate` is one run of a job in one mode on one `Draws`. Time is in seconds. What
happens is what ckptmgr does:

- Training goes in whole steps; a save comes at the first step that ends so long after the last one
  was accepted as the interval says.
- `sync`: training stands still until the step is durable.
- `copy_on_write`, `double_buffer`: training stands still until the copies are ordered and the next
  step may overwrite what is copied. One save, or two, may be in flight; a further one waits for the
  oldest. A second one begins to write when the first is durable.
- Every so many saves one is a heartbeat: it waits for those in flight, stands still until it is
  durable, and is read back.
- A failure takes back what is not durable: the save in flight, and all training since the newest
  durable one was called. Then it is noticed, the job starts again, and reads; a failure may come
  meanwhile too.
- At the end the job stops, waits for what is in flight, and makes a last save.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckptmgr.core import advice
from ckptmgr.core.advice import Adaptive, Measured
from ckptmgr.core.jobfacts import (
    DAY,
    DEVICE_BYTES_PER_SECOND,
    FAILURES_PER_ACCELERATOR_DAY,
    ORDERING_SECONDS,
)

SLOTS = {"sync": 1, "copy_on_write": 1, "double_buffer": 2}
DISTRIBUTIONS = ("exponential", "weibull", "trace")
WEIBULL_SHAPE = 0.7
NOISE = 4096  # values drawn per run and kind, used in turns

# Gaps between failures, of their mean: made up, not recorded. Two weeks in which new machines fail,
# quiet ones, a host that fails again and again until it is put aside, and quiet again.
TRACE = (
    *(0.15, 0.3, 0.1, 0.5, 0.25, 0.8, 0.4, 1.1, 0.2, 0.9, 1.4, 0.6, 1.9, 1.2, 2.4, 0.7, 1.6),
    *(2.8, 1.3, 0.05, 0.04, 0.06, 0.03, 0.1, 0.05, 2.2, 3.1, 1.7, 0.9, 2.6, 1.5, 0.4, 1.8),
    *(0.02, 0.05, 0.03, 0.08, 1.2, 2.0, 0.6, 1.1),
)


@dataclass(frozen=True)
class Job:
    """What is trained, and where; rates are those of the whole job."""

    accelerators: int
    size: float
    write: float
    read: float
    step: float = 10.0
    detect_and_restart: float = 600.0
    heartbeat_every: int | None = 100
    seconds: float = 30 * DAY
    per_accelerator_day: float = FAILURES_PER_ACCELERATOR_DAY
    slower_after: float = math.inf  # from then on a flush takes so many times as long
    slower: float = 1.0

    @property
    def flush(self) -> float:
        return self.size / self.write

    @property
    def restore(self) -> float:
        return self.size / self.read

    @property
    def recovery(self) -> float:
        return self.detect_and_restart + self.restore

    @property
    def mtbf(self) -> float:
        return DAY / (self.accelerators * self.per_accelerator_day)

    def stall(self, mode: str) -> float:
        """What an ordinary save stops training, without a wait for the one before."""
        if mode == "sync":
            return self.flush
        return ORDERING_SECONDS + self.size / self.accelerators / DEVICE_BYTES_PER_SECOND

    def cost(self, mode: str) -> float:
        """The same in the mean, heartbeats included."""
        stall = self.stall(mode)
        if self.heartbeat_every is None:
            return stall
        return stall + (self.flush + self.restore - stall) / self.heartbeat_every


@dataclass(frozen=True)
class Draws:
    """The luck of one run: the moments of the failures, and factors for what varies."""

    failures: Sequence[float]
    flush: Sequence[float]
    stall: Sequence[float]
    recovery: Sequence[float]

    @classmethod
    def steady(cls, failures: Sequence[float]) -> "Draws":
        """Failures at these moments, and nothing varies."""
        return cls(failures, [1.0], [1.0], [1.0])


def draw(job: Job, distribution: str, seed: int, gaps: Sequence[float] = TRACE) -> Draws:
    """One run's luck; the same for the same seed.

    A flush varies by a fifth, and one in fifty takes three times as long. The time to start again
    varies by a third. All factors have the mean 1.
    """
    rng = np.random.default_rng(seed)
    count = int(3 * job.seconds / job.mtbf) + 50
    if distribution == "exponential":
        drawn = rng.exponential(1.0, count)
    elif distribution == "weibull":
        drawn = rng.weibull(WEIBULL_SHAPE, count) / math.gamma(1 + 1 / WEIBULL_SHAPE)
    else:
        first = rng.integers(len(gaps))
        drawn = np.resize(np.roll(gaps, -first), count) / np.mean(gaps)
    slow = np.where(rng.random(NOISE) < 0.02, 3.0, 1.0)
    return Draws(
        np.cumsum(drawn * job.mtbf).tolist(),
        (_spread(rng, 0.2) * slow / (0.98 + 0.02 * 3)).tolist(),
        _spread(rng, 0.1).tolist(),
        _spread(rng, 0.33).tolist(),
    )


def _spread(rng: np.random.Generator, sigma: float) -> np.ndarray:
    return rng.lognormal(-(sigma**2) / 2, sigma, NOISE)


@dataclass
class Outcome:
    """What came of a run, in seconds."""

    counted: float = 0.0  # training that is in the last state
    total: float = 0.0  # from the start to the last save
    stalled: float = 0.0  # standing still in saves
    waited: float = 0.0  # of that: for saves in flight
    recovering: float = 0.0
    saves: int = 0
    failures: int = 0
    last_interval: float = 0.0

    @property
    def goodput(self) -> float:
        return self.counted / self.total


class Learner:
    """The adaptive schedule of a run: `adapt`, and what it has measured.

    What was measured goes into each save, so a failure takes it back to the newest durable one; the
    failure itself is always counted, as a process that starts again sees it. The time of a flush is
    known at the save after it.
    """

    def __init__(self, adaptive: Adaptive, job: Job) -> None:
        self.adaptive = adaptive
        self.measured = Measured(heartbeat_every=job.heartbeat_every)
        self.interval, self.reason = advice.adapt(adaptive, self.measured, None)
        self._since = 0.0
        self._last: tuple[float, float, bool] | None = None

    def saved(self, now: float, stall: float, flush: float, heartbeat: bool) -> Measured:
        measured = self.measured.ran(now - self._since)
        self._since = now
        if self._last is not None:
            measured = measured.saved(*self._last[:2], heartbeat=self._last[2])
        self._last = (stall, flush, heartbeat)
        self.measured = measured
        self.interval, self.reason = advice.adapt(self.adaptive, measured, self.interval)
        return measured

    def failed(self, restarted: float, recorded: Measured | None) -> Measured:
        known = recorded or Measured(heartbeat_every=self.measured.heartbeat_every)
        self.measured = known.ran(0.0, failed=True)
        self._since, self._last = restarted, None
        self.interval, self.reason = advice.adapt(self.adaptive, self.measured, None)
        return self.measured


State = tuple[float, Measured | None]
"""What a step holds: the training done up to it, and what the adaptive schedule knew."""
Saves = list[tuple[float, State]]
"""When each of the newest saves is durable, newest first, and what it holds."""


def simulate(
    job: Job, mode: str, draws: Draws, interval: float, learner: Learner | None = None
) -> Outcome:
    """One run at this interval; with a learner, at the one that it says."""
    out = Outcome()
    coming = iter([*draws.failures, math.inf])
    failure, now = next(coming), 0.0
    kept: State = (0.0, None)
    while True:
        stop = min(failure, job.seconds)
        now, work, saves = _train(job, mode, draws, interval, learner, now, kept, stop, out)
        if failure > job.seconds:
            return _end(job, draws, now, work, saves, failure, out)
        kept = next(held for durable, held in saves if durable <= failure)
        failed = now = failure
        while failure <= now:
            out.failures += 1
            varies = draws.recovery[out.failures % len(draws.recovery)]
            now = failure + job.detect_and_restart * varies + job.restore
            failure = next(coming)
        out.recovering += now - failed
        if learner is not None:
            kept = (kept[0], learner.failed(now, kept[1]))
        if now >= job.seconds:
            out.counted, out.total = kept[0], job.seconds
            return out


def _train(
    job: Job,
    mode: str,
    draws: Draws,
    interval: float,
    learner: Learner | None,
    now: float,
    kept: State,
    stop: float,
    out: Outcome,
) -> tuple[float, float, Saves]:
    """Trains and saves from `now` until `stop`; where a save is cut, `now` is when it would be over."""
    step, sync, one = job.step, mode == "sync", SLOTS[mode] == 1
    stall, flush, read, every = job.stall(mode), job.flush, job.restore, job.heartbeat_every
    flushes, stalls, turns = draws.flush, draws.stall, len(draws.flush)
    slower_after, slower, ceil = job.slower_after, job.slower, math.ceil
    accepted, work, saved = now, kept[0], out.saves
    stalled = waited = 0.0
    # When the newest save is durable, the one before, and the one before that; what they hold.
    first = second = third = -math.inf
    held_first = held_second = held_third = kept
    if learner is not None:
        interval = learner.interval
    while True:
        steps = ceil((accepted + interval - now) / step)
        trains = steps * step if steps > 0 else step
        if now + trains >= stop:
            break
        called = now = now + trains
        work += trains
        saved += 1
        takes = flush * flushes[saved % turns]
        if now > slower_after:
            takes *= slower
        heartbeat = every is not None and saved % every == 0
        free = first if one or heartbeat else second
        if free > now:
            waited += free - now
            now = free
        accepted = now
        if sync or heartbeat:
            durable = now = now + takes + (read if heartbeat else 0.0)
        else:
            durable = (first if first > now else now) + takes
            now += stall * stalls[saved % turns]
        known = None
        if learner is not None and now < stop:
            known = learner.saved(now, now - accepted, durable - accepted, heartbeat)
            interval = learner.interval
        third, second, first = second, first, durable
        held_third, held_second, held_first = held_second, held_first, (work, known)
        stalled += now - called
        if now >= stop:
            break
    out.saves, out.last_interval = saved, interval
    out.stalled += stalled
    out.waited += waited
    saves = [(first, held_first), (second, held_second), (third, held_third), (-math.inf, kept)]
    return now, work, saves


def _end(
    job: Job, draws: Draws, now: float, work: float, saves: Saves, failure: float, out: Outcome
) -> Outcome:
    """The last steps, and a save that is waited for, unless a failure comes before it is durable."""
    if now < job.seconds:
        work += (job.seconds - now) // job.step * job.step
        now = job.seconds
    newest, (saved, _) = saves[0]
    out.total = max(now, newest)
    if work > saved:
        takes = job.flush * draws.flush[(out.saves + 1) % len(draws.flush)]
        out.total += takes * (job.slower if now > job.slower_after else 1.0)
    out.counted = work
    if failure < out.total:
        out.failures += 1
        out.total = failure
        out.counted = next(held for durable, held in saves if durable <= failure)[0]
    return out
