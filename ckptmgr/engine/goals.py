"""What a restore wants: the target, or the tree as it was saved, as one goal per leaf.

No array data is read here; every leaf that does not fit is found before anything is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ckptmgr.core import manifest, tree
from ckptmgr.core.boxes import Box, tiles, whole
from ckptmgr.core.manifest import StoredLeaf, StoredTree
from ckptmgr.engine import shardings
from ckptmgr.engine.steps import OpenItem
from ckptmgr.errors import CorruptCheckpoint, Problem, TreeMismatch
from ckptmgr.options import Restore

WHOLE_BYTES = 2**20
"""Up to this size a leaf is read once and cut by the device transfer: one transfer per leaf costs
less than one per shard."""


class Goal(NamedTuple):
    """What one stored leaf shall become.

    Attributes:
      leaf: number of the stored leaf.
      kind: "jax", "numpy", "python", "key", "string" or "bytes".
      dtype: numpy dtype of the result's elements ("" for keys and strings).
      wish: the boxes wanted, and on which devices; no devices where the value goes whole.
      sharding: of "jax" and "key"; None for an uncommitted array on the default device.
      spread: how it is read where its replicas lie in several processes that read a part each, and
        have the devices pass it on; `wish` is of this. None where it is read as it will lie.
      weak_type: of 0-d "jax" results.
      convert: of "python": the type.
    """

    leaf: int
    kind: str
    dtype: str = ""
    wish: shardings.Wish | None = None
    sharding: Any = None
    spread: Any = None
    weak_type: bool = False
    convert: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Goals:
    """The goals in the order of the result's leaves, and how to put the leaves together."""

    goals: tuple[Goal, ...]
    build: Callable[[Sequence[Any]], Any]
    notes: tuple[str, ...] = ()


def goals_without_target(item: OpenItem, mesh: jax.sharding.Mesh | None, step: int) -> Goals:
    """Everything as it was saved: numpy arrays, or on `mesh` with the saved partition specs."""
    stored = stored_tree(item)
    unreadable = [leaf for leaf in stored.leaves if leaf.kind == "unreadable"]
    if unreadable:
        problems = [Problem(item.name, str(leaf.value), leaf.dotted) for leaf in unreadable]
        raise CorruptCheckpoint(step, problems)
    notes: dict[str, list[str]] = {}
    goals = []
    misfits: dict[str, str] = {}
    for i, leaf in enumerate(stored.leaves):
        try:
            goals.append(_goal_as_saved(i, leaf, stored, mesh, notes))
        except ValueError as exc:
            misfits[leaf.dotted] = f"placement: {exc}"
    if misfits:
        raise TreeMismatch(f"step {step}", len(stored.leaves), differing=misfits)

    def build(leaves: Sequence[Any]) -> Any:
        return tree.unflatten(stored.containers, lambda i: leaves[i])

    told = [f"{note}: {_some(names)}" for note, names in notes.items()]
    return Goals(tuple(goals), build, tuple(told))


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more leaves"


def _goal_as_saved(
    number: int,
    leaf: StoredLeaf,
    stored: StoredTree,
    mesh: jax.sharding.Mesh | None,
    notes: dict[str, list[str]],
) -> Goal:
    if leaf.kind == "scalar":
        return _python_goal(number, leaf)
    if leaf.kind in ("string", "bytes"):
        return _whole_goal(number, leaf, leaf.kind)
    if leaf.kind == "key" or (leaf.kind == "array" and mesh is not None):
        sharding: Any = None
        if mesh is not None:
            saved = None if leaf.sharding is None else stored.shardings[leaf.sharding]
            sharding, found = shardings.on_mesh(saved, leaf.shape, mesh)
            for note in found:
                notes.setdefault(note, []).append(leaf.dotted)
        return _device_goal(number, leaf, leaf.dtype, sharding)
    return _whole_goal(number, leaf, "numpy")


@functools.lru_cache(maxsize=4096)
def _whole_wish(shape: tuple[int, ...]) -> shardings.Wish:
    box = whole(shape)
    return shardings.Wish((box,), (), box.size, box.size)


def _whole_goal(number: int, leaf: StoredLeaf, kind: str, dtype: str | None = None) -> Goal:
    wish = _whole_wish(leaf.stored_shape) if leaf.has_array else None
    return Goal(number, kind, leaf.dtype if dtype is None else dtype, wish)


def _python_goal(
    number: int, leaf: StoredLeaf, convert: Callable[[Any], Any] | None = None
) -> Goal:
    kinds: dict[str, Callable[[Any], Any]] = {
        "int": int,
        "float": float,
        "bool": bool,
        "complex": complex,
    }
    goal = _whole_goal(number, leaf, "python")
    convert = convert or kinds.get(leaf.pytype) or np.dtype(leaf.dtype).type
    return Goal(goal.leaf, goal.kind, goal.dtype, goal.wish, convert=convert)


