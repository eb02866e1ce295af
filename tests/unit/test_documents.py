"""Metadata files are made once for all trees of one structure, and are those of that structure."""

import numpy as np
import pytest

from ckptmgr.core import layout, orbax_format, tree
from ckptmgr.core.plan import plan_save
from ckptmgr.engine import documents, leaves, shardings
from ckptmgr.engine.documents import Documents
from ckptmgr.options import Storage


def documents_of(state):
    survey = leaves.survey(state, Storage(), shardings.PlacesCache(), 1)
    flat = tree.flatten(state)
    return Documents(flat, plan_save(survey.stored, survey.shards, 0).tree), survey.stored


STATE = {"w": np.arange(6.0), "text": "words", "empty": {}, "list": [1, None]}


def test_an_items_files_are_all_that_orbax_and_we_read_of_its_tree():
    found, stored = documents_of(STATE)
    files = found.files("default")
    assert files[layout.tree_file("default")].decode() == stored.to_json() == found.text()
    assert files[layout.sharding_file("default")].decode() == orbax_format.shardings(stored)
    assert files[layout.strings_file("default")].decode() == orbax_format.strings(stored)
    assert layout.json_item_file("default") not in files  # only of a tree without leaves


def test_they_are_made_once_and_anew_for_an_item_of_another_name():
    found, _ = documents_of(STATE)
    assert found.files("a") is found.files("a")
    other = found.files("b")
    assert {path.replace("b/", "a/", 1): data for path, data in other.items()} == dict(
        documents_of(STATE)[0].files("a")
    )


def test_very_large_ones_are_not_kept(monkeypatch):
    monkeypatch.setattr(documents, "KEPT_BYTES", 100)
    found, _ = documents_of(STATE)
    first, second = found.files("default"), found.files("default")
    assert first is not second and first == second


@pytest.mark.parametrize("state", [{}, [], {"a": {"b": ()}}])
def test_a_tree_without_leaves_has_its_containers_as_json(state):
    found, _ = documents_of(state)
    assert layout.json_item_file("default") in found.files("default")
