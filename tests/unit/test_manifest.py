"""The manifest, the tree and the receipts as documents."""

import json
from dataclasses import MISSING, fields, replace

import pytest

from ckptmgr.core import manifest
from ckptmgr.core.manifest import (
    FormatError,
    Manifest,
    StoredLeaf,
    StoredTree,
)
from ckptmgr.core.receipts import Chunk, Receipt, missing_chunks

PLAIN = Manifest(
    step=12,
    kind="async",
    created=1.75e9,
    attempt="ab12",
    nbytes=64,
    items={"default": "tree"},
    metrics={"loss": {"$float": "nan"}},
    extra=None,
    topology={"devices": 8},
    files={"default/ckptmgr/tree.json": (10, "0" * 32)},
    since_heartbeat=3,
)


def signed(**changes) -> bytes:
    """A manifest with a changed body and the digest that fits it; None takes a field away."""
    body = json.loads(PLAIN.to_json())["body"]
    body.update(changes)
    text = json.dumps({k: v for k, v in body.items() if v is not ...}, separators=(",", ":"))
    return f'{{"digest":"{manifest.digest(text.encode())}","body":{text}}}\n'.encode()


def test_a_manifest_is_one_line_that_says_its_digest_first():
    text = PLAIN.to_json()
    assert text.count("\n") == 1 and text.endswith("\n")
    assert text.startswith('{"digest":"')
    assert json.loads(text)["body"]["format"] == manifest.FORMAT


def test_the_digest_is_xxh3_128_in_hexadecimal():
    assert manifest.digest(b"") == "99aa06d3014798d86001c324468d497f"
    assert len(manifest.digest(b"abc")) == 32


def test_a_manifest_comes_back():
    assert Manifest.from_json(PLAIN.to_json().encode()) == PLAIN
    assert Manifest.from_json(signed()) == PLAIN


def test_every_changed_byte_is_refused_or_harmless():
    text = PLAIN.to_json().encode()
    for where in range(len(text)):
        for put in (b"", b"0", b" ", b'"', b"}", bytes([text[where] ^ 1]), b"\xff"):
            changed = text[:where] + put + text[where + 1 :]
            try:
                found = Manifest.from_json(changed)
            except FormatError:
                continue
            assert found == PLAIN, changed


def test_a_changed_value_is_refused_by_its_digest():
    text = PLAIN.to_json().replace('"step":12', '"step":13').encode()
    with pytest.raises(FormatError, match="digest does not fit its text"):
        Manifest.from_json(text)


def test_a_newer_format_says_upgrade():
    with pytest.raises(FormatError, match="written by format 999, .* up to 1; upgrade ckptmgr"):
        Manifest.from_json(signed(format=999))


def test_a_newer_format_says_upgrade_whatever_else_it_changed():
    text = b'{"digest": "sha999:xyz", "body": {"format": 2, "steps": [1]}, "more": 1}'
    with pytest.raises(FormatError, match="upgrade ckptmgr"):
        Manifest.from_json(text)


@pytest.mark.parametrize("version", ["abc", "1", None, 0, -1, True, 1.0, 1.5, [], ...])
def test_a_format_that_is_no_number_is_refused(version):
    with pytest.raises(FormatError, match="format version is .* not a number from 1 up"):
        Manifest.from_json(signed(format=version))


def test_fields_that_are_not_known_are_ignored():
    assert Manifest.from_json(signed(later={"a": 1})) == PLAIN


@pytest.mark.parametrize("name", [f.name for f in fields(Manifest) if f.default is MISSING])
def test_a_field_that_is_missing_is_refused_by_name(name):
    with pytest.raises(FormatError, match=f"'{name}'"):
        Manifest.from_json(signed(**{name: ...}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", "12"),
        ("step", True),
        ("step", -1),
        ("kind", 5),
        ("created", "now"),
        ("created", None),
        ("attempt", 7),
        ("nbytes", "64"),
        ("items", ["default"]),
        ("items", {"default": 1}),
        ("topology", []),
        ("files", []),
        ("files", {"a": 5}),
        ("files", {"a": [1]}),
        ("files", {"a": ["big", 5]}),
    ],
)
def test_a_field_of_a_wrong_type_is_refused(name, value):
    with pytest.raises(FormatError):
        Manifest.from_json(signed(**{name: value}))


@pytest.mark.parametrize("text", [b"", b"null", b"[]", b"{}", b"\xff\xfe", b'{"body":{}}', b"x"])
def test_what_is_no_manifest_is_refused(text):
    with pytest.raises(FormatError):
        Manifest.from_json(text)


# -- the tree ---------------------------------------------------------------------------------

ARRAY = StoredLeaf(
    ("a", "b"), "array", (4, 2), "float32", "a.b", "float32", (4, 2), (2, 2), sharding=0
)


def test_a_leaf_knows_its_name_and_its_bytes():
    assert ARRAY.dotted == "a.b"
    assert ARRAY.nbytes == 32
    key = StoredLeaf(("k",), "key", (3,), "", "k", "uint32", (3, 2), (3, 2), impl="fry")
    assert key.nbytes == 24
    text = StoredLeaf(("s",), "string", value="hello")
    assert (text.has_array, text.nbytes) == (False, 0)
    assert replace(ARRAY, shape=(0, 2), stored_shape=(0, 2)).nbytes == 0


