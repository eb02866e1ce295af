"""Advice with numbers: how often to save, in which mode, and what it costs.

`docs/ADVICE.md` has the formulas, their sources, and examples worked out by hand.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from ckptmgr.core import advice
from ckptmgr.core.figures import Advice, Figure, nbytes, number, seconds
from ckptmgr.core.jobfacts import (
    ACCELERATORS_PER_HOST,
    BYTES_PER_PARAM,
    COPIES,
    DAY,
    FAILURES_PER_ACCELERATOR_DAY,
    FLUSH_ROOM,
    Facts,
    checked,
    facts_of,
    suitable,
)
from ckptmgr.errors import InvalidOption

CONFIGS = {"sync": "small", "copy_on_write": "medium", "double_buffer": "large"}


def advise(
    *,
    accelerators: int,
    params: float | None = None,
    bytes_per_param: float = BYTES_PER_PARAM,
    state_bytes: float | None = None,
    state: Any = None,
    hosts: int | None = None,
    step_seconds: float | None = None,
    write_bytes_per_second: float | None = None,
    flush_seconds: float | None = None,
    read_bytes_per_second: float | None = None,
    restore_seconds: float | None = None,
    stall_seconds: float | None = None,
    detect_and_restart_seconds: float = 600.0,
    undetected_seconds: float = 0.0,
    mean_seconds_between_failures: float | None = None,
    failures_per_accelerator_day: float = FAILURES_PER_ACCELERATOR_DAY,
    interval_seconds: float | None = None,
    run_days: float = 30.0,
    keep_last: int | None = None,
    keep_every_seconds: float | None = None,
    heartbeat_every_saves: int | None = 100,
    mode: str | None = None,
    job: str = "training",
) -> Advice:
    """How often to save this job, in which mode, and what that costs.

    The size is one of `params`, `state_bytes` and `state` (a tree of arrays, or of their shapes);
    a flush is `flush_seconds`, or the size over `write_bytes_per_second` of all processes together.
    `restore_seconds` is the time to read a step, and `detect_and_restart_seconds` what goes before
    that after a failure. `undetected_seconds` is how long a wrong value may go unnoticed while
    training and saving go on. `interval_seconds` is your own interval, to compare.

    Args:
      keep_last, keep_every_seconds: as `KeepLast` and `KeepEverySeconds`; neither: all are kept.
      mode: of `Snapshot`; None: the one that suits size and job.
      job: "training", "llm" (throughput first) or "rl" (every version exactly).

    Raises:
      InvalidOption: an argument that cannot be used, or one that is missing.
    """
    return _answer(facts_of(checked(SimpleNamespace(**locals()))))


# -- the mode -------------------------------------------------------------------------------------


def _mode(facts: Facts) -> tuple[str, Iterator[Figure]]:
    """The file in configs/, and the figures about the mode."""
    asked = facts.asked
    suits, config, why = suitable(asked)
    if facts.mode != suits:
        why = f"as given; {suits} would suit ({why})"
        config = CONFIGS[facts.mode]
    return f"configs/{config}.py", _mode_figures(facts, f"configs/{config}.py", why)


def _mode_figures(facts: Facts, config: str, why: str) -> Iterator[Figure]:
    asked, group = facts.asked, "Mode and host memory"
    copies = COPIES[facts.mode]
    yield Figure(group, "mode", facts.mode, "", f"{why}; start from {config}.")
    said = f"{copies} x the state" if copies else "none but waves of 64 MiB a process"
    yield Figure(
        group,
        "staging memory",
        copies * facts.size,
        "bytes",
        f"of all hosts together: {said} (docs/DESIGN.md, section 5).",
    )
    hosts, origin = asked.hosts, ""
    if hosts is None:
        hosts = math.ceil(asked.accelerators / ACCELERATORS_PER_HOST)
        origin = f", {ACCELERATORS_PER_HOST} accelerators on each assumed"
    yield Figure(
        group,
        "... of each host",
        copies * facts.size / hosts,
        "bytes",
        f"with {number(hosts)} hosts{origin}, where the state is spread evenly.",
    )


# -- the interval and what it costs ---------------------------------------------------------------


def _bounds(facts: Facts) -> tuple[float, float]:
    """Below which no interval should be: for the flush, and for errors that show late."""
    detection = advice.shortest_for_detection(facts.asked.undetected_seconds, facts.asked.keep_last)
    return FLUSH_ROOM * facts.flush, detection


def _interval(facts: Facts) -> tuple[float, int | None]:
    """The best interval, in whole steps where their length is known: seconds, steps."""
    lower = max(_bounds(facts))
    best = advice.best_interval(facts.cost, facts.flush, facts.recovery, facts.mtbf, lower=lower)
    step = facts.asked.step_seconds
    if step is None:
        return best, None
    steps = max(1, round((best - facts.cost) / step))
    if steps * step + facts.cost < lower:
        steps += 1
    return steps * step + facts.cost, steps


def _when(facts: Facts, interval: float, steps: int | None) -> Iterator[Figure]:
    asked, group = facts.asked, "When to save"
    exact = advice.best_interval(facts.cost, 0.0, facts.recovery, facts.mtbf)
    flush, detection = _bounds(facts)
    what = "the highest expected goodput"
    if exact < max(flush, detection):
        what = "as often as the flush allows" if flush >= detection else "as detection allows"
        what += f"; {number(exact)} s would be best if nothing bounded it"
    whole = "" if steps is None else f", {number(steps)} steps of {number(asked.step_seconds)} s"
    yield Figure(
        group,
        "interval",
        interval,
        "seconds",
        f"{number(interval)} s from save to save{whole}: {what}.",
    )
    if steps is not None:
        yield Figure(group, "interval in steps", steps, "count", "for Schedule(every_steps=...).")
    yield from _formulas(facts, group)
    yield Figure(
        group,
        "bound by the flush",
        flush,
        "seconds",
        f"{FLUSH_ROOM:g} flushes, since some take longer: saves that come sooner wait; at {seconds(interval)} the disk writes "
        f"{100 * facts.flush / interval:.3g} % of the time.",
    )
    if asked.undetected_seconds:
        kept = "all steps are kept" if asked.keep_last is None else f"{asked.keep_last} steps kept"
        yield Figure(
            group,
            "bound by detection",
            detection,
            "seconds",
            f"an error shows after {seconds(asked.undetected_seconds)}, and one of {kept} must be "
            "older: undetected / (kept - 1) (Saxena 2024 for two).",
        )


def _formulas(facts: Facts, group: str) -> Iterator[Figure]:
    """What the published formulas say, to compare."""
    cost, mtbf = facts.cost, facts.mtbf
    yield Figure(
        group,
        "Young",
        advice.young(cost, mtbf),
        "seconds",
        f"of training between saves: sqrt(2 C M), C = {number(cost)} s a save with its share of "
        f"heartbeats, M = {number(mtbf)} s between failures (Young 1974).",
    )
    yield Figure(
        group,
        "Daly",
        advice.daly(cost, mtbf),
        "seconds",
        "of training between saves, to a higher order: failures hit saves and restarts too "
        "(Daly 2006).",
    )
    yield Figure(
        group,
        "availability optimum",
        advice.availability_optimal(cost, mtbf, facts.recovery),
        "seconds",
        "from save to save: T_s + sqrt(2 (T_f + T_r) T_s + T_s^2) with the recovery as T_r; longer, "
        "since work that is done again counts as safe from failures (Saxena 2024).",
    )


def _costs(facts: Facts, interval: float) -> Iterator[Figure]:
    asked, group = facts.asked, "What it costs"
    days, run = number(asked.run_days), asked.run_days * DAY
    good = facts.goodput(interval)
    lost = advice.lost_per_failure(interval, facts.cost, facts.flush, facts.mtbf)
    yield Figure(
        group,
        "goodput",
        good,
        "share",
        "of all time is training that counts: w K / (M exp(R / M)), see docs/ADVICE.md.",
    )
    yield Figure(
        group,
        "saving",
        facts.cost / interval,
        "share",
        "of the time: stall and heartbeat / interval.",
    )
    half = f"about half an interval, {seconds(interval / 2)}"
    if facts.mode != "sync":
        half += f", and the flush of {seconds(facts.flush)}, in which a step does not count yet"
    if lost < 0.95 * (interval / 2 + (facts.flush if facts.mode != "sync" else 0.0)):
        half += "; less, since some failures come when another has just been recovered from"
    yield Figure(group, "lost work per failure", lost, "seconds", f"{half}.")
    yield Figure(
        group,
        f"failures in {days} days",
        run / facts.mtbf,
        "count",
        f"each costs {seconds(lost + facts.recovery)}, recovery included.",
    )
    yield Figure(
        group,
        f"lost in {days} days",
        (1 - good) * run,
        "seconds",
        "of the whole job: saving, lost work and recovery.",
    )
    if facts.heartbeat:
        bare = dataclasses.replace(facts, heartbeat=0.0)
        yield Figure(
            group,
            "without heartbeats",
            bare.goodput(_interval(bare)[0]),
            "share",
            f"would be the goodput, with a save every {seconds(_interval(bare)[0])}; a larger "
            "Heartbeat(every_saves=...) comes nearer to it.",
        )


def _own(facts: Facts, best: float) -> Iterator[Figure]:
    """What the user's own interval costs."""
    asked, interval = facts.asked, facts.asked.interval_seconds
    if interval <= facts.cost:
        raise InvalidOption(
            f"interval_seconds must be longer than the {seconds(facts.cost)} that a save stops "
            f"training, got {interval!r}"
        )
    group = f"Your interval of {seconds(interval)}"
    days, run = number(asked.run_days), asked.run_days * DAY
    period = max(interval, facts.flush)  # a save waits for the one before
    between = run / (interval + facts.stall)
    why = (
        f"of training in {days} days: {number(run / period)} saves of {number(facts.stall)} s each"
    )
    if period == interval:
        why += f"; {seconds(between * facts.stall)} where the interval begins at the end of a save"
    yield Figure(group, "your saves", run / period * facts.stall, "seconds", f"{why}.")
    if facts.heartbeat:
        heartbeats = run / period * facts.heartbeat
        why = f"of training in {days} days, besides."
        yield Figure(group, "your heartbeats", heartbeats, "seconds", why)
    good = facts.goodput(interval)
    yield Figure(
        group,
        "your goodput",
        good,
        "share",
        f"{100 * (best - good):.2f} points less than at the interval above, "
        f"{seconds((best - good) * run)} in {days} days.",
    )
    waits = period - interval
    keeps = f"the flush of {seconds(facts.flush)} is longer" if waits else "the disk keeps up"
    yield Figure(group, "your wait per save", waits, "seconds", f"for the one before: {keeps}.")
    written = facts.size * DAY / period
    yield Figure(group, "written a day by yours", written, "bytes", f"{_rate(period)}.")


