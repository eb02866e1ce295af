"""When to save: formulas for the interval, what training gets done with it, a schedule that learns.

Everything is in seconds. The words, here and in `docs/ADVICE.md`:

  interval  from the call of one save to the call of the next
  stall     how long a save stops training: all of a synchronous save, the ordering of the copies
            and the wait for them of the others; the mean, heartbeats included
  flush     from the call until the step is durable
  restore   from a failure until training goes on: noticing, starting again, reading
  mtbf      mean time between two failures of the whole job
  goodput   time of training that counts, of all time

Sources:

  Young     J. W. Young, A first order approximation to the optimum checkpoint interval,
            Communications of the ACM 17(9), 1974
  Daly      J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart
            dumps, Future Generation Computer Systems 22(3), 2006
  Saxena    N. R. Saxena and others, Optimal Checkpoint Interval with Availability as an Objective
            Function, arXiv:2410.18124, 2024
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import numbers
from dataclasses import dataclass
from typing import Any

from ckptmgr.errors import InvalidOption

MOST = 1e150
"""No number of a job is as large; the product of two of these is still a float."""


def positive(name: str, value: Any, *, zero: bool = False, endless: bool = False) -> float:
    """`value` as a float; raises InvalidOption where it is not a number above zero.

    Args:
      zero: zero will do.
      endless: infinity will do.
    """
    number = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # a whole number that no float holds
            number = float(value)
    if 0 < number < MOST or (zero and number == 0) or (endless and number == math.inf):
        return number
    wanted = "a number of at least 0" if zero else "a positive number"
    raise InvalidOption(f"{name} must be {wanted}, got {value!r}")


# -- formulas -------------------------------------------------------------------------------------


def young(stall: float, mtbf: float) -> float:
    """sqrt(2 C M): training between two saves, in seconds (Young).

    C is the stall of a save, M the time between failures. First order: C is small beside M, and
    neither saving nor restarting is hit by a failure.
    """
    return math.sqrt(2 * positive("stall", stall, zero=True) * positive("mtbf", mtbf))


def daly(stall: float, mtbf: float) -> float:
    """Training between two saves, in seconds, to a higher order (Daly).

    sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C, and M where C is 2 M or more. Failures
    may hit a save and a restart. For small C it is shorter than Young's by two thirds of C.
    """
    first = young(stall, mtbf)
    if stall >= 2 * mtbf:
        return mtbf
    part = stall / (2 * mtbf)
    return first * (1 + math.sqrt(part) / 3 + part / 9) - stall


def availability_optimal(
    stall: float, mtbf: float, restore: float, undetected: float = 0.0, kept: int | None = None
) -> float:
    """T_s + sqrt(2 (T_f + T_r) T_s + T_s^2): from save to save, in seconds (Saxena).

    T_s is the stall of a save, T_f the time between failures without the repairs, T_r that from a
    failure until training goes on. The interval T maximises

        (1 - T_s / T) * T_f / (T_f + T_r + T / 2)

    the share that is not spent saving, times the share that is spent neither restarting nor on
    work done twice, T / 2 on average. It is never shorter than T_s + sqrt(2 T_r T_s + T_s^2): a
    failure that is slow to be noticed and repaired costs so much that saving more often, to lose
    less by it, does not pay.

    Args:
      undetected, kept: see `shortest_for_detection`; the interval is not shorter than that.
    """
    stall, restore = positive("stall", stall, zero=True), positive("restore", restore, zero=True)
    cycle = positive("mtbf", mtbf) + restore
    best = stall + math.sqrt(2 * cycle * stall + stall**2)
    return max(best, shortest_for_detection(undetected, kept))


def shortest_for_detection(undetected: float, kept: int | None) -> float:
    """The shortest interval with which a good step is still there when an error shows, in seconds.

    An error of the values shows `undetected` seconds after it happened; what was saved meanwhile
    holds it. Of `kept` steps the oldest is then at least (kept - 1) intervals old, so that
    (kept - 1) * interval must not be less than `undetected`. For two steps that is the bound of
    Saxena. With one step no interval is safe, and this gives the same; with all kept (None) every
    one is.
    """
    undetected = positive("undetected", undetected, zero=True)
    return 0.0 if kept is None else undetected / max(kept - 1, 1)


def goodput(interval: float, stall: float, flush: float, restore: float, mtbf: float) -> float:
    """The time of training that counts, of all time; between 0 and 1.

    Failures come at random (a Poisson process), also into saves and restarts. What counts is what
    the newest durable step has: after a start the k-th save is durable w + f + (k - 1) P later,
    with the training w = interval - stall between saves, the flush f, and P = max(interval, f),
    since a save waits for the one before. So many saves are expected before the next failure:

        K = exp(-(w + f) / M) / (1 - exp(-P / M))

    and a start that holds, with the time until it fails, takes M exp(R / M) in the mean. Goodput
    is w K / (M exp(R / M)). Where stall = flush this is Daly's cost function upside down.
    """
    if not interval > positive("stall", stall, zero=True):
        raise InvalidOption(
            f"interval must be longer than the stall of {stall:g} s, got {interval!r}"
        )
    restore = positive("restore", restore, zero=True)
    flush = max(positive("flush", flush, zero=True), stall)  # no step is durable any sooner
    work, period = interval - stall, max(positive("interval", interval), flush)
    if positive("mtbf", mtbf, endless=True) == math.inf:
        return work / period
    return work * math.exp(-(work + flush + restore) / mtbf) / (-mtbf * math.expm1(-period / mtbf))


def lost_per_failure(interval: float, stall: float, flush: float, mtbf: float) -> float:
    """Expected time, before a failure, that is lost to it, in seconds.

    It is M - P K in the words of `goodput`: the time until a failure less that of the saves that
    became durable. For intervals much shorter than M it is half an interval and the flush, less
    the stall.
    """
    flush = max(flush, stall)
    work, period = interval - stall, max(interval, flush)
    if mtbf == math.inf:
        return work + flush - period / 2
    saves = math.exp(-(work + flush) / mtbf) / -math.expm1(-period / mtbf)
    return mtbf - period * saves


def best_interval(
    stall: float,
    flush: float,
    restore: float,
    mtbf: float,
    *,
    lower: float = 0.0,
    upper: float = math.inf,
) -> float:
    """The interval with the highest `goodput`, from save to save, in seconds.

    With u = (interval - stall) / M and c = stall / M the derivative of `goodput` is zero where
    u = 1 - exp(-(u + c)), which Newton's method solves; so the training between two saves is always
    shorter than M. Neither flush nor restore moves that point: each failure costs them whatever the
    interval. But an interval shorter than the flush makes the next save wait, so the flush bounds it
    from below (as far as there is no more than M of training between two saves), as `lower` does.
    `upper` bounds it from above, and goes before the others.
    """
    positive("restore", restore, zero=True)  # taken so that the arguments are those of `goodput`
    lower, flush = positive("lower", lower, zero=True), positive("flush", flush, zero=True)
    upper = positive("upper", upper, endless=True)
    share = positive("stall", stall, zero=True) / positive("mtbf", mtbf, endless=True)
    if mtbf == math.inf:
        return upper
    u = min(1.0, math.sqrt(2 * share))  # never below the solution, so that every step goes down
    for _ in range(60):
        slope = -math.expm1(-(u + share))
        step = (u - slope) / slope if slope else 0.0
        u -= step
        if step <= 1e-9 * u:
            break
    return min(max(u * mtbf + stall, min(flush, stall + mtbf), lower), upper)


def interval_for_overhead(stall: float, max_overhead: float) -> float:
    """The shortest interval at which saving takes `max_overhead` of the time, in seconds."""
    if not positive("max_overhead", max_overhead) < 1:
        raise InvalidOption(f"max_overhead must be less than 1, got {max_overhead!r}")
    return positive("stall", stall, zero=True) / max_overhead


# -- a schedule that learns -----------------------------------------------------------------------

LONGEST = 1e12
"""No time that was measured is as long, in seconds."""
ROOM, SPREADS = 0.1, 2.0
"""An interval is longer than the mean flush by this share of it, and by so many times its spread:
then saves seldom wait for one another."""
SAME = 0.1
"""An interval that is off by this share loses next to nothing, so it is left as it is."""
MEMORY = 20
"""About how many saves a measured mean goes back."""
WEIGHT_GIVEN = 4.0
"""As much as so many failures counts the mean time between failures that was given."""
WEIGHT_ASSUMED = 0.5
"""The same for an assumed one; half a failure is Jeffreys' prior for the rate of a Poisson process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive:
    """An interval that is worked out anew as saves and failures are measured.

    Attributes:
      max_overhead: the share of the time that saving may take as long as nothing is known about
        failures. What then counts is goodput: the share becomes smaller where the job runs on
        without failures, and larger where they come so often that fewer saves would lose more.
      shortest_seconds, longest_seconds: bounds of the interval that always hold.
      mean_seconds_between_failures: of the whole job, where that is known; what is seen corrects it.
    """

    max_overhead: float = 0.02
    shortest_seconds: float = 60.0
    longest_seconds: float = 4 * 3600.0
    mean_seconds_between_failures: float | None = None

    def __post_init__(self) -> None:
        if not positive("Adaptive.max_overhead", self.max_overhead) < 1:
            raise InvalidOption(
                f"Adaptive.max_overhead must be less than 1, got {self.max_overhead!r}; "
                "0.02 lets saving take 2 % of the time"
            )
        shortest = positive("Adaptive.shortest_seconds", self.shortest_seconds)
        longest = positive("Adaptive.longest_seconds", self.longest_seconds)
        if longest < shortest:
            raise InvalidOption(
                f"Adaptive.longest_seconds must not be less than shortest_seconds, "
                f"got {longest:g} and {shortest:g}"
            )
        if self.mean_seconds_between_failures is not None:
            name = "Adaptive.mean_seconds_between_failures"
            positive(name, self.mean_seconds_between_failures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a job has seen of its saves and failures; each method gives a new value.

    Attributes:
      saves: saves that were measured, heartbeats apart.
      stall_seconds: mean time that such a save stopped training, without waits for earlier ones.
      flush_seconds, flush_spread: mean time from its call until it was durable, and the standard
        deviation of that.
      heartbeat_every: every so many saves one is a heartbeat; None: none is.
      heartbeats, heartbeat_seconds: how many were measured, and the mean time that one stopped
        training. Until one was, it is taken to be two flushes: written, and read back.
      running_seconds: time that the job ran, over all its starts.
      failures: how often it was started again after it had not ended as it should.
    """

    saves: int = 0
    stall_seconds: float = 0.0
    flush_seconds: float = 0.0
    flush_spread: float = 0.0
    heartbeat_every: int | None = None
    heartbeats: int = 0
    heartbeat_seconds: float = 0.0
    running_seconds: float = 0.0
    failures: int = 0

    def __post_init__(self) -> None:
        """So that a record which somebody has changed is found when it is read."""
        for name in _NUMBERS:
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value < LONGEST:
                raise InvalidOption(
                    f"Measured.{name} must be a number of at least 0, got {value!r}"
                )
        every = self.heartbeat_every
        if every is not None and (not isinstance(every, int) or every < 1):
            raise InvalidOption(f"Measured.heartbeat_every must be at least 1, got {every!r}")

    @property
    def shortest_seconds(self) -> float:
        """The shortest interval at which saves seldom wait for one another."""
        return self.flush_seconds + max(ROOM * self.flush_seconds, SPREADS * self.flush_spread)

    @property
    def cost_seconds(self) -> float:
        """Mean time that a save stops training, heartbeats included."""
        if self.heartbeat_every is None:
            return self.stall_seconds
        heartbeat = self.heartbeat_seconds if self.heartbeats else 2 * self.flush_seconds
        return self.stall_seconds + (heartbeat - self.stall_seconds) / self.heartbeat_every

    def saved(self, stall: float, flush: float, *, heartbeat: bool = False) -> Measured:
        """After a save that became durable; `stall` without the wait for saves in flight.

        A time that no clock can have measured tells nothing.
        """
        if not (0 <= stall < LONGEST and 0 <= flush < LONGEST):
            return self
        if heartbeat:
            seen = self.heartbeats + 1
            mean = _towards(self.heartbeat_seconds, stall, seen)
            return dataclasses.replace(self, heartbeats=seen, heartbeat_seconds=mean)
        seen, off = self.saves + 1, flush - self.flush_seconds
        mean = _towards(self.flush_seconds, flush, seen)
        # What is off from the old mean and from the new one gives the variance (Welford 1962).
        variance = _towards(self.flush_spread**2, off * (flush - mean), seen)
        return dataclasses.replace(
            self,
            saves=seen,
            stall_seconds=_towards(self.stall_seconds, stall, seen),
            flush_seconds=mean,
            flush_spread=math.sqrt(variance),
        )

    def ran(self, seconds: float, *, failed: bool = False) -> Measured:
        """After so much more time of running, which a failure ended or not."""
        more = seconds if 0 <= seconds < LONGEST else 0.0
        running = min(self.running_seconds + more, LONGEST / 2)
        failures = self.failures + failed
        return dataclasses.replace(self, running_seconds=running, failures=failures)


_NUMBERS = (
    *("saves", "stall_seconds", "flush_seconds", "flush_spread", "heartbeats"),
    *("heartbeat_seconds", "running_seconds", "failures"),
)


def _towards(mean: float, value: float, seen: int) -> float:
    """The mean of the first values, and then one that forgets what is long ago."""
    return mean + (value - mean) / min(seen, MEMORY)


def expected_mtbf(adaptive: Adaptive, measured: Measured) -> float:
    """Mean time between failures, from what was seen and what was known before, in seconds.

    (running + weight * before) / (failures + weight). What is known before is what was given; else
    it is the time between failures for which Young's formula gives the interval of `max_overhead`:
    stall / (2 max_overhead^2).
    """
    before, weight = adaptive.mean_seconds_between_failures, WEIGHT_GIVEN
    if before is None:
        before, weight = measured.cost_seconds / (2 * adaptive.max_overhead**2), WEIGHT_ASSUMED
    seen = measured.running_seconds + weight * before
    return min(max(1.0, seen / (measured.failures + weight)), LONGEST)


def adapt(adaptive: Adaptive, measured: Measured, current: float | None) -> tuple[float, str]:
    """The interval to save at from now on, in seconds, and why it is that.

    `current` is the interval up to now, None where there is none yet. The result lies between the
    bounds of `adaptive`; a change by less than a tenth is not made.
    """
    low, high = adaptive.shortest_seconds, adaptive.longest_seconds
    if not measured.saves and not measured.heartbeats:
        seconds = min(max(low, current or low), high)
        return seconds, f"{seconds:.0f} s: nothing is measured yet"
    cost, floor = measured.cost_seconds, measured.shortest_seconds
    mtbf = expected_mtbf(adaptive, measured)
    best = best_interval(cost, floor, 0.0, mtbf, lower=max(low, floor), upper=high)
    if current is not None and low <= current <= high and abs(best - current) <= SAME * current:
        return current, f"{current:.0f} s as before: {best:.0f} s would be much the same"
    before = "" if current is None else f" instead of {current:.0f} s"
    return best, f"{best:.0f} s{before}: {_why(adaptive, measured, best, mtbf)}"


def _why(adaptive: Adaptive, measured: Measured, best: float, mtbf: float) -> str:
    cost, flush = measured.cost_seconds, measured.flush_seconds
    failures = f"{measured.failures} failure" + ("" if measured.failures == 1 else "s")
    facts = (
        f"a save stops training for {cost:.3g} s, and a failure is expected every "
        f"{mtbf / 3600:.3g} h ({failures} in {measured.running_seconds / 3600:.1f} h)"
    )
    if best == adaptive.longest_seconds:
        waits = f", and saves of {flush:.0f} s wait for one another" if flush > best else ""
        return f"{facts}; longest_seconds allows no more{waits}"
    if best == measured.shortest_seconds:
        return f"{facts}; more often, saves of {flush:.0f} s would wait for one another"
    if best == adaptive.shortest_seconds:
        return f"{facts}; shortest_seconds allows no less"
    if cost > adaptive.max_overhead * best:
        return f"{facts}; saving takes {cost / best:.1%}, more than max_overhead, and less would lose more"
    return facts
