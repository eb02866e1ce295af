"""The simulator of `benchmarks/goodput.py`, on failures at moments that are worked out by hand."""

import itertools
import statistics

import pytest

from benchmarks.goodput_model import DAY, Draws, Job, Learner, Outcome, draw, simulate
from ckptmgr.core import advice
from ckptmgr.core.advice import Adaptive

SIZE = 0.85 * 25e9
# A flush and a read take 50 s; ordering and copying 0.15 + 0.85 = 1 s; noticing and starting 80 s.
FIFTY = {"size": SIZE, "write": SIZE / 50, "read": SIZE / 50, "detect_and_restart": 80.0}


def job(seconds, **changes):
    return Job(
        **{"accelerators": 1, **FIFTY, "heartbeat_every": None, "seconds": seconds, **changes}
    )


def run(mode, interval, *failures, seconds, **changes):
    return simulate(job(seconds, **changes), mode, Draws.steady(failures), interval)


def test_synchronous_saves_stop_training():
    """150 s of training, then saves at 150, 300, ... 900, each 50 s; 50 s more, and a last save."""
    assert run("sync", 150, seconds=1000) == Outcome(
        counted=700, total=1050, stalled=300, saves=6, last_interval=150
    )


def test_other_saves_stop_it_while_the_copies_are_ordered():
    """Saves at 100 and 201; the end at 250, with four more steps; the last save waits for none."""
    for mode in ("copy_on_write", "double_buffer"):
        found = run(mode, 100, seconds=250)
        assert (found.counted, found.total) == (240, 251 + 50)
        assert (found.stalled, found.waited, found.saves) == (2, 0, 2)


@pytest.mark.parametrize(("failure", "kept"), [(250, 100), (251, 200)])
def test_a_save_in_flight_is_lost_with_a_failure(failure, kept):
    """The save called at 201 is durable at 251. It goes on after 80 + 50 s and stops at 500, one
    save later: 11 steps more."""
    found = run("copy_on_write", 100, failure, seconds=500)
    assert found.counted == kept + 110
    assert (found.failures, found.recovering) == (1, 130)
    assert found.total == failure + 130 + 100 + 50 + 50


def test_a_synchronous_save_that_a_failure_cuts_is_lost():
    assert run("sync", 150, 199, seconds=330).counted == 0
    assert run("sync", 150, 200, seconds=330).counted == 150


def test_a_flush_longer_than_the_interval_makes_the_next_save_wait():
    """Calls at 20, 41, 91: one in flight makes them wait for 70 and 120."""
    found = run("copy_on_write", 20, seconds=100)
    assert (found.saves, found.waited, found.counted, found.total) == (3, 29 + 29, 60, 170)
    # Two in flight: calls at 20, 41, 62, 91; the third waits for 70, the fourth for 120.
    found = run("double_buffer", 20, seconds=100)
    assert (found.saves, found.waited, found.counted, found.total) == (4, 8 + 29, 80, 220)


def test_a_heartbeat_waits_is_written_and_is_read_back():
    found = run("copy_on_write", 100, seconds=305, heartbeat_every=2)
    assert (found.saves, found.stalled) == (2, 1 + 50 + 50)
    found = run("double_buffer", 20, seconds=100, heartbeat_every=2)
    # The heartbeat, called at 41, waits for the save of 20 until 70.
    assert (found.saves, found.waited, found.stalled) == (2, 29, 1 + 29 + 100)


def test_a_failure_in_the_recovery_begins_it_anew():
    found = run("sync", 150, 100, 150, seconds=1000)
    assert (found.failures, found.recovering) == (2, 50 + 130)


def test_a_failure_in_the_last_save_takes_back_what_is_not_durable():
    found = run("sync", 150, 1020, seconds=1000)
    assert (found.counted, found.total, found.failures) == (650, 1020, 1)


def test_a_run_that_ends_in_a_recovery_has_what_was_durable():
    found = run("sync", 150, 900, seconds=1000)
    assert (found.counted, found.total) == (550, 1000)


def test_storage_that_becomes_slower():
    found = run("sync", 150, seconds=1000, slower_after=500.0, slower=2.0)
    assert found.stalled == 3 * 50 + 3 * 100  # at 150, 300, 450; at 600, 750, 900


