"""What processes compare: the same tree, the same host values, and who is named where not."""

import pytest

from ckptmgr.core.manifest import StoredLeaf, StoredTree
from ckptmgr.engine import agreeing
from ckptmgr.engine.agreeing import Claim, agree, compare_own
from ckptmgr.engine.meeting import odd_ones
from tests.support.together import LONG, job, one_error, play


def test_the_most_are_taken_to_be_right():
    assert odd_ones("p", ["same", "same"]) is None
    assert odd_ones("p", ["b", "a", "a"]).failures == {0: "b, not as processes 1, 2: a"}
    assert odd_ones("p", ["a", "b"]).failures == {1: "b, not as process 0: a"}
    tie = odd_ones("p", ["a", "b", "c", "b", "a"])
    assert sorted(tie.failures) == [1, 2, 3], "of equal groups the one with process 0"
    assert "not as processes 0, 1, 2" in odd_ones("p", ["a"] * 30 + ["b"]).failures[30]
    assert "18, 19 and others: a" in odd_ones("p", ["a"] * 30 + ["b"]).failures[30]


def tree(**dtypes):
    return StoredTree(
        tuple(
            StoredLeaf((name,), "array", (2, 3), dtype, name, dtype, (2, 3), (2, 3))
            for name, dtype in dtypes.items()
        ),
        None,
    )


def agreed(trees, calls=None, world=4):
    """What `agree` comes to where process r saves the r-th tree; how often it began."""
    begun = []

    def body(member):
        mine = trees[member.rank]
        claim = Claim((calls or ["saves step 3"] * world)[member.rank], repr(mine))
        return agree(
            member, "p", claim, {"state": mine}, LONG, lambda: begun.append(1) or {"id": "x"}
        )

    return play(job(world), body), len(begun)


def test_where_all_save_the_same_process_0_begins_once():
    found, begun = agreed([tree(w="float32")] * 4)
    assert ([o.value for o in found.values()], begun) == ([{"id": "x"}] * 4, 1)


def test_another_step_is_told_by_process_and_nothing_begins():
    calls = ["saves step 3"] * 2 + ["saves step 4", "saves step 3"]
    found, begun = agreed([tree(w="float32")] * 4, calls)
    assert one_error(found).failures == {2: "saves step 4, not as processes 0, 1, 3: saves step 3"}
    assert begun == 0


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        ({"a": "float32", "b": "float16", "c": "int8"}, "leaf 'state: b' as float16[2, 3]"),
        ({"a": "float32", "c": "int8"}, "has no leaf 'state: b'"),
        ({"a": "float32", "b": "float32", "c": "int32", "d": "int8"}, "leaf 'state: c' as int32"),
        ({"a": "float32", "b": "float32", "c": "int8", "d": "int8"}, "has a leaf 'state: d'"),
    ],
    ids=["dtype", "missing", "the first of two", "more"],
)
def test_another_tree_is_told_by_process_and_first_leaf(odd, text):
    usual = tree(a="float32", b="float32", c="int8")
    found, begun = agreed([usual, tree(**odd), usual, usual])
    failures = one_error(found).failures
    assert list(failures) == [1]
    assert text in failures[1] and failures[1].endswith("tree than process 0")
    assert begun == 0


def test_of_many_odd_trees_a_few_are_asked_and_all_are_named():
    usual = tree(a="float32")
    odd = [tree(a=dtype) for dtype in ("int8", "int16", "int32", "float16", "float64")]
    found, _ = agreed([usual] * 3 + odd, world=8)
    failures = one_error(found).failures
    assert list(failures) == [3, 4, 5, 6, 7]
    assert ["leaf 'state: a'" in text for text in failures.values()] == [True] * 4 + [False]
    assert failures[7] == "saves something else than process 0"


def test_details_that_are_too_large_are_cut(monkeypatch):
    monkeypatch.setattr(agreeing, "DETAIL_BYTES", 3000)
    names = [f"w{i}" for i in range(1000)]
    usual, odd = tree(**dict.fromkeys(names, "int8")), tree(**dict.fromkeys(names, "int16"))
    found, _ = agreed([usual, usual, odd, usual])
    assert "has leaf 'state: w0' as int16[2, 3]" in one_error(found).failures[2]


def test_other_host_values_are_told_by_leaf():
    assert agreeing.odd_values(["x", "y", "x", ""]) == [1, 3]
    usual = [["w", "[0] aa"], ["w", "[1] bb"], ["n", "[] cc"], ["seed", "[] dd"]]
    second = [["w", "[0] zz"], *usual[1:3], ["seed", "[] ee"]]
    details = {0: usual, 1: usual, 2: second, 3: usual[:2] + [["n", "[] zz"]] + usual[3:]}
    found = play(job(4), lambda m: compare_own(m, "p", [2, 3], lambda: details[m.rank], LONG))
    failures = one_error(found).failures
    assert sorted(failures) == [2, 3]
    assert failures[2].startswith("has other values in 'seed', 'w' (")
    assert failures[3].startswith("has other values in 'n' (")
    many = {0: [[f"w{i}", "a"] for i in range(7)], 1: [[f"w{i}", "b"] for i in range(7)]}
    found = play(job(2), lambda m: compare_own(m, "p", [1], lambda: many[m.rank], LONG))
    assert "'w4' and 2 more (" in one_error(found).failures[1]