def _rate(interval: float) -> str:
    return f"{number(DAY / interval)} saves a day"


def _storage(facts: Facts, interval: float) -> Iterator[Figure]:
    asked, group = facts.asked, "Storage"
    day = facts.size * DAY / interval
    yield Figure(
        group, "written a day", day, "bytes", f"{_rate(interval)} of {nbytes(facts.size)}."
    )
    yield Figure(group, "written a month", 30 * day, "bytes", "in 30 days, whatever is kept of it.")
    if asked.keep_last is None and asked.keep_every_seconds is None:
        why = "more on the disk, since every step is kept; KeepLast(n) bounds it."
        yield Figure(group, "growth a month", 30 * day, "bytes", why)
        return
    heartbeat = asked.heartbeat_every_saves is not None
    held = (asked.keep_last or 1) + heartbeat + 1
    yield Figure(
        group,
        "held at most",
        held * facts.size,
        "bytes",
        f"{held} steps: {asked.keep_last or 1} kept, {'the newest heartbeat, ' if heartbeat else ''}"
        "and one that is being written.",
    )
    if asked.keep_every_seconds is not None:
        for_good = facts.size * 30 * DAY / max(asked.keep_every_seconds, interval)
        each = seconds(max(asked.keep_every_seconds, interval))
        yield Figure(
            group, "growth a month", for_good, "bytes", f"one step kept for good each {each}."
        )


