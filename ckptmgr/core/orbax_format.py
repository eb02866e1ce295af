"""The metadata files of an Orbax 0.12 step, built and parsed as text.

What Orbax reads of a step of ours is described in `docs/FORMAT.md`; every `_METADATA` of ours
carries the extra key `MARK`, which Orbax ignores.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptmgr.core import layout, manifest
from ckptmgr.core.manifest import FormatError, StoredLeaf, StoredTree
from ckptmgr.core.tree import Flat

MARK = "ckptmgr"

_HANDLERS = "orbax.checkpoint._src.handlers."
STANDARD_HANDLER = _HANDLERS + "standard_checkpoint_handler.StandardCheckpointHandler"
JSON_HANDLER = _HANDLERS + "json_checkpoint_handler.JsonCheckpointHandler"

_SEQUENCE, _DICT = 1, 2
_VALUE_TYPES = {
    "array": "jax.Array",
    "key": "jax.Array",
    "numpy": "np.ndarray",
    "bytes": "np.ndarray",
    "scalar": "scalar",
    "string": "string",
}
EMPTY_TYPES = ("None", "Dict", "List", "Tuple", "NamedTuple")


def _compact(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))


def _entry_key(path: Sequence[str]) -> str:
    return str(tuple(path))


def _key_metadata(path: Sequence[str], sequence: Sequence[bool]) -> list[dict[str, Any]]:
    return [
        {"key": key, "key_type": _SEQUENCE if in_sequence else _DICT}
        for key, in_sequence in zip(path, sequence, strict=True)
    ]


def pytree_metadata(flat: Flat, tree: StoredTree) -> str:
    """`_METADATA` of an item: every leaf that Orbax can find, and the empty containers."""
    entries: dict[str, Any] = {}
    keys = dict(zip(flat.paths, flat.sequence_keys, strict=True))
    for leaf in _listed(tree):
        value: dict[str, Any] = {"value_type": _value_type(leaf, tree), "skip_deserialize": False}
        if value["value_type"] == "jax.Array":
            value["write_shape"] = list(leaf.chunk)
        entries[_entry_key(leaf.path)] = {
            "key_metadata": _key_metadata(leaf.path, keys[leaf.path]),
            "value_metadata": value,
        }
    for (path, sequence), name in flat.empties.items():
        if path:
            entries[_entry_key(path)] = {
                "key_metadata": _key_metadata(path, sequence),
                "value_metadata": {
                    "value_type": "None" if name == "NamedTuple" else name,
                    "skip_deserialize": True,
                },
            }
    return _compact(
        {
            "tree_metadata": entries,
            "use_ocdbt": True,
            "use_zarr3": tree.driver == "zarr3",
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
            MARK: {"format": manifest.FORMAT},
        }
    )


def _listed(tree: StoredTree) -> list[StoredLeaf]:
    """The leaves that Orbax can find: not what lies aside, nor text whose name is taken."""
    listed = []
    taken: set[str] = set()
    for leaf in tree.leaves:
        if leaf.has_array:
            found = not layout.is_aside(leaf.name)
        else:
            found = leaf.dotted not in taken and (bool(leaf.dotted) or not leaf.path)
        if found:
            listed.append(leaf)
        taken.add(leaf.dotted)
    return listed


def _listed_arrays(tree: StoredTree) -> list[StoredLeaf]:
    return [leaf for leaf in _listed(tree) if leaf.has_array]


def _value_type(leaf: StoredLeaf, tree: StoredTree) -> str:
    if leaf.kind == "scalar" and not leaf.has_array:
        return "string"  # an integer beyond 64 bits
    if leaf.pytype == "complex":
        return "np.ndarray"
    if leaf.kind in ("array", "key") and (
        leaf.sharding is None or tree.shardings[leaf.sharding]["type"] not in ("named", "single")
    ):
        return "np.ndarray"  # Orbax restores nothing of an item where a sharding is missing
    return _VALUE_TYPES[leaf.kind]


def strings(tree: StoredTree) -> str | None:
    """`_strings.json`, or None where the tree has no string."""
    found = {leaf.dotted: leaf.value for leaf in _listed(tree) if leaf.value is not None}
    return _compact(found) if found else None


def shardings(tree: StoredTree) -> str:
    """`_sharding`: base64url of the leaf name -> a JSON string; the same text once per sharding."""
    texts = [_text(entry) for entry in tree.shardings]
    found = {
        base64.urlsafe_b64encode(layout.orbax_name(leaf.name).encode()).decode(): texts[
            leaf.sharding
        ]
        for leaf in _listed_arrays(tree)
        if leaf.sharding is not None and texts[leaf.sharding]
    }
    return _compact(found)


def _text(entry: Mapping[str, Any]) -> str:
    """A sharding as Orbax writes it, "" for one that it has no words for."""
    return _compact(_sharding(entry)) if entry["type"] in ("named", "single") else ""


def _sharding(entry: Mapping[str, Any]) -> dict[str, Any]:
    if entry["type"] == "single":
        return {"sharding_type": "SingleDeviceSharding", "device_str": entry["device"]}
    sizes = [size for _, size in entry["axes"]]
    devices = [{"id": number} for number in entry["device_ids"]]
    return {
        "sharding_type": "NamedSharding",
        "shape": sizes,
        "axis_names": [name for name, _ in entry["axes"]],
        "axis_types": entry["axis_types"],
        "partition_spec": [
            axes[0] if isinstance(axes, list) and len(axes) == 1 else axes for axes in entry["spec"]
        ],
        "device_mesh": {"mesh": _nested(devices, sizes)},
    }


def _nested(flat: Sequence[Any], sizes: Sequence[int]) -> Any:
    if len(sizes) <= 1:
        return list(flat)
    step = len(flat) // sizes[0]
    return [_nested(flat[i : i + step], sizes[1:]) for i in range(0, len(flat), step)]


def array_metadatas(tree: StoredTree) -> str:
    """`array_metadatas/process_<N>`: chunk shapes, and which arrays are PRNG keys."""
    found = []
    for leaf in _listed_arrays(tree):
        if leaf.kind not in ("array", "key"):
            continue
        entry: dict[str, Any] = {
            "param_name": layout.orbax_name(leaf.name),
            "write_shape": list(leaf.chunk),
            "chunk_shape": list(leaf.chunk),
        }
        entry["ext_metadata"] = {"random_key_impl": leaf.impl} if leaf.impl else None
        found.append({"array_metadata": entry})
    return _compact({"array_metadatas": found})


def checkpoint_metadata(
    items: Mapping[str, str], metrics: Mapping[str, Any] | None, started: float, committed: float
) -> str:
    """`_CHECKPOINT_METADATA` of a step; times in seconds since the epoch."""
    handlers = {
        name: STANDARD_HANDLER if kind == "tree" else JSON_HANDLER for name, kind in items.items()
    }
    if metrics:
        handlers[layout.METRICS_ITEM] = JSON_HANDLER
    return _compact(
        {
            "item_handlers": handlers,
            "metrics": metrics or {},
            "performance_metrics": {},
            "init_timestamp_nsecs": int(started * 1e9),
            "commit_timestamp_nsecs": int(committed * 1e9),
            "custom_metadata": {},
        }
    )


@dataclass(frozen=True, slots=True)
class ForeignLeaf:
    """A leaf as Orbax's `_METADATA` lists it.

    Attributes:
      path: its keys as text.
      sequence: for each key whether it is a position in a sequence.
      value_type: Orbax's word for it; may be one of the empty types.
      aggregated: whether its value lies in old Orbax's msgpack file.
    """

    path: tuple[str, ...]
    sequence: tuple[bool, ...]
    value_type: str
    aggregated: bool = False


@dataclass(frozen=True, slots=True)
class ForeignTree:
    """What Orbax's `_METADATA` says of an item.

    Attributes:
      leaves: real leaves and empty containers.
      zarr3: whether the arrays are zarr3.
      ocdbt: whether they lie in OCDBT; None where it does not say.
      marked: whether the item is ours.
      dense: whether chunks equal to the fill value were written too.
    """

    leaves: tuple[ForeignLeaf, ...]
    zarr3: bool
    ocdbt: bool | None
    marked: bool
    dense: bool


def parse_pytree_metadata(text: bytes) -> ForeignTree:
    """Parses `_METADATA` of any Orbax from 0.4 on."""
    try:
        data = json.loads(text)
        leaves = []
        for entry in data["tree_metadata"].values():
            keys = entry["key_metadata"]
            leaves.append(
                ForeignLeaf(
                    tuple(str(key["key"]) for key in keys),
                    tuple(key["key_type"] == _SEQUENCE for key in keys),
                    (kind := entry["value_metadata"]["value_type"]),
                    kind not in EMPTY_TYPES
                    and bool(entry["value_metadata"].get("skip_deserialize")),
                )
            )
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise FormatError(f"not Orbax's tree metadata ({exc!r})") from exc
    return ForeignTree(
        tuple(leaves),
        bool(data.get("use_zarr3")),
        data.get("use_ocdbt"),
        MARK in data,
        bool(data.get("store_array_data_equal_to_fill_value")),
    )


@dataclass(slots=True)
class _Node:
    in_sequence: bool
    children: dict[str, _Node | ForeignLeaf] = field(default_factory=dict)


def foreign_containers(leaves: Sequence[ForeignLeaf]) -> tuple[Any, list[ForeignLeaf]]:
    """Containers in our JSON for Orbax's leaves, and the real leaves in the order numbered.

    Orbax keeps keys as text and sequences as lists; so that is what comes back.
    """
    real: list[ForeignLeaf] = []
    if len(leaves) == 1 and not leaves[0].path:
        return _foreign_value(leaves[0], real), real
    root = _Node(bool(leaves) and leaves[0].sequence[0])
    for leaf in leaves:
        node = root
        for key, in_sequence in zip(leaf.path[:-1], leaf.sequence[1:], strict=True):
            below = node.children.setdefault(key, _Node(in_sequence))
            if not isinstance(below, _Node):
                raise FormatError(f"{'.'.join(leaf.path)} lies below another leaf")
            node = below
        if leaf.path[-1] in node.children:
            raise FormatError(f"{'.'.join(leaf.path)} is another leaf's container as well")
        node.children[leaf.path[-1]] = leaf
    return _foreign_node(root, real), real


def _foreign_node(node: _Node, real: list[ForeignLeaf]) -> Any:
    made = [
        [
            key,
            _foreign_node(child, real) if isinstance(child, _Node) else _foreign_value(child, real),
        ]
        for key, child in node.children.items()
    ]
    return {"list": [child for _, child in made]} if node.in_sequence else {"dict": made}


def _foreign_value(leaf: ForeignLeaf, real: list[ForeignLeaf]) -> Any:
    empty: dict[str, Any] = {
        "None": None,
        "Dict": {"dict": []},
        "List": {"list": []},
        "Tuple": {"tuple": []},
    }
    if leaf.value_type in empty:
        return empty[leaf.value_type]
    if leaf.value_type == "NamedTuple":
        return None
    real.append(leaf)
    return len(real) - 1


def parse_shardings(text: bytes) -> dict[str, dict[str, Any]]:
    """`_sharding` as leaf name -> a sharding of our table's form; unknown types are left out."""
    out: dict[str, dict[str, Any]] = {}
    try:
        for key, value in json.loads(text).items():
            entry = json.loads(value)
            name = base64.urlsafe_b64decode(key).decode()
            if entry.get("sharding_type") == "SingleDeviceSharding":
                out[name] = {"type": "single", "device": entry["device_str"]}
            elif entry.get("sharding_type") == "NamedSharding":
                axes = list(zip(entry["axis_names"], entry["shape"], strict=True))
                out[name] = {
                    "type": "named",
                    "axes": [list(axis) for axis in axes],
                    "spec": [
                        [part] if isinstance(part, str) else part
                        for part in entry["partition_spec"]
                    ],
                }
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise FormatError(f"not Orbax's sharding file ({exc!r})") from exc
    return out


def parse_key_impls(text: bytes) -> dict[str, str]:
    """Leaf name -> PRNG implementation, from an `array_metadatas/process_<N>`."""
    try:
        entries = [entry["array_metadata"] for entry in json.loads(text)["array_metadatas"]]
        return {
            entry["param_name"]: entry["ext_metadata"]["random_key_impl"]
            for entry in entries
            if (entry.get("ext_metadata") or {}).get("random_key_impl")
        }
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise FormatError(f"not Orbax's array metadata ({exc!r})") from exc
