"""File names: built and parsed in one place."""

import pytest

from ckptmgr.core import layout


@pytest.mark.parametrize("name", ["", "-1", "01", "1.0", " 1", "1 ", "1\n", "1e3", "١", "１", "x"])
def test_a_name_that_is_not_exactly_a_number_is_no_step(name):
    assert layout.parse_step(name) is None


def test_steps_are_named_by_their_plain_number():
    assert layout.step_name(0) == "0"
    assert layout.parse_step("120000") == 120000


def test_a_save_under_way_is_named_as_orbax_expects():
    assert layout.tmp_name(7, "0f") == "7.orbax-checkpoint-tmp-0f"
    assert layout.parse_tmp("7.orbax-checkpoint-tmp-0f") == (7, "0f")
    for name in ("7.orbax-checkpoint-tmp-", "7.orbax-checkpoint-tmp-X", "x.orbax-checkpoint-tmp-0"):
        assert layout.parse_tmp(name) is None


def test_intents_and_receipts_are_parsed_back():
    assert layout.parse_intent(layout.intent_name("ab").rpartition("/")[2]) == "ab"
    assert layout.parse_intent("ab.json.tmp") is None
    assert layout.parse_receipt(layout.receipt_file("x", 12).rpartition("/")[2]) == 12
    assert layout.parse_receipt("receipt.process_012.json") is None


def test_what_is_ours_beside_the_steps_lies_in_one_directory():
    names = [
        layout.intents_dir(),
        layout.intent_name("0"),
        layout.quarantine_name(1, "0"),
        layout.trash_dir(),
        layout.trash_name(1, "0"),
    ]
    assert all(name.startswith(layout.PRIVATE + "/") for name in names)
    assert len(set(names)) == len(names)
    assert layout.trash_name(1, "0").startswith(layout.trash_dir() + "/")
    assert layout.parse_step(layout.PRIVATE) is None


def test_every_file_of_an_item_has_a_name_of_its_own():
    names = [
        layout.pytree_metadata("a"),
        layout.sharding_file("a"),
        layout.strings_file("a"),
        layout.array_metadatas("a", 0),
        layout.array_metadatas("a", 1),
        layout.json_item_file("a"),
        layout.item_commit("a"),
        layout.tree_file("a"),
        layout.receipt_file("a", 0),
        layout.receipt_file("a", 1),
        layout.state_file("a", 0),
        layout.state_file("a", 1),
    ]
    assert len(set(names)) == len(names)
    assert all(name.startswith("a/") for name in names)
    assert layout.array_metadatas("a", 0).startswith(layout.array_metadatas_dir("a") + "/")
    assert layout.container(3).startswith(layout.containers_prefix())


@pytest.mark.parametrize("name", ["default", "state", "data-1", "a.b", "0", "X_y"])
def test_plain_names_may_name_an_item(name):
    assert layout.is_item_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/b",
        "/a",
        ".hidden",
        "_METADATA",
        layout.MANIFEST,
        layout.PRIVATE,
        layout.CHECKPOINT_METADATA,
        layout.COMMIT_SUCCESS,
        layout.METRICS_ITEM,
        "a.orbax-checkpoint-tmp-1",
        "a b",
        "a\n",
        "é",
    ],
)
def test_names_that_could_hide_a_file_may_not_name_an_item(name):
    assert not layout.is_item_name(name)


def test_usual_leaves_lie_under_their_dotted_name():
    paths = [("params", "w"), ("opt", "0", "mu"), ("step",), ("ünï", "x y")]
    assert layout.array_names(paths) == ("params.w", "opt.0.mu", "step", "ünï.x y")


def test_of_colliding_names_the_first_keeps_it_and_the_others_lie_aside():
    names = layout.array_names([("a", "b"), ("a.b",), ("c",)])
    assert names == ("a.b", "ckptmgr/leaves/1", "c")
    assert [layout.is_aside(name) for name in names] == [False, True, False]


@pytest.mark.parametrize(
    "path", [(), ("",), ("/a",), ("a/",), ("a//b",), ("a\0b",), ("a\nb",), ("\ud800",)]
)
def test_a_name_that_cannot_be_a_key_lies_aside(path):
    assert layout.array_names([("x",), path]) == ("x", "ckptmgr/leaves/1")


def test_a_leaf_named_like_a_place_aside_does_not_take_it():
    names = layout.array_names([("ckptmgr/leaves/1",), ("",)])
    assert names == ("ckptmgr/leaves/0", "ckptmgr/leaves/1")


def test_a_tree_that_is_one_leaf_lies_at_the_root_of_the_database():
    (name,) = layout.array_names([()])
    assert name == layout.ROOT_ARRAY
    assert (layout.array_prefix(name), layout.orbax_name(name)) == ("", "")
    assert not layout.is_aside(name)
    assert layout.array_names([("/",)]) != (name,)
    assert (layout.array_prefix("a.b"), layout.orbax_name("a.b")) == ("a.b/", "a.b")