def _warnings(facts: Facts, interval: float) -> Iterator[str]:
    asked = facts.asked
    if facts.flush >= facts.mtbf:
        yield (
            f"A flush of {seconds(facts.flush)} is longer than the {seconds(facts.mtbf)} between "
            "failures, so hardly any save becomes durable: write faster, or fewer bytes."
        )
    elif facts.goodput(interval) < 0.5:
        yield "More than half of the time is lost, whatever the interval."
    own = asked.interval_seconds
    if own is not None and own < facts.flush:
        yield (
            f"A save every {seconds(own)} waits {seconds(facts.flush - own)} for the one before, "
            f"since a flush takes {seconds(facts.flush)}."
        )
    if asked.undetected_seconds and asked.keep_last == 1:
        yield "With one step kept, no interval is safe from errors that show late: keep two or more."
    if asked.undetected_seconds and own is not None:
        bound = advice.shortest_for_detection(asked.undetected_seconds, asked.keep_last)
        if own < bound:
            yield (
                f"With a save every {seconds(own)} and {asked.keep_last} steps kept, no good step is "
                f"left when an error shows after {seconds(asked.undetected_seconds)}."
            )


def _answer(facts: Facts) -> Advice:
    interval, steps = _interval(facts)
    good = facts.goodput(interval)
    config, mode = _mode(facts)
    own = _own(facts, good) if facts.asked.interval_seconds is not None else ()
    figures = (
        *facts.figures,
        *_when(facts, interval, steps),
        *_costs(facts, interval),
        *own,
        *mode,
        *_storage(facts, interval),
    )
    return Advice(
        facts.mode, config, interval, steps, good, figures, tuple(_warnings(facts, interval))
    )