# -- against the formula, and the draws -----------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "interval"),
    [("sync", 1000), ("sync", 4000), ("copy_on_write", 300), ("double_buffer", 1000)],
)
def test_the_simulation_and_the_formula_give_the_same_goodput(mode, interval):
    """6,000 random failures, 20,000 s apart, hit saves and recoveries too; nothing else varies."""
    per_day = DAY / (1024 * 20_000)
    long = Job(
        1024,
        size=2.45e12,
        write=10e9,
        read=10e9,
        step=1.0,
        heartbeat_every=None,
        seconds=1400 * DAY,
        per_accelerator_day=per_day,
    )
    failures = draw(long, "exponential", 7).failures
    found = simulate(long, mode, Draws.steady(failures), interval)
    assert found.failures > 5000
    wanted = advice.goodput(interval, long.stall(mode), long.flush, long.recovery, long.mtbf)
    assert found.goodput == pytest.approx(wanted, rel=0.01)


def spread(values):
    return statistics.pstdev(values) / statistics.fmean(values)


def test_failures_are_drawn_from_the_distribution_that_was_asked_for():
    long = job(20_000 * DAY, per_accelerator_day=1.0)
    gaps = {}
    for name in ("exponential", "weibull", "trace"):
        moments = draw(long, name, 3).failures
        gaps[name] = [b - a for a, b in itertools.pairwise(moments)]
        assert moments[-1] > long.seconds
        assert statistics.fmean(gaps[name]) == pytest.approx(DAY, rel=0.03)
    assert spread(gaps["exponential"]) == pytest.approx(1, rel=0.05)
    assert spread(gaps["weibull"]) == pytest.approx(1.46, rel=0.05)  # of shape 0.7
    once = draw(long, "trace", 3, [1.0, 2.0, 3.0])
    assert sorted(once.failures[:3]) in ([DAY / 2 * n for n in g] for g in ORDERS)


ORDERS = ((1, 3, 6), (2, 5, 6), (3, 4, 6))  # where a trace of gaps 1, 2, 3 may begin


def test_draws_are_those_of_their_seed_and_factors_have_the_mean_one():
    found = draw(job(DAY), "weibull", 5)
    assert found == draw(job(DAY), "weibull", 5)
    assert found != draw(job(DAY), "weibull", 6)
    for factors in (found.flush, found.stall, found.recovery):
        assert statistics.fmean(factors) == pytest.approx(1, rel=0.03)
    assert max(found.flush) > 2.5 > 1.7 > max(found.stall)


# -- the adaptive schedule ------------------------------------------------------------------------


def test_what_was_learned_goes_back_with_the_state_but_the_failure_counts():
    """The record of the newest durable save has the measurements of the saves before it."""
    learner = Learner(Adaptive(shortest_seconds=100, longest_seconds=100), job(DAY))
    simulate(job(700), "copy_on_write", Draws.steady([360.0]), 0.0, learner)
    # Saves at 100, 201, 302, durable at 150, 251, 352; after 130 s of recovery saves at 590 and 691.
    assert learner.measured.failures == 1
    assert learner.measured.saves == 3  # of 100, 201, 590: a save has those before it on record
    assert learner.measured.flush_seconds == 50
    assert learner.measured.stall_seconds == pytest.approx(1)
    assert learner.measured.running_seconds == pytest.approx(303 + (692 - 490))
    assert learner.interval == 100


def test_the_adaptive_schedule_is_near_the_best_fixed_interval():
    """One scenario at its full size; `benchmarks/goodput.py` has them all."""
    large = Job(16384, size=14e12, write=50e9, read=100e9, step=15.0)
    for mode in ("sync", "double_buffer"):
        runs = [draw(large, "exponential", seed) for seed in range(3)]

        def fixed(interval, runs=runs, mode=mode):
            return statistics.fmean(simulate(large, mode, each, interval).goodput for each in runs)

        best = max(fixed(300 * 1.4**n) for n in range(9))
        learned = [simulate(large, mode, d, 0.0, Learner(Adaptive(), large)) for d in runs]
        assert statistics.fmean(out.goodput for out in learned) > 0.98 * best
        assert fixed(60 * 3600.0) < 0.8 * best  # so that the bound means something
