"""What kind of leaf each object is, how it is stored, and where its values come from.

`survey` refuses what cannot be stored, by path, before anything is written or copied.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ckptmgr.core import chunking, layout, tree
from ckptmgr.core.boxes import Shape, whole
from ckptmgr.core.manifest import StoredLeaf, StoredTree
from ckptmgr.core.plan import Shard
from ckptmgr.engine import shardings
from ckptmgr.errors import SnapshotLost, UnsupportedLeaf
from ckptmgr.options import LeafRule, Storage

# Types that TensorStore 0.1.86 has for both zarr drivers. Other ml_dtypes are stored through an
# unsigned view of the same width, the type kept in our tree.
_TENSORSTORE_DTYPES = frozenset(
    [
        "bool",
        "int2",
        "int4",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e4m3b11fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e3m4",
        "float8_e8m0fnu",
        "float4_e2m1fn",
        "complex64",
        "complex128",
    ]
)

Source = jax.Array | np.ndarray | None


@dataclass(frozen=True, slots=True)
class Survey:
    """Everything a save needs to know of one tree.

    Attributes:
      flat: the tree taken apart.
      stored: how it will lie on disk.
      sources: per leaf a device array, a host array that is still the user's, or None.
      shards: per leaf its distinct shards.
      keep: numbers of the leaves that are stored, where rules leave some out.
    """

    flat: tree.Flat
    stored: StoredTree
    sources: tuple[Source, ...]
    shards: tuple[tuple[Shard, ...], ...]
    keep: tuple[int, ...] | None = None


def survey(state: Any, storage: Storage, places: shardings.PlacesCache, step: int) -> Survey:
    """Classifies every leaf of `state`; `sources_of` is enough for another of its structure.

    Raises:
      UnsupportedLeaf: a leaf or dict key that cannot be stored.
      SnapshotLost: an array that was donated or deleted already.
    """
    flat = tree.flatten(state)
    rules = [_rule_for(storage, path) for path in flat.paths]
    keep = [i for i, rule in enumerate(rules) if not (rule and rule.exclude)]
    excluded = len(keep) < len(rules)
    if excluded:
        flat = _without(flat, keep)
        rules = [rules[i] for i in keep]
    names = layout.array_names(flat.paths)
    found = [
        _classify(path, name, value, step)
        for path, name, value in zip(flat.paths, names, flat.leaves, strict=True)
    ]
    shards = tuple(() if source is None else _shards_of(source, places) for _, source in found)
    grids = _Grids(storage.chunk_bytes, found, shards)
    table: dict[jax.sharding.Sharding, int] = {}
    entries: list[dict[str, Any]] = []
    leaves: list[StoredLeaf] = []
    for (leaf, source), pieces, rule in zip(found, shards, rules, strict=True):
        if source is not None:
            dtype = _dtype_by_rule(leaf, rule)
            stored = leaf.stored_dtype or stored_dtype(dtype)
            number = None
            if isinstance(source, jax.Array) and not shardings.is_own(source):
                number = _sharding_number(source, table, entries)
            leaf = replace(
                leaf,
                dtype=dtype,
                stored_dtype=stored,
                stored_shape=source.shape,
                chunk=grids(source.shape, stored, pieces, rule.chunk_bytes if rule else None),
                sharding=number,
            )
        leaves.append(leaf)
    tree_on_disk = StoredTree(
        tuple(leaves),
        flat.containers,
        tuple(entries),
        flat.plain,
        storage.driver,
        storage.compression,
    )
    kept = tuple(keep) if excluded else None
    return Survey(flat, tree_on_disk, tuple(source for _, source in found), shards, kept)


def signature(value: Any) -> Hashable:
    """What `survey` finds out about a leaf depends on no more than this and its place in the tree.

    Raises TypeError for a leaf that must be looked at each time.
    """
    kind: Any = type(value)
    if _is_array(kind):
        return value.shape, value.dtype, value.sharding
    if kind is np.ndarray:
        return kind, value.shape, value.dtype
    if isinstance(value, np.flexible):  # of text and bytes the survey keeps value and length
        raise TypeError(kind)
    if kind in (bool, float, complex) or isinstance(value, np.generic):
        return kind
    if kind is int and -(2**63) <= value < 2**63:
        return kind
    if kind is str:
        return kind, value
    raise TypeError(kind)


@functools.cache
def _is_array(kind: Any) -> bool:
    """Whether values of this type are JAX arrays; asking each of them takes 0.5 us."""
    return issubclass(kind, jax.Array) and not issubclass(kind, jax.core.Tracer)


def sources_of(
    leaves: Sequence[StoredLeaf], values: Sequence[Any], step: int
) -> tuple[Source, ...]:
    """The sources of leaves whose signatures are those of a survey that gave `leaves`.

    Raises SnapshotLost.
    """
    return tuple(_source(leaf, value, step) for leaf, value in zip(leaves, values, strict=True))


def _source(leaf: StoredLeaf, value: Any, step: int) -> Source:
    kind: Any = type(value)
    if _is_array(kind):
        if value.is_deleted():
            raise SnapshotLost(leaf.dotted, step)
        return jax.random.key_data(value) if leaf.kind == "key" else value
    if not leaf.has_array:
        return None
    return np.asarray(value, _SCALARS.get(leaf.pytype))


def _rule_for(storage: Storage, path: tree.Path) -> LeafRule | None:
    if not storage.leaf_options:
        return None
    name = tree.dotted(path)
    return next((rule for rule in storage.leaf_options if rule.matches(name)), None)


def _without(flat: tree.Flat, keep: Sequence[int]) -> tree.Flat:
    numbers = {old: new for new, old in enumerate(keep)}
    return replace(
        flat,
        paths=tuple(flat.paths[i] for i in keep),
        sequence_keys=tuple(flat.sequence_keys[i] for i in keep),
        leaves=tuple(flat.leaves[i] for i in keep),
        containers=tree.without_leaves(flat.containers, numbers),
    )


def _classify(path: tree.Path, name: str, value: Any, step: int) -> tuple[StoredLeaf, Source]:
    where = tree.dotted(path)
    if isinstance(value, jax.core.Tracer):
        raise UnsupportedLeaf(where, "a traced value; call save() outside jit, grad and vmap")
    if isinstance(value, jax.Array):
        return _classify_array(path, name, value, step)
    if isinstance(value, str):
        if name != where:  # its dotted name is taken, or cannot be one
            name = ""
        return StoredLeaf(path, "string", value=str(value)), None
    if isinstance(value, (bytes, bytearray)):
        data = np.frombuffer(bytes(value), np.uint8)
        return StoredLeaf(path, "bytes", data.shape, "uint8", name), data
    if isinstance(value, (bool, int, float, complex)) and not isinstance(value, np.generic):
        return _classify_scalar(path, name, value)
    if isinstance(value, (np.ndarray, np.generic)):
        _check_dtype(where, value)
        array = np.asarray(value)
        kind = ("scalar", "numpy") if isinstance(value, np.generic) else ("numpy", "")
        return StoredLeaf(path, kind[0], array.shape, array.dtype.name, name, pytype=kind[1]), array
    raise UnsupportedLeaf(
        where,
        f"a value of type {type(value).__module__}.{type(value).__qualname__} cannot be stored; "
        "leaves may be jax or numpy arrays, numbers, bool, str, bytes or None",
    )


def _classify_array(
    path: tree.Path, name: str, value: jax.Array, step: int
) -> tuple[StoredLeaf, Source]:
    if value.is_deleted():
        raise SnapshotLost(tree.dotted(path), step)
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        impl = str(jax.random.key_impl(value))
        data = jax.random.key_data(value)
        stored = data.dtype.name
        return StoredLeaf(path, "key", value.shape, "", name, stored, impl=impl), data
    return StoredLeaf(path, "array", value.shape, value.dtype.name, name), value


_SCALARS = {"bool": "bool", "int": "int64", "float": "float64", "complex": "complex128"}


def _classify_scalar(path: tree.Path, name: str, value: Any) -> tuple[StoredLeaf, Source]:
    kinds = ((bool, "bool"), (int, "int"), (float, "float"), (complex, "complex"))
    pytype = next(text for kind, text in kinds if isinstance(value, kind))
    if pytype == "int" and not -(2**63) <= value < 2**63:
        return StoredLeaf(path, "scalar", pytype=pytype, value=str(int(value))), None
    dtype = _SCALARS[pytype]
    return StoredLeaf(path, "scalar", (), dtype, name, pytype=pytype), np.asarray(value, dtype)


def _check_dtype(where: str, value: np.ndarray | np.generic) -> None:
    dtype = value.dtype
    if isinstance(value, np.ma.MaskedArray):
        raise UnsupportedLeaf(where, "masked arrays lose their mask; store data and mask")
    known = dtype.name in _TENSORSTORE_DTYPES or dtype.type.__module__ == "ml_dtypes"
    if not known:
        raise UnsupportedLeaf(where, f"numpy dtype {dtype} cannot be stored")


def _dtype_by_rule(leaf: StoredLeaf, rule: LeafRule | None) -> str:
    """The leaf's dtype, or the one a rule casts it to."""
    if not (rule and rule.cast and leaf.dtype):
        return leaf.dtype
    if not jnp.issubdtype(np.dtype(leaf.dtype), jnp.floating):
        return leaf.dtype
    return np.dtype(rule.cast).name


