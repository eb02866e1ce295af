"""Retention, for any list of steps and any policy."""

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.core import cadence
from ckptmgr.core.retention import KeepAll, KeepLast, decide


class Step(NamedTuple):
    step: int
    kind: str = "async"


STEPS = st.lists(st.integers(0, 10**6), unique=True, max_size=20).map(
    lambda found: [Step(n) for n in found]
)
POLICIES = st.recursive(
    st.builds(KeepLast, st.integers(1, 5)) | st.just(KeepAll()),
    lambda found: st.builds(lambda a, b: a | b, found, found),
    max_leaves=4,
)


@given(STEPS, POLICIES, st.none() | st.integers(0, 10**6))
def test_every_step_is_kept_with_a_reason_or_dropped_and_the_newest_stays(infos, policy, saved):
    found = decide(infos, policy, 0.0, saved)
    numbers = sorted(info.step for info in infos)
    assert sorted([*found.keep, *found.drop]) == numbers
    assert list(found.drop) == sorted(found.drop)
    assert all(found.keep.values())
    if numbers:
        assert numbers[-1] in found.keep
    assert saved not in found.drop


@given(STEPS, POLICIES, POLICIES)
def test_either_keeps_what_one_of_both_keeps(infos, a, b):
    both = decide(infos, a | b, 0.0)
    assert both.keep.keys() == decide(infos, a, 0.0).keep.keys() | decide(infos, b, 0.0).keep.keys()


@given(STEPS, st.integers(1, 30))
def test_keep_last_keeps_the_highest_numbers(infos, n):
    numbers = sorted(info.step for info in infos)
    assert decide(infos, KeepLast(n), 0.0).drop == tuple(numbers[:-n])


@given(st.integers(0, 1000), st.none() | st.integers(1, 50), st.sets(st.integers(0, 1000)))
def test_a_step_is_due_when_it_is_a_multiple_or_named(step, every, at):
    wanted = step in at or (every is not None and step in range(0, 1001, every))
    assert cadence.due(step, every, at) == wanted
