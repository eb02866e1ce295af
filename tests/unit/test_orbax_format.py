"""Orbax's metadata files: what we write parses back, and what Orbax writes is understood."""

import base64
import json

import pytest

from ckptmgr.core import orbax_format
from ckptmgr.core.manifest import FormatError, StoredLeaf, StoredTree
from ckptmgr.core.orbax_format import ForeignLeaf
from ckptmgr.core.tree import flatten

NAMED = {
    "type": "named",
    "axes": [["data", 4], ["model", 2]],
    "axis_types": ["AxisType.Auto", "AxisType.Auto"],
    "spec": [["data"], None, ["data", "model"]],
    "device_ids": [7, 6, 5, 4, 3, 2, 1, 0],
    "memory_kind": "device",
}
SINGLE = {"type": "single", "device": "cpu:0", "memory_kind": "device"}
OTHER = {"type": "other", "text": "GSPMDSharding({replicated})"}


def array(path, kind="array", name=None, **more):
    name = ".".join(path) if name is None else name
    return StoredLeaf(path, kind, (4,), "float32", name, "float32", (4,), (2,), **more)


STATE = {
    "params": [1.0, {"w": 2.0}],
    "rng": 3.0,
    "text": "hello",
    "big": 2**70,
    "blob": b"x",
    "none": None,
    "empty": {"d": {}, "l": [], "t": ()},
}
FLAT = flatten(STATE)
KINDS = {"rng": "key", "text": "string", "big": "scalar", "blob": "bytes", "params.0": "scalar"}


def stored_leaf(path):
    name = ".".join(path)
    kind = KINDS.get(name, "array")
    if name in ("text", "big"):
        return StoredLeaf(path, kind, pytype="int" if name == "big" else "", value=name)
    placed = 0 if kind in ("array", "key") else None
    return array(path, kind, impl="fry" if kind == "key" else "", sharding=placed)


TREE = StoredTree(tuple(map(stored_leaf, FLAT.paths)), FLAT.containers, (SINGLE,))


def test_the_tree_metadata_parses_back():
    found = orbax_format.parse_pytree_metadata(orbax_format.pytree_metadata(FLAT, TREE).encode())
    assert found.marked and found.ocdbt is True and found.zarr3 is False
    assert {(".".join(leaf.path), leaf.sequence, leaf.value_type) for leaf in found.leaves} == {
        ("params.0", (False, True), "scalar"),
        ("params.1.w", (False, True, False), "jax.Array"),
        ("rng", (False,), "jax.Array"),
        ("text", (False,), "string"),
        ("big", (False,), "string"),
        ("blob", (False,), "np.ndarray"),
        ("none", (False,), "None"),
        ("empty.d", (False, False), "Dict"),
        ("empty.l", (False, False), "List"),
        ("empty.t", (False, False), "Tuple"),
    }


def test_the_containers_of_parsed_metadata_are_those_of_the_tree():
    found = orbax_format.parse_pytree_metadata(orbax_format.pytree_metadata(FLAT, TREE).encode())
    containers, real = orbax_format.foreign_containers(found.leaves)

    def names(node):
        if isinstance(node, int):
            return ".".join(real[node].path)
        if node is None:
            return None
        ((tag, body),) = node.items()
        return {key: names(c) for key, c in body} if tag == "dict" else [names(c) for c in body]

    assert names(containers) == {
        "params": ["params.0", {"w": "params.1.w"}],
        "rng": "rng",
        "text": "text",
        "big": "big",
        "blob": "blob",
        "none": None,
        "empty": {"d": {}, "l": [], "t": []},
    }


def test_arrays_that_lie_where_orbax_has_no_words_for_are_listed_as_host_arrays():
    flat = flatten({"here": 1, "key": 2, "nowhere": 3, "other": 4})
    leaves = (
        array(("here",), sharding=0),
        array(("key",), "key", impl="fry"),
        array(("nowhere",)),
        array(("other",), sharding=1),
    )
    tree = StoredTree(leaves, flat.containers, (SINGLE, OTHER))
    found = orbax_format.parse_pytree_metadata(orbax_format.pytree_metadata(flat, tree).encode())
    kinds = {leaf.path[0]: leaf.value_type for leaf in found.leaves}
    host = "np.ndarray"
    assert kinds == {"here": "jax.Array", "key": host, "nowhere": host, "other": host}


def test_a_zarr3_tree_says_so():
    tree = StoredTree(TREE.leaves, TREE.containers, (SINGLE,), driver="zarr3")
    text = orbax_format.pytree_metadata(FLAT, tree).encode()
    assert orbax_format.parse_pytree_metadata(text).zarr3 is True


def test_leaves_that_lie_aside_are_not_in_the_tree_metadata():
    flat = flatten({"a.b": 1, "a": {"b": 2}})
    leaves = (array(("a", "b")), array(("a.b",), name="ckptmgr/leaves/1"))
    text = orbax_format.pytree_metadata(flat, StoredTree(leaves, flat.containers)).encode()
    found = orbax_format.parse_pytree_metadata(text)
    assert [leaf.path for leaf in found.leaves] == [("a", "b")]