def _device_goal(
    number: int, leaf: StoredLeaf, dtype: str, sharding: Any, weak_type: bool = False
) -> Goal:
    kind = "key" if leaf.kind == "key" else "jax"
    if _is_wide(dtype) and not jax.config.read("jax_enable_x64"):
        raise ValueError(f"{dtype} needs jax_enable_x64; without it JAX would cut the values")
    place = physical(sharding, leaf)
    wish = _device_wish(place, leaf.stored_shape, manifest.itemsize(leaf.stored_dtype))
    return Goal(number, kind, dtype, wish, sharding, weak_type=weak_type)


@functools.lru_cache(maxsize=4096)
def _device_wish(sharding: Any, shape: tuple[int, ...], itemsize: int) -> shardings.Wish:
    """Of an array on devices; small ones go there whole."""
    goes_whole = _whole_wish(shape)
    if sharding is None:
        return goes_whole
    found = shardings.wish(sharding, shape)
    if sharding.is_fully_addressable and goes_whole.elements * itemsize <= WHOLE_BYTES:
        return replace(goes_whole, elements=found.elements)
    return found


def _spread(goal: Goal, leaf: StoredLeaf) -> Goal | str:
    """The goal with each process reading a part, where that pays; else why it does not."""
    sharding = goal.sharding
    if goal.kind != "jax" or sharding is None or sharding.is_fully_addressable:
        return "it lies in one process"
    if leaf.nbytes <= WHOLE_BYTES:
        return f"it has no more than {WHOLE_BYTES} bytes"
    cut = shardings.spread(sharding, leaf.stored_shape)
    if isinstance(cut, str):
        return cut
    now, then = (
        _chunk_elements(leaf, shardings.needs_of_first(which, leaf.stored_shape))
        for which in (sharding, cut)
    )
    if then * 2 > now:
        return "a process would read more than half of it all the same, for its chunks are large"
    return goal._replace(wish=shardings.wish(cut, leaf.stored_shape), spread=cut)


def _chunk_elements(leaf: StoredLeaf, needed: Iterable[Box]) -> int:
    """Elements of the chunks that meet the boxes, each chunk counted once."""
    met = {manifest.chunk_index(leaf, tile) for box in needed for tile in tiles(box, leaf.chunk)}
    return sum(manifest.chunk_box(leaf, index).size for index in met)


def physical(sharding: Any, leaf: StoredLeaf) -> Any:
    """A key array's sharding speaks of keys; their words lie in one trailing dimension."""
    if leaf.kind != "key" or not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    spec = (*sharding.spec, *(None,) * (len(leaf.shape) - len(sharding.spec)))
    return sharding.update(spec=jax.sharding.PartitionSpec(*spec))


def goals_for_target(
    item: OpenItem, like: Any, where: str, *, cast: bool, partial: bool, options: Restore
) -> Goals:
    """What `like` asks for. Raises TreeMismatch listing every leaf that does not fit."""
    stored = stored_tree(item)
    pairs, treedef = jax.tree_util.tree_flatten_with_path(like)
    paths = [tuple(tree.key_text(key) for key in path) for path, _ in pairs]
    matched = tree.match([leaf.path for leaf in stored.leaves], paths)
    differing: dict[str, str] = {}
    notes: dict[str, list[str]] = {}
    goals = []
    for number, position in matched.pairs:
        leaf, target = stored.leaves[number], pairs[position][1]
        goal = _goal_for(number, leaf, target, cast, options)
        if isinstance(goal, str):
            differing[leaf.dotted] = goal
            continue
        if options.broadcast_replicas and goal.kind == "jax":
            cut = _spread(goal, leaf)
            note = f"not broadcast: {cut}" if isinstance(cut, str) else "read in parts, broadcast"
            notes.setdefault(note, []).append(leaf.dotted)
            goal = goal if isinstance(cut, str) else cut
        goals.append(goal)
    extra = () if partial else matched.extra
    if matched.missing or extra or differing:
        raise TreeMismatch(
            where,
            max(len(paths), len(stored.leaves)),
            [tree.dotted(path) or "(the root)" for path in matched.missing],
            [tree.dotted(path) or "(the root)" for path in extra],
            differing,
        )
    told = tuple(f"{note}: {_some(names)}" for note, names in notes.items())
    return Goals(tuple(goals), lambda leaves: jax.tree_util.tree_unflatten(treedef, leaves), told)


def _goal_for(
    number: int, leaf: StoredLeaf, target: Any, cast: bool, options: Restore
) -> Goal | str:
    """The goal for one leaf, or how it differs from the target."""
    if leaf.kind == "unreadable":
        return f"unreadable: {leaf.value}"
    if leaf.kind == "array" and isinstance(target, _ON_DEVICES):
        return _goal_for_array(number, leaf, target, cast, options)
    if isinstance(target, str) or leaf.kind == "string":
        fits = isinstance(target, str) and leaf.kind == "string"
        return _whole_goal(number, leaf, "string") if fits else _kinds_differ(leaf, target)
    if isinstance(target, (bytes, bytearray)):
        fits = leaf.stored_dtype == "uint8" and len(leaf.shape) == 1
        return _whole_goal(number, leaf, "bytes") if fits else _kinds_differ(leaf, target)
    if isinstance(target, (bool, int, float, complex)) and not isinstance(target, np.generic):
        return _goal_for_python(number, leaf, target, cast)
    if not hasattr(target, "shape") or not hasattr(target, "dtype"):
        return _kinds_differ(leaf, target)
    if not leaf.has_array:
        return _kinds_differ(leaf, target)
    return _goal_for_array(number, leaf, target, cast, options)


