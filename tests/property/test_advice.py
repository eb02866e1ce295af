"""Intervals and goodput, for any job."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr import advise
from ckptmgr.core import advice
from ckptmgr.core.advice import Adaptive, Measured, adapt
from ckptmgr.core.figures import nbytes, seconds

STALLS = st.floats(1e-3, 1e3)
FLUSHES = st.floats(0.0, 1e4)
MTBFS = st.floats(60.0, 1e8)
TIMES = st.floats(0.0, 1e7)
MEASURED = st.builds(
    Measured,
    saves=st.integers(0, 1000),
    stall_seconds=st.floats(0, 1e4),
    flush_seconds=st.floats(0, 1e5),
    flush_spread=st.floats(0, 1e4),
    heartbeat_every=st.none() | st.integers(1, 1000),
    heartbeats=st.integers(0, 10),
    heartbeat_seconds=st.floats(0, 1e5),
    running_seconds=TIMES,
    failures=st.integers(0, 1000),
)
ADAPTIVES = st.builds(
    lambda overhead, low, more, mtbf: Adaptive(
        max_overhead=overhead,
        shortest_seconds=low,
        longest_seconds=low + more,
        mean_seconds_between_failures=mtbf,
    ),
    st.floats(1e-4, 0.9),
    st.floats(1, 1e4),
    st.floats(0, 1e5),
    st.none() | MTBFS,
)


@given(STALLS, MTBFS, st.floats(1.01, 100), TIMES)
def test_the_less_time_between_failures_the_shorter_is_every_interval(stall, mtbf, times, restore):
    assert advice.young(stall, mtbf) < advice.young(stall, times * mtbf)
    assert advice.daly(stall, mtbf) < advice.daly(stall, times * mtbf) or stall > mtbf
    longer = advice.availability_optimal(stall, times * mtbf, restore)
    assert advice.availability_optimal(stall, mtbf, restore) <= longer
    longer = advice.best_interval(stall, 0, restore, times * mtbf)
    assert advice.best_interval(stall, 0, restore, mtbf) < longer


@given(STALLS, st.floats(1.01, 100), MTBFS)
def test_the_more_a_save_costs_the_longer_is_every_interval(stall, times, mtbf):
    assert advice.young(stall, mtbf) < advice.young(times * stall, mtbf)
    longer = advice.best_interval(times * stall, 0, 0, mtbf)
    assert advice.best_interval(stall, 0, 0, mtbf) < longer


@given(st.floats(1.001, 1e4), STALLS, FLUSHES, TIMES, MTBFS | st.just(math.inf))
def test_goodput_lies_between_nothing_and_all(times, stall, flush, restore, mtbf):
    assert 0 <= advice.goodput(times * stall, stall, flush, restore, mtbf) <= 1


@given(st.floats(1.001, 1e4), STALLS, FLUSHES, st.floats(0, 1e4), st.floats(1e4, 1e8))
def test_failures_and_their_recovery_cost_goodput(times, stall, flush, restore, mtbf):
    interval = times * stall
    found = advice.goodput(interval, stall, flush, restore, mtbf)
    assert found <= advice.goodput(interval, stall, flush, restore, 2 * mtbf)
    assert found <= advice.goodput(interval, stall, flush, restore / 2, mtbf)
    assert found <= advice.goodput(interval, stall, flush / 2, restore, mtbf)
    assert found <= advice.goodput(interval, stall, flush, restore, math.inf) * (1 + 1e-12)


@given(st.floats(1.001, 1e4), STALLS, FLUSHES, MTBFS)
def test_no_more_is_lost_to_a_failure_than_the_time_up_to_it(times, stall, flush, mtbf):
    lost = advice.lost_per_failure(times * stall, stall, flush, mtbf)
    assert -1e-9 * mtbf <= lost <= mtbf * (1 + 1e-9)


@given(STALLS, FLUSHES, st.floats(0, 1e4), st.floats(1e3, 1e8), st.floats(0, 1e4))
def test_no_interval_of_a_grid_has_more_goodput_than_the_best(stall, flush, restore, mtbf, lower):
    best = advice.best_interval(stall, flush, restore, mtbf, lower=lower)
    most = advice.goodput(best, stall, flush, restore, mtbf)
    for power in range(-40, 41):
        interval = best * 1.1**power
        if interval > stall and interval >= lower:
            other = advice.goodput(interval, stall, flush, restore, mtbf)
            assert other <= most * (1 + 1e-9)


@given(STALLS, MTBFS)
def test_young_daly_and_the_best_agree_where_a_save_is_short(stall, mtbf):
    best = advice.best_interval(stall, 0, 0, mtbf) - stall
    part = math.sqrt(stall / (2 * mtbf))
    if part < 0.1:
        assert advice.young(stall, mtbf) == pytest.approx(best, rel=part)
        assert advice.daly(stall, mtbf) == pytest.approx(best, rel=part**2 + 1e-8)


@given(STALLS, FLUSHES, TIMES, MTBFS, st.floats(1e-3, 1e3))
def test_the_unit_of_time_does_not_matter(stall, flush, restore, mtbf, unit):
    """All times in another unit: intervals are in it too, and goodput is the same."""
    other = [unit * value for value in (stall, flush, restore, mtbf)]
    for formula in (advice.young, advice.daly):
        assert formula(other[0], other[3]) == pytest.approx(unit * formula(stall, mtbf), rel=1e-6)
    best = advice.best_interval(stall, flush, restore, mtbf)
    assert advice.best_interval(*other) == pytest.approx(unit * best, rel=1e-6)
    found = advice.goodput(unit * 2 * best, *other)
    assert found == pytest.approx(advice.goodput(2 * best, stall, flush, restore, mtbf), rel=1e-6)


@given(ADAPTIVES, MEASURED, st.none() | st.floats(1e-3, 1e9))
def test_adapt_stays_within_its_bounds_and_says_why(adaptive, measured, current):
    interval, reason = adapt(adaptive, measured, current)
    assert adaptive.shortest_seconds <= interval <= adaptive.longest_seconds
    assert reason.startswith(f"{interval:.0f} s")
    assert "\n" not in reason
    again, _ = adapt(adaptive, measured, interval)
    assert again == interval  # nothing new, no change


@given(ADAPTIVES, MEASURED, st.integers(1, 100))
def test_more_failures_never_make_the_interval_longer(adaptive, measured, more):
    worse = measured
    for _ in range(more):
        worse = worse.ran(0.0, failed=True)
    assert adapt(adaptive, worse, None)[0] <= adapt(adaptive, measured, None)[0] * (1 + 1e-9)
    longer = measured.ran(1e6)
    assert adapt(adaptive, longer, None)[0] >= adapt(adaptive, measured, None)[0] * (1 - 1e-9)


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e5)), min_size=1, max_size=60))
def test_measured_means_lie_among_what_was_measured(saves):
    found = Measured()
    for stall, flush in saves:
        found = found.saved(stall, flush)
    stalls, flushes = zip(*saves, strict=True)
    assert min(stalls) - 1e-6 <= found.stall_seconds <= max(stalls) + 1e-6
    assert min(flushes) - 1e-6 <= found.flush_seconds <= max(flushes) + 1e-6
    assert 0 <= found.flush_spread <= max(flushes) - min(flushes) + 1e-6


@given(
    st.integers(1, 10**6),
    st.floats(1e6, 1e15),
    st.floats(1e6, 1e13),
    st.none() | st.floats(0.01, 1e4),
    st.sampled_from([None, "sync", "copy_on_write", "double_buffer"]),
    st.none() | st.integers(1, 1000),
    st.none() | st.integers(1, 100),
)
def test_any_job_gets_an_advice(accelerators, size, rate, step, mode, heartbeat, kept):
    found = advise(
        accelerators=accelerators,
        state_bytes=size,
        write_bytes_per_second=rate,
        step_seconds=step,
        mode=mode,
        heartbeat_every_saves=heartbeat,
        keep_last=kept,
    )
    assert 0 <= found.goodput <= 1
    assert found.interval_seconds >= found["flush"].value
    assert math.isfinite(found.interval_seconds)
    assert "nan" not in str(found) and "inf" not in str(found)
    assert (found.interval_steps is None) == (step is None)


@given(st.floats(1e-3, 1e12))
def test_a_size_or_time_as_text_is_the_value_to_three_digits(value):
    units = {"s": 1, "min": 60, "h": 3600, "d": 86400}
    units |= {f"{k}B": 1000**n for n, k in enumerate(["", "k", "M", "G", "T", "P", "E"])}
    for text in (seconds(value), nbytes(value)):
        number, unit = text.replace(",", "").split()
        assert float(number) * units[unit] == pytest.approx(value, rel=0.006)