def test_shardings_parse_back():
    leaves = (
        array(("a",), sharding=0),
        array(("ü", "b"), sharding=1),
        array(("c",)),
        array(("d",), name="ckptmgr/leaves/3", sharding=0),
    )
    text = orbax_format.shardings(StoredTree(leaves, None, (NAMED, SINGLE)))
    found = orbax_format.parse_shardings(text.encode())
    assert found == {
        "a": {"type": "named", "axes": NAMED["axes"], "spec": NAMED["spec"]},
        "ü.b": {"type": "single", "device": "cpu:0"},
    }


def test_devices_of_a_sharding_lie_in_the_shape_of_its_mesh():
    text = orbax_format.shardings(StoredTree((array(("a",), sharding=0),), None, (NAMED,)))
    entry = json.loads(json.loads(text)[base64.urlsafe_b64encode(b"a").decode()])
    assert entry["shape"] == [4, 2]
    assert entry["partition_spec"] == ["data", None, ["data", "model"]]
    ids = [[device["id"] for device in row] for row in entry["device_mesh"]["mesh"]]
    assert ids == [[7, 6], [5, 4], [3, 2], [1, 0]]


def test_a_sharding_that_orbax_has_no_words_for_is_left_out():
    leaves = (array(("a",), sharding=0), array(("b",), sharding=1))
    text = orbax_format.shardings(StoredTree(leaves, None, (OTHER, SINGLE)))
    assert list(orbax_format.parse_shardings(text.encode())) == ["b"]


def test_keys_parse_back_from_the_array_metadata():
    leaves = (array(("a",)), array(("k",), "key", impl="fry"), array(("n",), "numpy"))
    text = orbax_format.array_metadatas(StoredTree(leaves, None))
    assert orbax_format.parse_key_impls(text.encode()) == {"k": "fry"}
    entries = [e["array_metadata"] for e in json.loads(text)["array_metadatas"]]
    assert [(e["param_name"], e["chunk_shape"]) for e in entries] == [("a", [2]), ("k", [2])]


def test_strings_are_written_under_their_dotted_name():
    assert json.loads(orbax_format.strings(TREE)) == {"text": "text", "big": "big"}
    assert orbax_format.strings(StoredTree((array(("a",)),), None)) is None


def test_the_step_metadata_names_a_handler_for_every_item():
    text = orbax_format.checkpoint_metadata(
        {"state": "tree", "data": "state"}, {"loss": 0.5}, 10.0, 12.5
    )
    data = json.loads(text)
    assert data["item_handlers"] == {
        "state": orbax_format.STANDARD_HANDLER,
        "data": orbax_format.JSON_HANDLER,
        "metrics": orbax_format.JSON_HANDLER,
    }
    assert data["metrics"] == {"loss": 0.5}
    assert data["init_timestamp_nsecs"] == 10_000_000_000
    assert data["commit_timestamp_nsecs"] == 12_500_000_000
    without = json.loads(orbax_format.checkpoint_metadata({"state": "tree"}, None, 0, 0))
    assert list(without["item_handlers"]) == ["state"]
    assert without["metrics"] == {}


def foreign(*entries):
    return [ForeignLeaf(tuple(path), tuple(flags), kind) for path, flags, kind in entries]


def test_sequences_keep_the_order_of_the_file_beyond_ten():
    leaves = foreign(*(((str(i),), (True,), "jax.Array") for i in range(12)))
    containers, real = orbax_format.foreign_containers(leaves)
    assert containers == {"list": list(range(12))}
    assert [leaf.path[0] for leaf in real] == [str(i) for i in range(12)]


def test_a_single_leaf_and_nothing_at_all_are_trees_too():
    leaf = foreign(((), (), "jax.Array"))
    assert orbax_format.foreign_containers(leaf) == (0, leaf)
    assert orbax_format.foreign_containers([]) == ({"dict": []}, [])


def test_a_leaf_below_another_leaf_is_refused_by_name():
    leaves = foreign((("a",), (False,), "jax.Array"), (("a", "b"), (False, False), "jax.Array"))
    with pytest.raises(FormatError, match=r"a\.b lies below another leaf"):
        orbax_format.foreign_containers(leaves)
    with pytest.raises(FormatError, match="another leaf"):
        orbax_format.foreign_containers(leaves[::-1])


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[]", b"5", b"null", b"\xff", b'{"tree_metadata": []}']
    + [b'{"tree_metadata": {"a": {}}}', b'{"tree_metadata": {"a": 1}}'],
)
def test_broken_tree_metadata_is_refused(text):
    with pytest.raises(FormatError, match="not Orbax's tree metadata"):
        orbax_format.parse_pytree_metadata(text)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"5", b"\xff", b'{"YQ==": 1}', b'{"YQ==": "x"}', b'{"\\u00e9": "{}"}']
)
def test_a_broken_sharding_file_is_refused(text):
    with pytest.raises(FormatError, match="not Orbax's sharding file"):
        orbax_format.parse_shardings(text)


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[]", b"5", b'{"array_metadatas": [1]}', b'{"array_metadatas": [{}]}']
    + [b'{"array_metadatas": [{"array_metadata": 5}]}'],
)
def test_broken_array_metadata_is_refused(text):
    with pytest.raises(FormatError, match="not Orbax's array metadata"):
        orbax_format.parse_key_impls(text)