def test_leaves_of_every_kind_come_back():
    leaves = (
        ARRAY,
        StoredLeaf(("k",), "key", (3,), "", "k", "uint32", (3, 2), (3, 2), impl="fry", sharding=0),
        StoredLeaf(("odd",), "numpy", (2,), "float6_e2m3fn", "odd", "uint8", (2,), (2,)),
        StoredLeaf(("n",), "scalar", (), "int64", "n", "int64", (), (), pytype="int"),
        StoredLeaf(("big",), "scalar", pytype="int", value=str(2**70)),
        StoredLeaf(("s",), "string", value=""),
        StoredLeaf((), "bytes", (0,), "uint8", "ckptmgr/leaves/6", "uint8", (0,), (1,)),
    )
    tree = StoredTree(leaves, {"dict": [["a", 0]]}, ({"type": "single"},), {"": "m.C"})
    assert StoredTree.from_json(tree.to_json()) == tree


def test_fields_of_a_leaf_that_are_not_known_are_ignored():
    data = manifest.leaf_to_json(ARRAY) | {"later": 1}
    assert manifest.leaf_from_json(data) == ARRAY


@pytest.mark.parametrize(
    "change", [{"shape": 4}, {"kind": 1}, {"path": "a.b"}, {"sharding": "0"}, {"name": None}]
)
def test_a_leaf_with_a_wrong_type_is_refused_by_its_field(change):
    data = manifest.leaf_to_json(ARRAY) | change
    with pytest.raises(FormatError, match=f"field '{next(iter(change))}' of leaf"):
        manifest.leaf_from_json(data)


@pytest.mark.parametrize("leaf", [{}, {"path": []}, {"kind": "array"}, [], 5, None])
def test_a_leaf_without_path_or_kind_is_refused(leaf):
    with pytest.raises(FormatError, match="not an object with path and kind"):
        manifest.leaf_from_json(leaf)


@pytest.mark.parametrize(
    "name", ["driver", "compression", "shardings", "plain", "containers", "leaves"]
)
def test_a_tree_without_a_field_is_refused_by_name(name):
    data = json.loads(StoredTree((ARRAY,), 0).to_json())
    del data[name]
    with pytest.raises(FormatError, match=name):
        StoredTree.from_json(json.dumps(data))


# -- receipts ---------------------------------------------------------------------------------

TREE = StoredTree((ARRAY, StoredLeaf(("s",), "string", value="x")), None)
BOTH = (Chunk(0, (0, 0), 16, "d0"), Chunk(0, (1, 0), 16, "d1"))


def test_a_receipt_comes_back():
    receipt = Receipt(3, BOTH, {"ocdbt.process_3/d/x": 99})
    assert Receipt.from_json(receipt.to_json()) == receipt


def test_a_receipt_is_json_of_what_it_says():
    chunks = (*BOTH, Chunk(2, (), 4, ""))
    text = Receipt(3, chunks, {'a "quoted"/d/x': 99}, {2: (1, 2, 3, 4)}).to_json()
    assert json.loads(text) == {
        "process": 3,
        "files": {'a "quoted"/d/x': 99},
        "chunks": [[0, [[[0, 0], 16, "d0"], [[1, 0], 16, "d1"]]], [2, [[[], 4, ""]]]],
        "sums": [[2, [1, 2, 3, 4]]],
    }


@pytest.mark.parametrize(
    "text", ["{}", '{"process":0,"files":{},"chunks":[[0,[[1,2]]]]}', '{"chunks":5}', "[]"]
)
def test_a_broken_receipt_is_refused(text):
    with pytest.raises(FormatError):
        Receipt.from_json(text)


def test_chunks_that_are_all_there_once_are_no_problem():
    assert missing_chunks(TREE, [Receipt(0, BOTH[:1], {}), Receipt(1, BOTH[1:], {})]) == []


def test_a_missing_a_doubled_and_an_alien_chunk_are_named():
    assert missing_chunks(TREE, [Receipt(0, BOTH[:1], {})]) == [(0, (1, 0), "is in no receipt")]
    doubled = [Receipt(0, BOTH, {}), Receipt(1, BOTH[:1], {})]
    assert missing_chunks(TREE, doubled) == [(0, (0, 0), "is in 2 receipts")]
    alien = (*BOTH, Chunk(0, (2, 0), 1), Chunk(9, (0,), 1))
    assert missing_chunks(TREE, [Receipt(0, alien, {})]) == [
        (0, (2, 0), "does not belong to the array"),
        (9, (0,), "does not belong to the array"),
    ]


def test_an_array_without_elements_has_no_chunk_to_miss():
    empty = replace(ARRAY, shape=(0,), stored_shape=(0,), chunk=(1,))
    assert missing_chunks(StoredTree((empty,), None), []) == []


def test_the_box_of_a_chunk_is_cut_at_the_end_of_the_array():
    leaf = replace(ARRAY, stored_shape=(5, 2), chunk=(2, 2))
    assert manifest.chunk_box(leaf, (2, 0)).shape == (1, 2)
    assert manifest.chunk_index(leaf, manifest.chunk_box(leaf, (2, 0))) == (2, 0)
