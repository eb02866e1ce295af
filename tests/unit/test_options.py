"""Options: frozen values that check themselves when they are made."""

import dataclasses

import numpy as np
import pytest

import ckptmgr
from ckptmgr import (
    Coordination,
    Heartbeat,
    Integrity,
    InvalidOption,
    KeepLast,
    LeafRule,
    Options,
    Restore,
    Schedule,
    Snapshot,
    Storage,
)

BAD = [
    (Schedule, {"every_steps": 0}, "Schedule.every_steps"),
    (Schedule, {"every_steps": -5}, "Schedule.every_steps"),
    (Schedule, {"every_steps": 2.5}, "Schedule.every_steps"),
    (Schedule, {"every_steps": True}, "Schedule.every_steps"),
    (Schedule, {"every_steps": "10"}, "Schedule.every_steps"),
    (Schedule, {"at_steps": 5}, "Schedule.at_steps"),
    (Schedule, {"at_steps": ["5"]}, "Schedule.at_steps"),
    (Snapshot, {"mode": "async"}, "Snapshot.mode"),
    (Snapshot, {"mode": None}, "Snapshot.mode"),
    (Snapshot, {"when_busy": "drop"}, "Snapshot.when_busy"),
    (LeafRule, {"pattern": 5}, "LeafRule.pattern"),
    (LeafRule, {"pattern": "*", "chunk_bytes": 0}, "LeafRule.chunk_bytes"),
    (LeafRule, {"pattern": "*", "cast": "float33"}, "LeafRule.cast"),
    (Storage, {"driver": "n5"}, "Storage.driver"),
    (Storage, {"compression": "gzip"}, "Storage.compression"),
    (Storage, {"chunk_bytes": 0}, "Storage.chunk_bytes"),
    (Storage, {"chunk_bytes": 1e6}, "Storage.chunk_bytes"),
    (Storage, {"leaf_options": 5}, "Storage.leaf_options"),
    (Storage, {"leaf_options": LeafRule("*")}, "Storage.leaf_options"),
    (Storage, {"leaf_options": ["params.*"]}, "Storage.leaf_options"),
    (Coordination, {"deadline_seconds": 0}, "Coordination.deadline_seconds"),
    (Coordination, {"deadline_seconds": -1.0}, "Coordination.deadline_seconds"),
    (Coordination, {"deadline_seconds": float("nan")}, "Coordination.deadline_seconds"),
    (Coordination, {"deadline_seconds": "60"}, "Coordination.deadline_seconds"),
    (Coordination, {"deadline_seconds": None}, "Coordination.deadline_seconds"),
    (Restore, {"host_bytes": 0}, "Restore.host_bytes"),
    (Restore, {"host_bytes": None}, "Restore.host_bytes"),
    (Options, {"on_save_error": "ignore"}, "Options.on_save_error"),
    (Options, {"schedule": 10}, "Options.schedule"),
    (Options, {"snapshot": "sync"}, "Options.snapshot"),
    (Options, {"retention": 3}, "Options.retention"),
    (Options, {"retention": None}, "Options.retention"),
    (Options, {"storage": {}}, "Options.storage"),
    (Options, {"integrity": True}, "Options.integrity"),
    (Options, {"restore": Storage()}, "Options.restore"),
    (Options, {"on_committed": 5}, "Options.on_committed"),
]


@pytest.mark.parametrize(("kind", "arguments", "field"), BAD, ids=[f"{f}={a}" for _, a, f in BAD])
def test_a_bad_value_is_refused_in_one_sentence_that_names_the_option(kind, arguments, field):
    with pytest.raises(InvalidOption) as refused:
        kind(**arguments)
    message = str(refused.value)
    assert message.startswith(field)
    assert "\n" not in message
    given = list(arguments.values())[-1]
    assert repr(given) in message


def test_a_choice_names_what_may_be_chosen():
    with pytest.raises(InvalidOption, match="must be one of 'zarr', 'zarr3'; got 'n5'"):
        Storage(driver="n5")


def test_a_number_says_whether_none_is_allowed():
    with pytest.raises(InvalidOption, match="at least 1 or None, got 0"):
        Schedule(every_steps=0)
    with pytest.raises(InvalidOption, match="at least 1, got True"):
        Heartbeat(every_saves=True)


def test_a_bad_option_is_also_a_value_error():
    with pytest.raises(ValueError):
        Snapshot(mode="x")


def test_the_defaults_keep_everything_and_verify():
    options = Options()
    assert options.schedule.every_steps == 1
    assert options.retention == ckptmgr.KeepAll()
    assert options.integrity.verify_on_restore is True
    assert options.storage.durable is True
    assert options.on_save_error == "raise"
    assert options.read_only is False


@pytest.mark.parametrize(
    "kind", [Schedule, Snapshot, Storage, Integrity, Coordination, Restore, Options]
)
def test_options_are_frozen_and_compare_by_value(kind):
    made = kind()
    assert made == kind()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, dataclasses.fields(kind)[0].name, None)


def test_collections_are_captured_by_value():
    at = [5]
    rules = [LeafRule("a")]
    schedule, storage = Schedule(at_steps=at), Storage(leaf_options=rules)
    at.append(6)
    rules.append(LeafRule("b"))
    assert schedule.at_steps == frozenset({5})
    assert storage.leaf_options == (LeafRule("a"),)


def test_steps_of_numpy_are_steps():
    assert 5 in Schedule(at_steps=np.array([5])).at_steps


def test_policies_join_in_options():
    assert Options(retention=KeepLast(2) | KeepLast(3)).retention is not None


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("params.*.kernel", "params.dense.kernel", True),
        ("params.*.kernel", "params.dense.bias", False),
        ("*", "anything.at.all", True),
        ("opt.[01].mu", "opt.1.mu", True),
        ("Params.w", "params.w", False),
    ],
)
def test_a_rule_matches_the_dotted_name_as_a_shell_pattern(pattern, name, expected):
    assert LeafRule(pattern).matches(name) is expected
