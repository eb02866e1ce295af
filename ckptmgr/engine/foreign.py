"""Opening what Orbax wrote: steps, and the bare output of its `Checkpointer`.

Nothing there has digests, so only what TensorStore notices is an error. What ckptmgr does not read
is named, never left out in silence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckptmgr.core import layout, orbax_format
from ckptmgr.core.info import StepInfo
from ckptmgr.core.manifest import FormatError, StoredLeaf, StoredTree
from ckptmgr.core.orbax_format import ForeignLeaf
from ckptmgr.engine.readback import Part
from ckptmgr.engine.reader import Reader
from ckptmgr.engine.steps import OpenItem, OpenStep
from ckptmgr.engine.store import Store
from ckptmgr.errors import CorruptCheckpoint, Problem, StoreError

_UNKNOWN = "the item cannot be read: ckptmgr does not know its kind"
_AGGREGATED = "its value lies in Orbax's aggregate file (msgpack), which ckptmgr does not read"


def foreign_info(step: int, path: str) -> StepInfo:
    """What Orbax's own metadata says of a step; `step` 0 and the like for bare output."""
    data = _json_or_empty(os.path.join(path, layout.CHECKPOINT_METADATA))
    created = (data.get("commit_timestamp_nsecs") or os.stat(path).st_mtime * 1e9) / 1e9
    metrics = data.get("metrics") or _json_or_empty(os.path.join(path, layout.metrics_file()))
    return StepInfo(step, "foreign", "good", created, None, metrics)


def _json_or_empty(path: str) -> dict[str, Any]:
    """Older Orbax did not write every file."""
    try:
        with open(path, "rb") as file:
            data = json.load(file)
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def is_bare(path: str) -> bool:
    """Whether `path` is the output of Orbax's `Checkpointer`: an item without a step."""
    try:
        text = Store(path).read_file(layout.pytree_metadata("").lstrip("/"))
        found = orbax_format.parse_pytree_metadata(text)
    except (OSError, FormatError):
        return False
    return not found.marked


def open_bare(path: str) -> OpenStep:
    """Opens the output of Orbax's `Checkpointer` as a step with one unnamed state."""
    number = layout.parse_step(os.path.basename(path)) or 0
    item = _tree_item(Store(path), number, "")
    return OpenStep(foreign_info(number, path), path, {layout.DEFAULT_ITEM: item})


def open_foreign(path: str, step: int) -> OpenStep:
    """Opens a step that Orbax's manager wrote."""
    store = Store(path)
    items = {name: _item(store, step, name) for name in _item_names(store)}
    if not any(not item.unreadable for item in items.values()):
        raise CorruptCheckpoint(step, [Problem("", "no item of it can be read by ckptmgr")])
    return OpenStep(foreign_info(step, path), path, items)


def _item_names(store: Store) -> list[str]:
    """The items of a step that Orbax wrote."""
    return [
        name
        for name in sorted(store.names())
        if store.is_dir(name) and not name.startswith(".") and name != layout.METRICS_ITEM
    ]


def _item(store: Store, step: int, name: str) -> OpenItem:
    """One item of a step. Raises CorruptCheckpoint where it is damaged."""
    path = store.path(name)
    if store.exists(layout.pytree_metadata(name)):
        return _tree_item(store, step, name)
    if store.exists(layout.json_item_file(name)):
        try:
            return OpenItem(name, path, None, (json.loads(store.read_file(f"{name}/metadata")),))
        except ValueError:
            pass  # some other handler's own file
    return OpenItem(name, path, None, unreadable=_UNKNOWN)


def _tree_item(store: Store, step: int, name: str) -> OpenItem:
    def at(file: str) -> str:
        return file.lstrip("/")

    def parsed(file: str, parse: Callable[[bytes], Any], default: Any) -> Any:
        if not store.exists(at(file)):
            return default
        try:
            return parse(store.read_file(at(file)))
        except ValueError as exc:
            raise CorruptCheckpoint(step, [Problem(at(file), str(exc))]) from exc

    found = parsed(layout.pytree_metadata(name), orbax_format.parse_pytree_metadata, None)
    impls: dict[str, str] = {}
    directory = layout.array_metadatas_dir(name)
    for file in store.names(at(directory)):
        impls.update(parsed(f"{directory}/{file}", orbax_format.parse_key_impls, {}))
    about = _About(
        parsed(layout.strings_file(name), json.loads, {}),
        impls,
        parsed(layout.sharding_file(name), orbax_format.parse_shardings, {}),
    )
    merged = store.exists(at(f"{name}/{layout.OCDBT_MANIFEST}"))
    ocdbt = merged if found.ocdbt is None else found.ocdbt
    unmerged = [n for n in store.names(name) if n.startswith(layout.containers_prefix())]
    if unmerged and not merged:
        why = "missing; the processes' databases were never merged (the save did not finish)"
        raise CorruptCheckpoint(step, [Problem(at(f"{name}/{layout.OCDBT_MANIFEST}"), why)])
    containers, real = orbax_format.foreign_containers(found.leaves)
    tree = StoredTree(
        (),
        containers,
        driver="zarr3" if found.zarr3 else "zarr",
        ocdbt=ocdbt,
        sparse=found.zarr3 and not found.dense,
    )
    leaves, table = _leaves(tree, store.path(name), step, real, about)
    filled = replace(tree, leaves=tuple(leaves), shardings=tuple(table))
    return OpenItem(name, store.path(name), filled)


