"""Opening one step: its metadata, checked as a whole before any of it is used.

Works on a step's directory, whoever wrote it; no device is touched and no array data is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptmgr.core import layout, manifest, orbax_format, values
from ckptmgr.core.info import StepInfo
from ckptmgr.core.manifest import FormatError, Manifest, Receipt, StoredLeaf, StoredTree
from ckptmgr.engine import arrays
from ckptmgr.engine.store import Store
from ckptmgr.errors import CorruptCheckpoint, Problem, StepNotFound, StoreError


@dataclass(frozen=True, slots=True)
class OpenItem:
    """One item of an open step.

    Attributes:
      name: its name.
      path: its absolute directory.
      tree: the stored tree, None for the state of an iterator and the like.
      state: the decoded state where `tree` is None.
      digests: (leaf, chunk index) -> xxh3-128, as recorded.
      notes: what could not be understood of a foreign item.
    """

    name: str
    path: str
    tree: StoredTree | None
    state: Any = None
    digests: arrays.Digests = None  # type: ignore[assignment]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenStep:
    """A step whose metadata is in memory and consistent."""

    info: StepInfo
    path: str
    items: Mapping[str, OpenItem]

    @property
    def is_single(self) -> bool:
        """Whether it holds one unnamed state rather than named items."""
        return set(self.items) == {layout.DEFAULT_ITEM}


def info_of(document: Manifest) -> StepInfo:
    """What a manifest says, for the user."""
    return StepInfo(
        step=document.step,
        kind=document.kind,
        status="good",
        created=document.created,
        nbytes=document.nbytes,
        metrics=values.decode(document.metrics) or {},
        extra=values.decode(document.extra),
        topology=document.topology,
    )


def foreign_info(step: int, path: str) -> StepInfo:
    """What Orbax's own metadata says of a step."""
    created = os.stat(path).st_mtime
    metrics: dict[str, Any] = {}
    try:
        with open(os.path.join(path, layout.CHECKPOINT_METADATA), "rb") as file:
            data = json.load(file)
        created = (data.get("commit_timestamp_nsecs") or created * 1e9) / 1e9
        metrics = data.get("metrics") or {}
    except (OSError, ValueError, AttributeError, TypeError):
        pass  # older Orbax wrote none
    return StepInfo(step, "foreign", "good", created, None, metrics)


def open_step(path: str, step: int, document: Manifest | None) -> OpenStep:
    """Opens the step in directory `path`; `document` is its manifest, None for Orbax's.

    Raises CorruptCheckpoint with every problem found in its metadata.
    """
    store = Store(path)
    if document is None:
        return _open_foreign(store, step)
    texts, problems = _checked_files(store, document)
    if problems:
        raise CorruptCheckpoint(step, problems)
    items = {}
    for name, kind in document.items.items():
        try:
            item = _open_item(store, name, kind, texts)
        except FormatError as exc:
            problems.append(Problem(name, str(exc)))
            continue
        items[name] = item
        problems += _structure_problems(store, item, texts)
    if problems:
        raise CorruptCheckpoint(step, problems)
    plain = {
        f"{name}: {where}": label
        for name, item in items.items()
        if item.tree
        for where, label in item.tree.plain.items()
    }
    return OpenStep(replace(info_of(document), plain=plain), path, items)


def _checked_files(store: Store, document: Manifest) -> tuple[dict[str, bytes], list[Problem]]:
    """The metadata files that the manifest lists, each compared with its digest."""
    texts: dict[str, bytes] = {}
    problems = []
    for name, (size, digest) in document.files.items():
        try:
            text = store.read_file(name)
        except StoreError as exc:
            gone = isinstance(exc.__cause__, FileNotFoundError)
            problems.append(Problem(name, "missing" if gone else str(exc)))
            continue
        if len(text) != size:
            problems.append(Problem(name, f"has {len(text)} bytes instead of {size}"))
        elif manifest.digest(text) != digest:
            problems.append(Problem(name, "has other bytes than were written"))
        texts[name] = text
    return texts, problems


def _open_item(store: Store, name: str, kind: str, texts: Mapping[str, bytes]) -> OpenItem:
    path = store.path(name)
    if kind == "state":
        text = texts.get(layout.state_file(name, 0))
        if text is None:
            raise FormatError("its state is not in the manifest's list of files")
        return OpenItem(name, path, None, values.decode(json.loads(text)), {})
    text = texts.get(layout.tree_file(name))
    if text is None:
        raise FormatError("its tree is not in the manifest's list of files")
    digests = {
        (chunk.leaf, chunk.index): chunk.digest
        for receipt in _receipts(name, texts)
        for chunk in receipt.chunks
    }
    return OpenItem(name, path, StoredTree.from_json(text), None, digests)


def _receipts(item: str, texts: Mapping[str, bytes]) -> list[Receipt]:
    prefix = layout.receipt_file(item, 0).rpartition("/")[0] + "/"
    return [
        Receipt.from_json(text)
        for name, text in texts.items()
        if name.startswith(prefix) and layout.parse_receipt(name.removeprefix(prefix)) is not None
    ]


