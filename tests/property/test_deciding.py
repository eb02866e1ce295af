"""Retention, for any history and any policy, against a simple model."""

import dataclasses
import math

from hypothesis import given
from hypothesis import strategies as st

from ckptmgr import (
    Budget,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepEverySeconds,
    KeepHeartbeats,
    KeepLast,
    KeepLogSpaced,
    StepInfo,
)
from ckptmgr.core import cadence
from ckptmgr.core.retention import decide

METRICS = st.sampled_from([{}, {"loss": "?"}, {"loss": True}]) | st.floats(width=16).map(
    lambda value: {"loss": value}
)
SIZES = st.integers(0, 50)


@st.composite
def histories(draw):
    """Committed steps in the order in which they were saved; clocks and steps may go back."""
    numbers = draw(st.lists(st.integers(0, 2000), unique=True, max_size=14))
    return [
        StepInfo(
            step,
            draw(st.sampled_from(["async", "sync", "heartbeat", "preemption"])),
            "good",
            draw(st.floats(0, 1000)),
            1,
            metrics=draw(METRICS),
            pinned=draw(st.sampled_from([False, False, True])),
            verified=draw(st.booleans()),
            stored_bytes=draw(SIZES | st.none()),
            stored_files=draw(SIZES | st.none()),
        )
        for step in numbers
    ]


STABLE = (
    st.builds(KeepLast, st.integers(1, 5))
    | st.builds(KeepEvery, steps=st.integers(1, 300))
    | st.builds(KeepEverySeconds, st.floats(0.5, 500))
    | st.builds(KeepBest, st.integers(1, 4), st.just("loss"), st.sampled_from(["min", "max"]))
    | st.builds(KeepHeartbeats, st.integers(1, 3))
    | st.builds(KeepLogSpaced, st.integers(1, 6))
)
ONE = STABLE | st.just(KeepAll())
POLICIES = st.recursive(
    ONE, lambda found: st.builds(lambda a, b: a | b, found, found), max_leaves=4
)
BUDGETS = st.builds(
    lambda nbytes, files: Budget(bytes=nbytes, files=files) if nbytes or files else None,
    st.none() | st.integers(1, 200),
    st.none() | st.integers(1, 200),
)


def always(infos, saved, held):
    """What stays whatever the policy says, worked out by hand."""
    numbers = sorted(info.step for info in infos)
    stay = set(numbers[-1:]) | (set(held) & set(numbers)) | ({saved} & set(numbers))
    stay |= {info.step for info in infos if info.pinned}
    for chosen in (
        [info.step for info in infos if info.kind == "heartbeat"],
        [info.step for info in infos if info.verified],
    ):
        stay |= {max(chosen)} if chosen else set()
    return stay


@given(histories(), POLICIES, BUDGETS, st.data())
def test_every_step_is_kept_with_a_reason_or_dropped_and_what_must_stay_does(
    infos, policy, budget, data
):
    numbers = sorted(info.step for info in infos)
    saved = data.draw(st.none() | st.integers(0, 2000) | st.sampled_from(numbers or [0]))
    held = data.draw(st.sets(st.sampled_from(numbers or [0])))
    whole = policy if budget is None else policy & budget
    found = decide(infos, whole, 1000.0, saved, held, data.draw(st.integers(0, 2)))
    assert sorted([*found.keep, *found.drop]) == numbers
    assert list(found.drop) == sorted(found.drop)
    assert all(found.keep.values())
    assert always(infos, saved, held) <= found.keep.keys()
    assert found.given_up.keys() <= set(found.drop)
    if budget is None:
        assert not found.given_up


@given(histories(), POLICIES, BUDGETS.filter(bool), st.integers(0, 3))
def test_a_budget_is_kept_or_said_to_be_exceeded_by_what_must_stay(infos, policy, budget, flying):
    found = decide(infos, policy & budget, 0.0, in_flight=flying)
    sizes = {i.step: (i.stored_bytes or 0, i.stored_files or 0) for i in infos}
    if not infos:
        return
    newest = sizes[max(sizes)]
    for n, limit in enumerate((budget.bytes, budget.files)):
        if limit is None:
            continue
        used = sum(sizes[step][n] for step in found.keep) + flying * newest[n]
        if used > limit:
            assert found.keep.keys() == always(infos, None, ())
            assert any("exceeded" in text for text in found.warnings)
        elif used > 0.8 * limit:
            assert any("are used" in text for text in found.warnings)
    without = decide(infos, policy, 0.0)
    assert found.keep.keys() | found.given_up.keys() == without.keep.keys()


@given(histories(), POLICIES, POLICIES)
def test_either_keeps_what_one_of_both_keeps(infos, a, b):
    both = decide(infos, a | b, 0.0)
    assert both.keep.keys() == decide(infos, a, 0.0).keep.keys() | decide(infos, b, 0.0).keep.keys()


@given(histories(), st.integers(1, 30))
def test_keep_last_keeps_the_highest_numbers(infos, n):
    numbers = sorted(info.step for info in infos)
    assert set(numbers[-n:]) == KeepLast(n).reasons(sorted(infos, key=lambda i: i.step), 0).keys()


@given(histories(), st.integers(1, 5), st.sampled_from(["min", "max"]))
def test_keep_best_keeps_no_worse_step_and_only_numbers(infos, n, mode):
    ordered = sorted(infos, key=lambda info: info.step)
    kept = KeepBest(n, "loss", mode).reasons(ordered, 0.0)
    numbers = {
        i.step: i.metrics["loss"]
        for i in infos
        if type(i.metrics.get("loss")) is float and math.isfinite(i.metrics["loss"])
    }
    assert kept.keys() <= numbers.keys()
    assert len(kept) == min(n, len(numbers))
    sign = 1 if mode == "min" else -1
    for step in numbers.keys() - kept.keys():
        for better in kept:
            assert (sign * numbers[better], -better) < (sign * numbers[step], -step)


@given(histories(), STABLE)
def test_deciding_after_every_save_of_rising_steps_ends_as_deciding_once(infos, policy):
    plain = [dataclasses.replace(info, pinned=False, verified=False) for info in infos]
    ordered = sorted(plain, key=lambda info: info.step)
    there = []
    for info in ordered:
        there.append(info)
        dropped = decide(there, policy, 0.0, info.step).drop
        there = [one for one in there if one.step not in dropped]
    assert [info.step for info in there] == sorted(decide(ordered, policy, 0.0).keep)


@given(st.integers(0, 1000), st.none() | st.integers(1, 50), st.sets(st.integers(0, 1000)))
def test_a_step_is_due_when_it_is_a_multiple_or_named(step, every, at):
    wanted = step in at or (every is not None and step in range(0, 1001, every))
    assert cadence.due(step, every, at) == wanted
