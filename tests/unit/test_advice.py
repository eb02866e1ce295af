"""Advice with numbers: formulas, the schedule that learns, and the page, against figures by hand."""

import math

import numpy as np
import pytest

from ckptmgr import InvalidOption
from ckptmgr.core import advice, figures
from ckptmgr.core.advice import Adaptive, Measured, adapt

DAY = 86400.0


# -- formulas ---------------------------------------------------------------------------------


def test_young_is_the_root_of_twice_the_cost_times_the_time_between_failures():
    assert advice.young(50, 10_000) == 1000
    assert advice.young(0, 10_000) == 0


@pytest.mark.parametrize(("mtbf_minutes", "minutes"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_daly_gives_what_his_paper_says_for_dumps_of_five_minutes(mtbf_minutes, minutes):
    """The captions of figures 3, 4 and 5 of Daly 2006."""
    found = advice.daly(5 * 60, mtbf_minutes * 60) / 60
    assert found == pytest.approx(minutes, abs=0.5 if minutes > 10 else 0.05)


def test_daly_is_the_time_between_failures_where_a_save_takes_twice_that():
    assert advice.daly(200, 100) == 100
    assert advice.daly(1000, 100) == 100


def test_the_availability_optimum_is_the_formula_and_the_best_of_its_own_model():
    assert advice.availability_optimal(2, 40, 8) == 2 + math.sqrt(2 * 48 * 2 + 4) == 16

    def availability(interval):
        return (1 - 2 / interval) * 40 / (40 + 8 + interval / 2)

    assert all(availability(16) > availability(16 + off) for off in (-1, -0.1, 0.1, 1))


def test_the_availability_optimum_does_not_fall_with_the_time_between_failures_for_ever():
    """A slow recovery bounds it: 2 + sqrt(2 * 900 * 2 + 4)."""
    assert advice.availability_optimal(2, 1e-9, 900) == pytest.approx(62.03, abs=0.01)
    assert advice.young(2, 1e-9) < 1e-3


def test_errors_that_show_late_bound_the_interval_by_the_steps_that_are_kept():
    assert advice.shortest_for_detection(7200, 2) == 7200
    assert advice.shortest_for_detection(7200, 4) == 2400
    assert advice.shortest_for_detection(7200, 1) == 7200
    assert advice.shortest_for_detection(7200, None) == 0
    assert advice.availability_optimal(2, 40, 8, undetected=7200, kept=3) == 3600


def test_goodput_of_synchronous_saves_is_daly_s_cost_function_upside_down():
    work, save, restart, mtbf = 900, 100, 300, 5000
    daly = mtbf * math.exp(restart / mtbf) * math.expm1((work + save) / mtbf) / work
    assert advice.goodput(work + save, save, save, restart, mtbf) == pytest.approx(1 / daly)


def test_goodput_without_failures_is_what_saving_leaves():
    assert advice.goodput(600, 45, 45, 600, math.inf) == 555 / 600
    assert advice.goodput(100, 1, 250, 600, math.inf) == 99 / 250  # each waits for the one before


def test_goodput_in_numbers():
    """w = 90, P = 100, f = 40, R = 50, M = 1000: 90 e^-0.18 / (1000 (1 - e^-0.1))."""
    assert advice.goodput(100, 10, 40, 50, 1000) == pytest.approx(0.789957, abs=1e-6)


def test_lost_work_is_half_an_interval_and_the_flush_less_the_stall():
    assert advice.lost_per_failure(600, 45, 45, 1e9) == pytest.approx(300, abs=0.1)
    assert advice.lost_per_failure(600, 1, 250, 1e9) == pytest.approx(549, abs=0.1)
    assert advice.lost_per_failure(600, 1, 250, math.inf) == 549
    assert advice.lost_per_failure(5000, 45, 45, 1000) < 1000  # failures come sooner than that


def test_the_best_interval_is_where_its_equation_says_and_within_its_bounds():
    best = advice.best_interval(250, 250, 850, 11_124)
    u, c = (best - 250) / 11_124, 250 / 11_124
    assert u == pytest.approx(1 - math.exp(-(u + c)), abs=1e-12)
    assert best == pytest.approx(2444.75, abs=0.01)
    assert best == pytest.approx(advice.daly(250, 11_124) + 250, rel=1e-3)
    assert advice.best_interval(250, 3000, 850, 11_124) == 3000
    assert advice.best_interval(250, 250, 850, 11_124, lower=2600) == 2600
    assert advice.best_interval(250, 3000, 850, 11_124, upper=900) == 900
    assert advice.best_interval(0, 30, 850, 11_124) == 30
    assert advice.best_interval(1, 30, 850, math.inf, upper=7200) == 7200


def test_an_interval_for_an_overhead():
    assert advice.interval_for_overhead(45, 0.02) == 2250


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: advice.young(-1, 10), "stall must be a number of at least 0, got -1"),
        (lambda: advice.young(1, 0), "mtbf must be a positive number, got 0"),
        (lambda: advice.daly(1, math.nan), "mtbf must be a positive number, got nan"),
        (lambda: advice.daly(1, "day"), "mtbf must be a positive number, got 'day'"),
        (
            lambda: advice.availability_optimal(1, 10, None),
            "restore must be a number of at least 0",
        ),
        (
            lambda: advice.goodput(45, 45, 45, 0, 10),
            "interval must be longer than the stall of 45 s",
        ),
        (lambda: advice.goodput(45, 1, 45, 0, True), "mtbf must be a positive number, got True"),
        (lambda: advice.best_interval(1, 1, 1, 10**400), "mtbf must be a positive number"),
        (lambda: advice.best_interval(1, 1, 1, 10, upper=0), "upper must be a positive number"),
        (lambda: advice.interval_for_overhead(1, 1), "max_overhead must be less than 1, got 1"),
    ],
)
def test_a_formula_refuses_what_is_no_time(call, message):
    with pytest.raises(InvalidOption) as caught:
        call()
    assert str(caught.value).startswith(message)