def _structure_problems(store: Store, item: OpenItem, texts: Mapping[str, bytes]) -> list[Problem]:
    """Chunks that no receipt has, and data files that are missing or cut short."""
    if item.tree is None:
        return []
    receipts = _receipts(item.name, texts)
    problems = []
    for number, index, why in manifest.missing_chunks(item.tree, receipts):
        leaf = item.tree.leaves[number].dotted if number < len(item.tree.leaves) else ""
        problems.append(Problem(item.name, f"chunk {list(index)} {why}", leaf))
    for receipt in receipts:
        for name, size in receipt.files.items():
            full = f"{item.name}/{name}"
            try:
                found = os.stat(store.path(full)).st_size
            except FileNotFoundError:
                problems.append(Problem(full, "missing"))
                continue
            if found != size:
                problems.append(Problem(full, f"has {found} bytes instead of {size}"))
    return problems


# -- steps that Orbax wrote -------------------------------------------------------------------


def _open_foreign(store: Store, step: int) -> OpenStep:
    info = foreign_info(step, store.root)
    items: dict[str, OpenItem] = {}
    for name in sorted(store.names()):
        if not store.is_dir(name) or name.startswith("."):
            continue
        if store.exists(layout.pytree_metadata(name)):
            items[name] = _foreign_item(store, step, name)
        elif store.exists(layout.json_item_file(name)) and name != layout.METRICS_ITEM:
            text = store.read_file(layout.json_item_file(name))
            try:
                items[name] = OpenItem(name, store.path(name), None, json.loads(text), {})
            except ValueError:
                continue  # some other handler's own file
    if not items:
        if store.exists(layout.pytree_metadata("").lstrip("/")):
            raise StepNotFound(
                f"{store.root} is an item inside a step of Orbax; pass the directory above it"
            )
        raise CorruptCheckpoint(step, [Problem("", "no item of it can be read by ckptmgr")])
    return OpenStep(info, store.root, items)


def _foreign_item(store: Store, step: int, name: str) -> OpenItem:
    def parsed(path: str, parse: Callable[[bytes], Any], default: Any) -> Any:
        if not store.exists(path):
            return default
        try:
            return parse(store.read_file(path))
        except FormatError as exc:
            raise CorruptCheckpoint(step, [Problem(path, str(exc))]) from exc

    found = parsed(layout.pytree_metadata(name), orbax_format.parse_pytree_metadata, None)
    shardings = parsed(layout.sharding_file(name), orbax_format.parse_shardings, {})
    strings = parsed(layout.strings_file(name), json.loads, {})
    impls: dict[str, str] = {}
    for file in store.names(layout.array_metadatas_dir(name)):
        path = f"{layout.array_metadatas_dir(name)}/{file}"
        impls.update(parsed(path, orbax_format.parse_key_impls, {}))
    containers, real = orbax_format.foreign_containers(found.leaves)
    ocdbt = found.ocdbt
    if ocdbt is None:
        ocdbt = store.exists(f"{name}/{layout.OCDBT_MANIFEST}")
    if ocdbt and not store.exists(f"{name}/{layout.OCDBT_MANIFEST}"):
        why = "missing; the processes' databases were never merged (the save did not finish)"
        raise CorruptCheckpoint(step, [Problem(f"{name}/{layout.OCDBT_MANIFEST}", why)])
    tree = StoredTree((), containers, driver="zarr3" if found.zarr3 else "zarr", ocdbt=ocdbt)
    leaves, table, notes = _foreign_leaves(
        tree, store.path(name), step, real, strings, impls, shardings
    )
    return OpenItem(
        name,
        store.path(name),
        replace(tree, leaves=tuple(leaves), shardings=tuple(table)),
        None,
        {},
        tuple(notes),
    )


def _foreign_leaves(
    tree: StoredTree,
    path: str,
    step: int,
    real: list[orbax_format.ForeignLeaf],
    strings: Mapping[str, str],
    impls: Mapping[str, str],
    shardings: Mapping[str, dict[str, Any]],
) -> tuple[list[StoredLeaf], list[dict[str, Any]], list[str]]:
    names = [".".join(leaf.path) for leaf in real]
    with_array = [n for n, leaf in zip(names, real, strict=True) if leaf.value_type != "string"]
    reader = arrays.Reader(step, tree, path, {})
    found = dict(zip(with_array, reader.metadata(with_array), strict=True))
    table: list[dict[str, Any]] = []
    leaves, notes = [], []
    for name, leaf in zip(names, real, strict=True):
        if leaf.value_type == "string":
            leaves.append(StoredLeaf(leaf.path, "string", value=strings.get(name, "")))
            continue
        about = found[name]
        if isinstance(about, str):
            notes.append(f"{name}: its array cannot be opened ({about})")
            leaves.append(StoredLeaf(leaf.path, "unreadable", value=about))
            continue
        shape, dtype, chunk = about
        kinds = {"np.ndarray": "numpy", "scalar": "scalar"}
        kind = kinds.get(leaf.value_type, "array")
        number = None
        if name in shardings:
            if shardings[name] not in table:
                table.append(shardings[name])
            number = table.index(shardings[name])
        made = StoredLeaf(leaf.path, kind, shape, dtype, name, dtype, shape, chunk, sharding=number)
        if name in impls:
            made = replace(made, kind="key", dtype="", shape=shape[:-1], impl=impls[name])
        elif kind == "scalar":
            made = replace(made, pytype=_python_type(dtype))
        leaves.append(made)
    return leaves, table, notes


def _python_type(dtype: str) -> str:
    """Orbax gives a scalar back as Python's bool, int or float."""
    if dtype == "bool":
        return "bool"
    return "int" if dtype.startswith(("int", "uint")) else "float"