@functools.cache
def stored_dtype(dtype: str) -> str:
    """The dtype of the zarr array for values of `dtype`."""
    return dtype if dtype in _TENSORSTORE_DTYPES else f"uint{8 * np.dtype(dtype).itemsize}"


def to_stored(values: np.ndarray, leaf: StoredLeaf) -> np.ndarray:
    """Values of a leaf as its zarr array holds them; no copy where nothing changes."""
    stored = np.dtype(leaf.stored_dtype)
    if values.dtype == stored:
        return values
    if leaf.kind != "key" and values.dtype != np.dtype(leaf.dtype):
        values = values.astype(leaf.dtype)  # a rule's cast, or foreign byte order
    return values.view(stored)


def _shards_of(source: jax.Array | np.ndarray, places: shardings.PlacesCache) -> tuple[Shard, ...]:
    if isinstance(source, np.ndarray):
        return _one_piece(source.shape)
    return places(source).shards


@functools.lru_cache(maxsize=4096)
def _one_piece(shape: Shape) -> tuple[Shard, ...]:
    """A host array is one shard, of which each process has its own."""
    return (Shard(whole(shape), (0,), 0, jax.process_count() > 1),)


class _Grids:
    """Chunk shapes; a tree has few different ones.

    Args:
      chunk_bytes: the size to aim for, None for the usual one.
      found: the leaves with their sources.
      shards: of each leaf.
    """

    def __init__(
        self,
        chunk_bytes: int | None,
        found: Sequence[tuple[StoredLeaf, Source]],
        shards: Sequence[Sequence[Shard]],
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._known: dict[Any, Shape] = {}
        self._shared, self._processes = 0, 1
        for (_, source), pieces in zip(found, shards, strict=True):
            for shard in pieces:
                if len(shard.holders) > 1 and source is not None:
                    self._shared += shard.box.size * source.dtype.itemsize
                    self._processes = max(self._processes, len(shard.holders))

    def __call__(
        self, shape: Shape, dtype: str, pieces: Sequence[Shard], chunk_bytes: int | None
    ) -> Shape:
        """The chunk shape of an array; with `chunk_bytes` that instead of what holds for all."""
        key = (shape, dtype, id(pieces), chunk_bytes)
        if key not in self._known:
            itemsize = np.dtype(dtype).itemsize
            self._known[key] = chunking.chunk_shape(
                shape,
                itemsize,
                [shard.box for shard in pieces],
                [shard.holders for shard in pieces],
                chunk_bytes or self._aim(itemsize, pieces),
            )
        return self._known[key]

    def _aim(self, itemsize: int, pieces: Sequence[Shard]) -> int:
        largest = max(shard.box.size for shard in pieces) * itemsize
        aim = self._chunk_bytes or chunking.usual_chunk_bytes(largest)
        if self._processes > 1 and any(len(shard.holders) > 1 for shard in pieces):
            return chunking.shared_chunk_bytes(aim, self._shared, self._processes)
        return aim


def _sharding_number(
    array: jax.Array, table: dict[jax.sharding.Sharding, int], entries: list[dict[str, Any]]
) -> int:
    """The number of the array's sharding in the table, which grows by what is new."""
    key = array.sharding
    if key not in table:
        entries.append(shardings.describe(array.sharding))
        table[key] = len(entries) - 1
    return table[key]
