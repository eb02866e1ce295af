"""Retention policies: what stays, and why."""

from typing import NamedTuple

import pytest

from ckptmgr import InvalidOption, KeepAll, KeepLast
from ckptmgr.core.retention import Decision, Policy, decide


class Step(NamedTuple):
    step: int
    kind: str = "async"
    created: float | None = 0.0
    metrics: dict = {}
    pinned: bool = False
    verified: bool = False
    stored_bytes: int | None = None
    stored_files: int | None = None


def steps(*numbers):
    return [Step(number) for number in numbers]


def test_keep_last_says_why_and_drops_the_lowest_first():
    found = decide(steps(3, 1, 2, 10, 9), KeepLast(2), 0.0)
    assert found == Decision({9: "last 2", 10: "last 2"}, (1, 2, 3))


def test_steps_compare_as_numbers_and_not_as_text():
    assert decide(steps(9, 10, 100), KeepLast(1), 0.0).drop == (9, 10)


def test_keep_all_drops_nothing():
    assert decide(steps(1, 2), KeepAll(), 0.0) == Decision(
        {1: "all are kept", 2: "all are kept"}, ()
    )


def test_without_steps_there_is_nothing_to_decide():
    assert decide([], KeepLast(1), 0.0, just_saved=5) == Decision({}, ())


class KeepNothing(Policy):
    def reasons(self, infos, now):
        return {}


def test_the_newest_step_stays_whatever_the_policy_says():
    assert decide(steps(1, 7, 3), KeepNothing(), 0.0) == Decision({7: "newest"}, (1, 3))


def test_the_step_just_saved_stays_even_below_others():
    found = decide(steps(100, 200, 5), KeepLast(1), 0.0, just_saved=5)
    assert found == Decision({5: "just saved", 200: "last 1"}, (100,))


def test_a_step_just_saved_that_is_not_there_is_not_invented():
    assert decide(steps(1), KeepNothing(), 0.0, just_saved=5).keep == {1: "newest"}


class KeepMultiples(Policy):
    def __init__(self, of):
        self.of = of

    def reasons(self, infos, now):
        return {i.step: f"multiple of {self.of}" for i in infos if i.step % self.of == 0}


def test_either_keeps_the_union_with_all_reasons():
    found = decide(steps(1, 2, 3, 4), KeepMultiples(2) | KeepLast(1), 0.0)
    assert found.keep == {2: "multiple of 2", 4: "multiple of 2; last 1"}
    assert found.drop == (1, 3)


def test_either_of_three_is_one_policy():
    found = decide(steps(*range(10)), KeepLast(1) | KeepMultiples(4) | KeepMultiples(3), 0.0)
    assert found.drop == (1, 2, 5, 7)
    assert decide(steps(1, 2), KeepLast(1) | KeepAll(), 0.0).drop == ()


def test_a_policy_joins_with_policies_only():
    with pytest.raises(TypeError):
        KeepLast(1) | 5


@pytest.mark.parametrize("n", [0, -1, True, 1.0, "3", None])
def test_keep_last_refuses_a_bad_number(n):
    with pytest.raises(InvalidOption, match=r"KeepLast\(n\) needs a whole number of at least 1"):
        KeepLast(n)


def test_keep_last_zero_says_how_to_keep_all():
    with pytest.raises(InvalidOption, match="to keep every step leave Options.retention out"):
        KeepLast(0)