_ON_DEVICES = (jax.ShapeDtypeStruct, jax.Array)
"""What most leaves of a target are."""


def _goal_for_array(
    number: int, leaf: StoredLeaf, target: Any, cast: bool, options: Restore
) -> Goal | str:
    name = _name_of(target.dtype)
    wants_key = name is None
    if wants_key != (leaf.kind == "key"):
        return _kinds_differ(leaf, target)
    if tuple(target.shape) != leaf.shape:
        return f"shape: stored {leaf.shape}, target {tuple(target.shape)}"
    if wants_key and str(target.dtype) != f"key<{_impl_tag(leaf.impl)}>":
        return f"dtype: stored key<{_impl_tag(leaf.impl)}>, target {target.dtype}"
    dtype = name or ""
    if not wants_key and not _may_become(leaf, dtype, cast):
        advice = " (cast=True converts)" if _castable(leaf.dtype, dtype) else ""
        return f"dtype: stored {leaf.dtype}, target {dtype}{advice}"
    if isinstance(target, np.generic):
        return _python_goal(number, leaf, np.dtype(dtype).type)
    if isinstance(target, np.ndarray):
        return _whole_goal(number, leaf, "numpy", dtype)
    sharding = getattr(target, "sharding", None)
    if isinstance(target, jax.Array) and not target.committed:
        sharding = None
    elif sharding is None and options.sharding is not None:
        given = options.sharding
        sharding = given if isinstance(given, jax.sharding.Sharding) else None
        if sharding is None:
            sharding = given(leaf.dotted, leaf.shape, target.dtype)
    try:
        weak = bool(getattr(target, "weak_type", False))
        return _device_goal(number, leaf, dtype, sharding, weak)
    except ValueError as exc:
        return f"placement: {exc}"


@functools.lru_cache(maxsize=256)
def _name_of(dtype: Any) -> str | None:
    """The name of a dtype, None for that of keys."""
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return None if is_key else str(np.dtype(dtype).name)


def _is_wide(dtype: str) -> bool:
    """Whether JAX cuts values of a dtype while x64 is off."""
    return dtype in ("int64", "uint64", "float64", "complex128")


def _goal_for_python(number: int, leaf: StoredLeaf, target: Any, cast: bool) -> Goal | str:
    if not leaf.has_array and leaf.pytype != "int":
        return _kinds_differ(leaf, target)
    if leaf.shape or leaf.kind == "key":
        return f"shape: stored {leaf.shape}, target a Python {type(target).__name__}"
    have = leaf.pytype if not leaf.has_array else family(leaf.dtype)
    kinds = ((bool, "bool"), (int, "int"), (float, "float"), (complex, "complex"))
    want = next(name for kind, name in kinds if isinstance(target, kind))
    widens = cast and (have, want) in (("float", "complex"),)
    if have != want and not widens:
        return f"type: stored {have}, target a Python {type(target).__name__}"
    return _python_goal(number, leaf, type(target))


def _kinds_differ(leaf: StoredLeaf, target: Any) -> str:
    return f"kind: stored {leaf.kind}, target {type(target).__name__}"


def family(dtype: str) -> str:
    kinds = (
        (np.bool_, "bool"),
        (jnp.integer, "int"),
        (jnp.floating, "float"),
        (jnp.complexfloating, "complex"),
    )
    try:
        found = np.dtype(dtype)
    except TypeError:  # a name that numpy gives and does not take: "str96", "void32"
        return "other"
    return next((name for kind, name in kinds if jnp.issubdtype(found, kind)), "other")


def _castable(stored: str, target: str) -> bool:
    """Floats to floats and complex to complex; integers only to wider ones; nothing else."""
    families = family(stored), family(target)
    if families in (("float", "float"), ("complex", "complex")):
        return True
    return families == ("int", "int") and bool(np.can_cast(np.dtype(stored), np.dtype(target)))


def _may_become(leaf: StoredLeaf, dtype: str, cast: bool) -> bool:
    if leaf.dtype == dtype:
        return True
    if leaf.pytype and leaf.pytype != "numpy":  # a Python number has no width of its own
        return family(leaf.dtype) == family(dtype)
    return cast and _castable(leaf.dtype, dtype)


@functools.lru_cache(maxsize=64)
def _impl_tag(impl: str) -> str:
    """The short name that JAX prints for a PRNG implementation."""
    dtype = str(jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype)
    return dtype.removeprefix("key<").removesuffix(">")


def stored_tree(item: OpenItem) -> StoredTree:
    assert item.tree is not None, "only trees have goals"
    return item.tree
