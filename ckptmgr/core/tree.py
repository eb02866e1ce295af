"""Pytree <-> named leaves, and the containers as JSON, so that they come back as they were.

`flatten` walks a tree in JAX's own leaf order. Containers that need no user class (dict, list,
tuple, OrderedDict, None) are rebuilt exactly. Others come back in a plain form: a NamedTuple as a
namedtuple of the same name and fields, a dataclass, flax struct, nnx State or any other
registered node as a dict of its fields, a defaultdict as a dict.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import ml_dtypes  # noqa: F401  registers bfloat16 and friends with numpy
import numpy as np

from ckptmgr.core import values
from ckptmgr.errors import UnsupportedLeaf

Path = tuple[str, ...]

EXCLUDED = "excluded"


def dotted(path: Path) -> str:
    """The name of a leaf as Orbax spells it; messages use it too."""
    return ".".join(path)


@dataclass(frozen=True, slots=True)
class Flat:
    """A tree taken apart.

    Attributes:
      paths: path of each leaf, keys as strings, in JAX's leaf order.
      sequence_keys: for each leaf, whether each key of its path is a position in a sequence.
      leaves: the leaf objects themselves.
      containers: JSON of the containers; a leaf stands as its number.
      empties: path -> "None", "Dict", "List", "Tuple" or "NamedTuple", for Orbax.
      plain: paths of containers that come back in a plain form, with the class they had.
    """

    paths: tuple[Path, ...]
    sequence_keys: tuple[tuple[bool, ...], ...]
    leaves: tuple[Any, ...]
    containers: Any
    empties: dict[tuple[Path, tuple[bool, ...]], str]
    plain: dict[str, str]


@dataclass
class _Walk:
    paths: list[Path] = field(default_factory=list)
    sequence_keys: list[tuple[bool, ...]] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)
    empties: dict[tuple[Path, tuple[bool, ...]], str] = field(default_factory=dict)
    plain: dict[str, str] = field(default_factory=dict)
    seen: set[Path] = field(default_factory=set)


def flatten(tree: Any) -> Flat:
    """Takes `tree` apart. Raises UnsupportedLeaf for a dict key that cannot be stored."""
    walk = _Walk()
    containers = _visit(tree, (), (), walk)
    return Flat(
        tuple(walk.paths),
        tuple(walk.sequence_keys),
        tuple(walk.leaves),
        containers,
        walk.empties,
        walk.plain,
    )


def key_text(key: Any) -> str:
    """One key of a JAX key path as text, as Orbax spells it."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _children(node: Any) -> list[tuple[Any, Any]] | None:
    """(key, child) of a container in JAX's order; None for a leaf."""
    try:
        pairs = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    except (TypeError, ValueError) as exc:
        raise UnsupportedLeaf(
            "", f"JAX cannot take this {type(node).__name__} apart: {exc}"
        ) from exc
    if len(pairs) == 1 and not pairs[0][0]:
        return None
    return [(path[0], child) for path, child in pairs]


MAX_DEPTH = 200
"""Levels of a tree; JSON encoders and JAX itself recurse."""


def _visit(node: Any, path: Path, sequence: tuple[bool, ...], walk: _Walk) -> Any:
    if len(path) > MAX_DEPTH:
        raise UnsupportedLeaf(dotted(path[:3]) + "...", f"deeper than {MAX_DEPTH} levels")
    if node is None:
        walk.empties[path, sequence] = "None"
        return None
    try:
        children = _children(node)
    except UnsupportedLeaf as exc:
        raise UnsupportedLeaf(dotted(path), str(exc.__cause__)) from exc
    if children is None:
        if path in walk.seen:
            raise UnsupportedLeaf(dotted(path), "two leaves of the tree have this same path")
        walk.seen.add(path)
        walk.paths.append(path)
        walk.sequence_keys.append(sequence)
        walk.leaves.append(node)
        return len(walk.leaves) - 1
    tag, label = _container_kind(node)
    if label:
        walk.plain[dotted(path)] = label
    if not children:
        walk.empties[path, sequence] = _EMPTY_NAMES.get(tag, "Dict")
    found = []
    for key, child in children:
        text = key_text(key)
        in_sequence = hasattr(key, "idx") or isinstance(key, jax.tree_util.FlattenedIndexKey)
        if tag in ("list", "tuple"):
            found.append(_visit(child, (*path, text), (*sequence, True), walk))
            continue
        name = text if tag in ("namedtuple", "object") else getattr(key, "key", text)
        try:
            encoded = values.encode(_plain_key(name), "key")
        except TypeError as exc:
            raise UnsupportedLeaf(dotted((*path, text)), f"its dictionary {exc}") from exc
        found.append([encoded, _visit(child, (*path, text), (*sequence, in_sequence), walk)])
    return {tag: found} if not label else {tag: found, "class": label}