# -- the schedule that learns -----------------------------------------------------------------


def measured(**changes):
    return Measured(**{"saves": 9, "stall_seconds": 1.0, "flush_seconds": 50.0, **changes})


def test_without_a_measurement_the_interval_stays_or_is_the_shortest():
    assert adapt(Adaptive(), Measured(), None) == (60, "60 s: nothing is measured yet")
    assert adapt(Adaptive(), Measured(), 900.0)[0] == 900
    assert adapt(Adaptive(), Measured(failures=3), 1e9)[0] == 4 * 3600


def test_as_long_as_no_failure_is_known_saving_takes_what_it_may():
    """Young's interval for the assumed time between failures is stall / max_overhead."""
    adaptive = Adaptive(max_overhead=0.02)
    found = measured(stall_seconds=10.0)
    assert advice.expected_mtbf(adaptive, found) == pytest.approx(10 / (2 * 0.02**2))
    seconds, _ = adapt(adaptive, found, None)
    assert seconds == pytest.approx(10 / 0.02, rel=0.01)


def test_time_without_failures_makes_it_longer_and_failures_make_it_shorter():
    def interval(**changes):
        return adapt(Adaptive(), measured(stall_seconds=10.0, **changes), None)[0]

    assert interval() < interval(running_seconds=DAY) < interval(running_seconds=5 * DAY)
    one = interval(running_seconds=DAY, failures=1)
    assert interval(running_seconds=DAY) > one > interval(running_seconds=DAY, failures=9)


def test_what_was_given_counts_as_four_failures():
    adaptive = Adaptive(mean_seconds_between_failures=10_000)
    assert advice.expected_mtbf(adaptive, Measured()) == 10_000
    seen = Measured(running_seconds=40_000, failures=16)  # a quarter of that
    assert advice.expected_mtbf(adaptive, seen) == 4000


# What was measured, the interval up to now, and the new one with its reason. By hand, for the first:
# (36000 + 10 / 0.0008 / 2) / 4.5 = 9389 s between failures, sqrt(2 x 10 x 9389) + 10 / 3 = 436.7.
CASES = [
    (
        measured(stall_seconds=10.0, running_seconds=36_000.0, failures=4, flush_seconds=20.0),
        100.0,
        "437 s instead of 100 s: a save stops training for 10 s, and a failure is expected every "
        "2.61 h (4 failures in 10.0 h); saving takes 2.3%, more than max_overhead, and less would "
        "lose more",
    ),
    (
        measured(stall_seconds=0.1, running_seconds=36_000.0, failures=2),
        None,
        "60 s: a save stops training for 0.1 s, and a failure is expected every 4.01 h "
        "(2 failures in 10.0 h); shortest_seconds allows no less",
    ),
    (
        measured(stall_seconds=0.1, flush_seconds=250.0, running_seconds=36_000.0, failures=1),
        60.0,
        "275 s instead of 60 s: a save stops training for 0.1 s, and a failure is expected every "
        "6.68 h (1 failure in 10.0 h); more often, saves of 250 s would wait for one another",
    ),
    (
        measured(flush_seconds=20_000.0, running_seconds=36_000.0, failures=0),
        60.0,
        "14400 s instead of 60 s: a save stops training for 1 s, and a failure is expected every "
        "20.3 h (0 failures in 10.0 h); longest_seconds allows no more, and saves of 20000 s wait "
        "for one another",
    ),
    (
        measured(stall_seconds=2.0, running_seconds=360_000.0, failures=2),
        None,
        "761 s: a save stops training for 2 s, and a failure is expected every 40.1 h "
        "(2 failures in 100.0 h)",
    ),
]


@pytest.mark.parametrize(("found", "current", "reason"), CASES)
def test_each_change_says_its_reason(found, current, reason):
    seconds, why = adapt(Adaptive(), found, current)
    assert why == reason
    assert f"{seconds:.0f} s" == reason[: reason.index(" s") + 2]


def test_a_change_by_less_than_a_tenth_is_not_made():
    found = measured(stall_seconds=2.0, running_seconds=360_000.0, failures=2)
    best, _ = adapt(Adaptive(), found, None)
    assert adapt(Adaptive(), found, best * 1.05) == (
        best * 1.05,
        f"{best * 1.05:.0f} s as before: {best:.0f} s would be much the same",
    )
    assert adapt(Adaptive(), found, best * 1.2)[0] == best
    assert adapt(Adaptive(longest_seconds=best / 1.01), found, best)[0] == best / 1.01


