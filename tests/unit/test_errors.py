"""Errors: one tree, and messages that name what they are about."""

import inspect

import pytest

import ckptmgr
from ckptmgr import errors
from ckptmgr.errors import (
    CheckpointError,
    CorruptCheckpoint,
    PeerFailed,
    Problem,
    SaveFailed,
    SnapshotLost,
    StepExists,
    StepNotFound,
    StoreError,
    TreeMismatch,
    UnsupportedLeaf,
)

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, BaseException) and kind.__module__ == errors.__name__
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_a_checkpoint_error_and_public(kind):
    assert issubclass(kind, CheckpointError)
    assert getattr(ckptmgr, kind.__name__) is kind
    assert kind.__name__ in ckptmgr.__all__


def test_every_public_name_is_there():
    assert len(set(ckptmgr.__all__)) == len(ckptmgr.__all__)
    assert [name for name in ckptmgr.__all__ if not hasattr(ckptmgr, name)] == []


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem("default/d/x", "missing"), "default/d/x: missing"),
        (Problem("default", "bad", "a.b"), "default: leaf a.b: bad"),
        (Problem("", "bad", "a.b"), "leaf a.b: bad"),
        (Problem("", "nothing there"), "nothing there"),
    ],
)
def test_a_problem_names_file_and_leaf(problem, text):
    assert str(problem) == text


def test_a_corrupt_checkpoint_names_the_step_and_every_problem():
    problems = [Problem("f", "missing"), Problem("g", "short", "w")]
    error = CorruptCheckpoint(7, problems)
    assert str(error) == "step 7 is damaged: f: missing; g: leaf w: short"
    assert (error.step, error.problems) == (7, tuple(problems))
    assert str(CorruptCheckpoint(None, problems[:1])) == "the checkpoint is damaged: f: missing"


def test_a_corrupt_checkpoint_with_many_problems_stays_readable():
    error = CorruptCheckpoint(7, [Problem(f"f{i}", "missing") for i in range(25)])
    assert str(error).endswith("f19: missing; ... and 5 more")
    assert len(error.problems) == 25


def test_a_tree_mismatch_lists_every_leaf():
    error = TreeMismatch("step 3", 9, ["b", "a"], ["c"], {"w": "shape: stored (2,), target (3,)"})
    lines = str(error).splitlines()
    assert lines[0] == "step 3 does not fit the target (4 of 9 leaves):"
    assert [line.split() for line in lines[1:]] == [
        ["missing", "in", "checkpoint", "a"],
        ["missing", "in", "checkpoint", "b"],
        ["not", "in", "target", "c", "(partial=True", "skips", "it)"],
        ["shape:", "stored", "(2,),", "target", "(3,)", "w"],
    ]
    assert (error.missing, error.extra) == (("a", "b"), ("c",))
    assert list(error.differing) == ["w"]


def test_a_tree_mismatch_of_items_counts_no_more_leaves_than_there_are():
    error = TreeMismatch("step 3", 1, ["item data", "item state"], ["item default"])
    assert str(error).startswith("step 3 does not fit the target (3 differences):")


def test_the_other_messages_name_step_leaf_and_path():
    lost = SnapshotLost("params.w", 4)
    assert str(lost).startswith("step 4: leaf 'params.w' was donated or deleted")
    assert (lost.leaf, lost.step) == ("params.w", 4)
    leaf = UnsupportedLeaf("a.b", "no good")
    assert (str(leaf), leaf.leaf) == ("leaf 'a.b': no good", "a.b")
    failed = SaveFailed(5, OSError("disk full"))
    assert "save of step 5 failed" in str(failed) and str(failed).endswith("OSError: disk full")
    assert str(SaveFailed(5, "why")).endswith(": why")
    exists = StepExists(6, "/run/6")
    assert "step 6" in str(exists) and "/run/6" in str(exists) and "overwrite=True" in str(exists)
    peers = PeerFailed("publish", {2: "disk full"}, [3, 1])
    assert str(peers) == ("phase 'publish': process 2: disk full; no answer from process 1, 3")
    assert (peers.failures, peers.silent) == ({2: "disk full"}, (1, 3))


def test_errors_can_be_caught_as_what_python_calls_them():
    assert isinstance(StepNotFound("x", 3), FileNotFoundError)
    assert StepNotFound("no step 3", 3).step == 3
    assert str(StepNotFound("no step 3", 3)) == "no step 3"
    assert isinstance(StoreError("x", unknown=True), OSError)
    assert StoreError("x", unknown=True).unknown and not StoreError("x").unknown
    assert str(StoreError("cannot write f")) == "cannot write f"
    assert issubclass(UnsupportedLeaf, TypeError)
    assert issubclass(TreeMismatch, ValueError)