_EMPTY_NAMES = {"list": "List", "tuple": "Tuple", "namedtuple": "NamedTuple"}


def _plain_key(key: Any) -> Any:
    """Dictionary keys of numpy integers are equal to, and stored as, Python's."""
    return int(key) if isinstance(key, np.integer) else key


def _container_kind(node: Any) -> tuple[str, str]:
    """JSON tag of a container and, where it comes back in a plain form, the class it had."""
    kind = type(node)
    if kind in (dict, list, tuple):
        return kind.__name__, ""
    if kind is collections.OrderedDict:
        return "ordereddict", ""
    label = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(node, tuple) and hasattr(kind, "_fields"):
        return "namedtuple", label
    if isinstance(node, dict):
        return "dict", label
    return "object", label


def unflatten(containers: Any, leaf: Callable[[int], Any]) -> Any:
    """The tree again, in plain forms where a user class was; `leaf(i)` gives leaf number i."""
    if containers is None or containers == EXCLUDED:
        return None
    if isinstance(containers, int):
        return leaf(containers)
    tag, body = next((k, v) for k, v in containers.items() if k != "class")
    if tag == "list":
        return [unflatten(child, leaf) for child in body]
    if tag == "tuple":
        return tuple(unflatten(child, leaf) for child in body)
    pairs = [(values.decode(key), unflatten(child, leaf)) for key, child in body]
    if tag == "namedtuple":
        name = containers["class"].rsplit(".", 1)[-1]
        made = _namedtuple(name, tuple(key for key, _ in pairs))
        return made(*(child for _, child in pairs))
    return collections.OrderedDict(pairs) if tag == "ordereddict" else dict(pairs)


@functools.lru_cache(maxsize=1024)
def _namedtuple(name: str, fields: tuple[str, ...]) -> Any:
    """One class per name and fields, so that two restored trees have the same structure."""
    return collections.namedtuple(name, fields, rename=True)


def without_leaves(containers: Any, keep: dict[int, int]) -> Any:
    """Containers with leaves renumbered by `keep`; those not in it are marked as left out."""
    if isinstance(containers, int) and not isinstance(containers, bool):
        return keep.get(containers, EXCLUDED)
    if not isinstance(containers, dict):
        return containers
    out: dict[str, Any] = {}
    for tag, body in containers.items():
        if tag == "class":
            out[tag] = body
        elif tag in ("list", "tuple"):
            out[tag] = [without_leaves(child, keep) for child in body]
        else:
            out[tag] = [[key, without_leaves(child, keep)] for key, child in body]
    return out


@dataclass(frozen=True, slots=True)
class Match:
    """How the leaves of a target lie in what is stored.

    Attributes:
      pairs: (number of the stored leaf, number of the target leaf), in target order.
      missing: target paths that are not stored.
      extra: stored paths that the target does not have.
    """

    pairs: tuple[tuple[int, int], ...]
    missing: tuple[Path, ...]
    extra: tuple[Path, ...]


def match(stored: Sequence[Path], target: Sequence[Path]) -> Match:
    """Pairs leaves by path; keys compare as text, so a dataclass fits the dict it became."""
    places = {path: i for i, path in enumerate(stored)}
    wanted = set(target)
    pairs = tuple((places[path], j) for j, path in enumerate(target) if path in places)
    missing = tuple(path for path in target if path not in places)
    extra = tuple(path for path in stored if path not in wanted)
    return Match(pairs, missing, extra)