@dataclass(frozen=True, slots=True)
class _About:
    """What Orbax's side files say, by dotted leaf name."""

    strings: Mapping[str, str]
    impls: Mapping[str, str]
    shardings: Mapping[str, dict[str, Any]]


def _leaves(
    tree: StoredTree, path: str, step: int, real: list[ForeignLeaf], about: _About
) -> tuple[list[StoredLeaf], list[dict[str, Any]]]:
    names = [".".join(leaf.path) or layout.ROOT_ARRAY for leaf in real]
    with_array = [
        name
        for name, leaf in zip(names, real, strict=True)
        if leaf.value_type != "string" and not leaf.aggregated
    ]
    reader = Reader(step, tree, path, {})
    found = dict(zip(with_array, reader.metadata(with_array), strict=True))
    table: list[dict[str, Any]] = []
    leaves = []
    for name, leaf in zip(names, real, strict=True):
        if leaf.value_type == "string":
            text = about.strings.get(layout.orbax_name(name), "")
            leaves.append(StoredLeaf(leaf.path, "string", value=text))
        elif leaf.aggregated:
            leaves.append(StoredLeaf(leaf.path, "unreadable", value=_AGGREGATED))
        elif isinstance(found[name], str):
            why = f"its array cannot be opened ({found[name]})"
            leaves.append(StoredLeaf(leaf.path, "unreadable", value=why))
        else:
            leaves.append(_array_leaf(leaf, name, found[name], about, table))
    return leaves, table


def _array_leaf(
    leaf: ForeignLeaf, name: str, found: Any, about: _About, table: list[dict[str, Any]]
) -> StoredLeaf:
    shape, dtype, chunk = found
    called = layout.orbax_name(name)
    number = None
    if called in about.shardings:
        if about.shardings[called] not in table:
            table.append(about.shardings[called])
        number = table.index(about.shardings[called])
    kind = {"np.ndarray": "numpy", "scalar": "scalar"}.get(leaf.value_type, "array")
    made = StoredLeaf(leaf.path, kind, shape, dtype, name, dtype, shape, chunk, sharding=number)
    if called in about.impls:
        return replace(made, kind="key", dtype="", shape=shape[:-1], impl=about.impls[called])
    return replace(made, pytype=_python_type(dtype)) if kind == "scalar" else made


def _python_type(dtype: str) -> str:
    """Orbax gives a scalar back as Python's bool, int or float."""
    if dtype == "bool":
        return "bool"
    return "int" if dtype.startswith(("int", "uint")) else "float"


@dataclass(slots=True)
class Look:
    """A step of Orbax's as far as it opens.

    Attributes:
      parts: the arrays that can be read.
      problems: everything of its metadata that is damaged.
      notes: what ckptmgr does not read and so does not check.
    """

    parts: list[Part] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def look(path: str, step: int) -> Look:
    """Opens item by item what Orbax's manager or its `Checkpointer` wrote."""
    store = Store(path)
    bare = is_bare(path)
    found = Look()
    for name in [""] if bare else _item_names(store):
        called = name or os.path.basename(path)
        try:
            item = _tree_item(store, step, name) if bare else _item(store, step, name)
        except CorruptCheckpoint as exc:
            found.problems += exc.problems
        except (FormatError, StoreError) as exc:
            transient = isinstance(exc, StoreError)
            found.problems.append(Problem(called, str(exc), transient=transient))
        else:
            _look_at(item, called, found)
    for file in () if bare else (layout.CHECKPOINT_METADATA, layout.metrics_file()):
        try:
            if store.exists(file):
                json.loads(store.read_file(file))
        except ValueError as exc:
            found.problems.append(Problem(file, f"not JSON ({exc})"))
        except StoreError as exc:
            found.problems.append(Problem(file, str(exc), transient=True))
    return found


def _look_at(item: OpenItem, called: str, found: Look) -> None:
    if item.unreadable:
        found.notes.append(f"{called}: not checked: {item.unreadable}")
    if item.tree is None:
        return
    unreadable = [leaf for leaf in item.tree.leaves if leaf.kind == "unreadable"]
    aside = sum(leaf.value == _AGGREGATED for leaf in unreadable)
    if aside:
        text = f"values of {aside} leaves lie in Orbax's aggregate file (msgpack)"
        found.notes.append(f"{called}: not checked: {text}, which ckptmgr does not read")
    found.problems += [
        Problem(called, leaf.value or "", leaf.dotted)
        for leaf in unreadable
        if leaf.value != _AGGREGATED
    ]
    found.parts.append(Part(called, item.path, item.tree, {}, strict=False))