def test_measured_means_forget_what_is_long_ago():
    found = Measured()
    for flush in (10.0, 20.0, 30.0):
        found = found.saved(flush / 10, flush)
    assert (found.saves, found.stall_seconds, found.flush_seconds) == (3, 2.0, 20.0)
    assert found.flush_spread == pytest.approx(np.std([10, 20, 30]))
    for _ in range(150):
        found = found.saved(8.0, 80.0)
    assert found.flush_seconds == pytest.approx(80, rel=0.01)
    assert found.flush_spread == pytest.approx(0, abs=1.0)


def test_a_flush_that_varies_leaves_more_room():
    steady, varied = Measured(), Measured()
    for n in range(20):
        steady = steady.saved(0.1, 200.0)
        varied = varied.saved(0.1, 100.0 if n % 2 else 300.0)
    assert steady.shortest_seconds == pytest.approx(220)
    assert varied.shortest_seconds == pytest.approx(200 + 2 * 100)
    assert adapt(Adaptive(), steady, None)[0] == pytest.approx(220)
    assert adapt(Adaptive(), varied, None)[0] == pytest.approx(400)


def test_heartbeats_count_with_their_share():
    found = Measured(heartbeat_every=10).saved(1.0, 50.0)
    assert found.cost_seconds == 1 + (100 - 1) / 10  # not seen yet: written and read back
    found = found.saved(71.0, 71.0, heartbeat=True)
    assert (found.saves, found.flush_seconds) == (1, 50)
    assert found.cost_seconds == 1 + (71 - 1) / 10
    every = Measured(heartbeat_every=1).saved(71.0, 71.0, heartbeat=True)
    assert every.cost_seconds == 71
    assert adapt(Adaptive(), every, None)[0] == pytest.approx(71 / 0.02, rel=0.02)


def test_times_that_no_clock_can_have_measured_are_passed_over():
    found = Measured().saved(1.0, 50.0)
    for stall, flush in ((-1.0, 50.0), (1.0, math.inf), (math.nan, 50.0), (1.0, 1e200)):
        assert found.saved(stall, flush) == found
    for seconds in (-5.0, math.nan, math.inf):
        assert found.ran(seconds).running_seconds == 0
    assert found.ran(5.0).ran(7.0, failed=True) == measured_after(found, 12.0, 1)


def measured_after(found, seconds, failures):
    return Measured(
        saves=found.saves,
        stall_seconds=found.stall_seconds,
        flush_seconds=found.flush_seconds,
        running_seconds=seconds,
        failures=failures,
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_overhead": 0}, "Adaptive.max_overhead must be a positive number, got 0"),
        ({"max_overhead": 2}, "Adaptive.max_overhead must be less than 1, got 2"),
        ({"shortest_seconds": -1}, "Adaptive.shortest_seconds must be a positive number"),
        ({"longest_seconds": math.inf}, "Adaptive.longest_seconds must be a positive number"),
        ({"longest_seconds": 30}, "Adaptive.longest_seconds must not be less than shortest"),
        (
            {"mean_seconds_between_failures": "3 h"},
            "Adaptive.mean_seconds_between_failures must be a positive number, got '3 h'",
        ),
    ],
)
def test_adaptive_refuses_what_cannot_be(given, message):
    with pytest.raises(InvalidOption) as caught:
        Adaptive(**given)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"saves": "3"}, "Measured.saves must be a number of at least 0, got '3'"),
        ({"running_seconds": -1.0}, "Measured.running_seconds must be a number of at least 0"),
        ({"flush_seconds": math.nan}, "Measured.flush_seconds must be a number of at least 0"),
        ({"heartbeat_every": 0}, "Measured.heartbeat_every must be at least 1, got 0"),
    ],
)
def test_a_record_that_cannot_be_is_found_when_it_is_read(given, message):
    with pytest.raises(InvalidOption) as caught:
        Measured(**given)
    assert str(caught.value).startswith(message)


# -- how figures read -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (0.0957, "0.0957 s"),
        (245, "245 s"),
        (599.4, "599 s"),
        (600, "10 min"),
        (7199, "120 min"),
        (7200, "2 h"),
        (2 * DAY, "2 d"),
        (194_400, "2.25 d"),
        (400 * DAY, "400 d"),
    ],
)
def test_times_read_in_the_unit_that_suits(value, text):
    assert figures.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1e3, "1 kB"),
        (2.45e12, "2.45 TB"),
        (6e13, "60 TB"),
        (3e21, "3,000 EB"),
    ],
)
def test_sizes_read_in_the_unit_that_suits(value, text):
    assert figures.nbytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (175e9, "175e9"),
        (1.5e9, "1.5e9"),
        (4320, "4,320"),
        (14.55, "14.6"),
        (100, "100"),
        (1e-5, "0.00001"),
    ],
)
def test_counts_read_with_three_digits(value, text):
    assert figures.count(value) == text
