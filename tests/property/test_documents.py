"""What is written as text comes back as it was, and not otherwise."""

import json
import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptmgr.core import layout, values
from ckptmgr.core.manifest import (
    KINDS,
    FormatError,
    Manifest,
    StoredLeaf,
    StoredTree,
)
from ckptmgr.core.receipts import Chunk, Receipt
from tests.property.strategies import VALUES, same


def refuse(constant: str):
    raise AssertionError(f"{constant} is not JSON")


# -- values -----------------------------------------------------------------------------------


@given(VALUES)
def test_a_value_comes_back_through_strict_json(value):
    text = values.dumps(values.encode(value))
    assert same(values.decode(json.loads(text, parse_constant=refuse)), value)


# -- manifest ---------------------------------------------------------------------------------

NAMES = st.text(string.ascii_letters, min_size=1, max_size=5)
MANIFESTS = st.builds(
    Manifest,
    step=st.integers(0, 2**40),
    kind=st.sampled_from(KINDS),
    created=st.floats(0, 4e9),
    attempt=st.text("0123456789abcdef", min_size=1, max_size=8),
    nbytes=st.integers(0, 2**50),
    items=st.dictionaries(NAMES, st.sampled_from(["tree", "state"]), max_size=2),
    metrics=st.dictionaries(NAMES, VALUES, max_size=2).map(values.encode),
    extra=VALUES.map(values.encode),
    topology=st.dictionaries(NAMES, st.integers(0, 9), max_size=2),
    files=st.dictionaries(NAMES, st.tuples(st.integers(0, 99), NAMES), max_size=3),
)


@given(MANIFESTS)
def test_a_manifest_comes_back(manifest):
    assert Manifest.from_json(manifest.to_json().encode()) == manifest


@given(MANIFESTS, st.data())
def test_a_changed_byte_in_a_manifest_is_refused_or_harmless(manifest, data):
    text = manifest.to_json().encode()
    where = data.draw(st.integers(0, len(text) - 1))
    put = data.draw(st.binary(max_size=2))
    changed = text[:where] + put + text[where + 1 :]
    try:
        found = Manifest.from_json(changed)
    except FormatError as exc:
        assert str(exc)
    else:
        assert found == manifest


@given(MANIFESTS, st.data())
def test_a_manifest_that_ends_early_is_refused(manifest, data):
    text = manifest.to_json().encode()
    end = data.draw(st.integers(0, len(text) - 2))
    with pytest.raises(FormatError):
        Manifest.from_json(text[:end])


SHAPES = st.lists(st.integers(0, 99), max_size=3).map(tuple)
PATHS = st.lists(st.text(max_size=5), max_size=3).map(tuple)
ARRAYS = st.builds(
    StoredLeaf,
    path=PATHS,
    kind=st.sampled_from(["array", "numpy", "key", "scalar"]),
    shape=SHAPES,
    dtype=st.sampled_from(["", "float32", "bfloat16"]),
    name=st.text(min_size=1, max_size=5),
    stored_dtype=st.sampled_from(["float32", "uint16"]),
    stored_shape=SHAPES,
    chunk=SHAPES,
    pytype=st.sampled_from(["", "int", "numpy"]),
    impl=st.sampled_from(["", "fry"]),
    sharding=st.none() | st.integers(0, 3),
)
WITHOUT_ARRAY = st.builds(StoredLeaf, path=PATHS, kind=st.just("string"), value=st.text())


@given(st.lists(ARRAYS | WITHOUT_ARRAY, max_size=4).map(tuple), VALUES.map(values.encode))
def test_a_stored_tree_comes_back(leaves, containers):
    tree = StoredTree(leaves, containers, ({"type": "single"},), {"a": "m.C"}, "zarr3", "zstd")
    assert StoredTree.from_json(tree.to_json()) == tree


CHUNKS = st.builds(Chunk, st.integers(0, 3), SHAPES, st.integers(0, 2**40), NAMES)


@given(
    st.integers(0, 300),
    st.lists(CHUNKS, max_size=6).map(lambda found: sorted(found, key=lambda c: c.leaf)).map(tuple),
    st.dictionaries(NAMES, st.integers(0, 2**40)),
)
def test_a_receipt_comes_back(process, chunks, files):
    receipt = Receipt(process, chunks, files)
    assert Receipt.from_json(receipt.to_json()) == receipt


@given(st.binary(max_size=40) | st.recursive(st.none() | st.integers() | st.text(), st.lists))
@example(b"[" * 100_000)
@example(b"{}")
@example({"digest": "", "body": {"format": 1}})
def test_anything_else_is_refused_in_words(junk):
    text = junk if isinstance(junk, bytes) else json.dumps(junk).encode()
    for parse in (Manifest.from_json, StoredTree.from_json, Receipt.from_json):
        with pytest.raises(FormatError, match=r"\w+ \w+|not JSON"):
            parse(text)


# -- names ------------------------------------------------------------------------------------

ODD_KEYS = st.text("ab./0 \n\0é", max_size=5) | st.sampled_from(
    ["", ".", "..", "ckptmgr", "ckptmgr/leaves", "ckptmgr/leaves/0", "ckptmgr/leaves/1", "\ud800"]
)


@given(st.lists(st.lists(ODD_KEYS, max_size=3).map(tuple), unique=True, min_size=2, max_size=8))
@example([("a.b",), ("a", "b"), ("a", "", "b"), ("ckptmgr/leaves/0",)])
@example([("ckptmgr/leaves/1",), ("",), ()])
def test_different_paths_never_get_the_same_array_name(paths):
    names = layout.array_names(paths)
    assert len(set(names)) == len(paths)
    for name, path in zip(names, paths, strict=True):
        assert name and "\0" not in name
        assert name == ".".join(path) or layout.is_aside(name)


@given(st.integers(0, 10**18), st.text("0123456789abcdef", min_size=1, max_size=16))
def test_names_of_steps_and_attempts_are_parsed_back(step, attempt):
    assert layout.parse_step(layout.step_name(step)) == step
    assert layout.parse_tmp(layout.tmp_name(step, attempt)) == (step, attempt)
    assert layout.parse_step(layout.tmp_name(step, attempt)) is None
    directory, _, name = layout.intent_name(attempt).rpartition("/")
    assert directory == layout.intents_dir()
    assert layout.parse_intent(name) == attempt


@given(st.text(max_size=8))
def test_only_names_that_the_builder_makes_are_parsed(name):
    step = layout.parse_step(name)
    assert step is None or layout.step_name(step) == name
    found = layout.parse_tmp(name)
    assert found is None or layout.tmp_name(*found) == name
    process = layout.parse_receipt(name)
    assert process is None or layout.receipt_file("x", process).endswith("/" + name)
