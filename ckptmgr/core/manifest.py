"""What ckptmgr writes about a step, as values and as JSON. `docs/FORMAT.md` has the words.

Reading validates the whole document before any part of it is used: digest, format version,
types. Every parser raises `FormatError` with a sentence; callers add step and file.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from ckptmgr.core import values
from ckptmgr.core.boxes import Box, Shape, whole

FORMAT = 1
KINDS = ("async", "sync", "heartbeat", "preemption")


class FormatError(ValueError):
    """A document that does not say what it should."""


def digest(data: Any) -> str:
    """xxh3-128 of a bytes-like object, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclass(frozen=True, slots=True)
class StoredLeaf:
    """One leaf of a stored tree.

    Attributes:
      path: its keys as text.
      kind: "array" (jax.Array), "numpy", "scalar", "key" (typed PRNG key), "bytes", "string".
      shape: global shape in elements of `dtype` (for keys: of keys).
      dtype: name of the numpy (ml_dtypes) dtype; "" for keys, strings and bytes.
      name: where the array lies in the item's database; "" when the value is in `value`.
      stored_dtype, stored_shape: dtype and shape of the zarr array.
      chunk: chunk shape of the zarr array.
      pytype: of scalars: "int", "float", "bool", "complex", or "numpy" for a numpy scalar.
      impl: of keys: the name of the PRNG implementation.
      value: of strings the text, of integers beyond 64 bits the decimal digits.
      sharding: number of the sharding in the tree's table, None where it had none.
    """

    path: tuple[str, ...]
    kind: str
    shape: Shape = ()
    dtype: str = ""
    name: str = ""
    stored_dtype: str = ""
    stored_shape: Shape = ()
    chunk: Shape = ()
    pytype: str = ""
    impl: str = ""
    value: str | None = None
    sharding: int | None = None

    @property
    def dotted(self) -> str:
        return ".".join(self.path)

    @property
    def has_array(self) -> bool:
        return bool(self.name)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored array, without compression."""
        if not self.has_array:
            return 0
        return whole(self.stored_shape).size * itemsize(self.stored_dtype)


@functools.cache
def itemsize(dtype: str) -> int:
    """Bytes of one element of a numpy or ml_dtypes dtype."""
    return int(dtype_of(dtype).itemsize)


@functools.cache
def dtype_of(name: str) -> np.dtype:
    """The numpy or ml_dtypes dtype of a name."""
    return np.dtype(name)


_LEAF_TYPES: dict[str, type | tuple[type, ...]] = {
    "path": list,
    "kind": str,
    "shape": list,
    "dtype": str,
    "name": str,
    "stored_dtype": str,
    "stored_shape": list,
    "chunk": list,
    "pytype": str,
    "impl": str,
    "value": (str, type(None)),
    "sharding": (int, type(None)),
}


def leaf_to_json(leaf: StoredLeaf) -> dict[str, Any]:
    """Only what differs from the defaults; the stored form only where it differs too."""
    out: dict[str, Any] = {"path": list(leaf.path), "kind": leaf.kind}
    for key in ("dtype", "name", "pytype", "impl"):
        if getattr(leaf, key):
            out[key] = getattr(leaf, key)
    for key in ("value", "sharding"):
        if getattr(leaf, key) is not None:
            out[key] = getattr(leaf, key)
    if leaf.has_array:
        out["shape"] = list(leaf.shape)
        out["chunk"] = list(leaf.chunk)
        if leaf.stored_dtype != leaf.dtype:
            out["stored_dtype"] = leaf.stored_dtype
        if leaf.stored_shape != leaf.shape:
            out["stored_shape"] = list(leaf.stored_shape)
    return out


def leaf_from_json(data: Any) -> StoredLeaf:
    if not isinstance(data, dict) or "path" not in data or "kind" not in data:
        raise FormatError("a leaf is not an object with path and kind")
    known: dict[str, Any] = {}
    for key, value in data.items():
        kind = _LEAF_TYPES.get(key)
        if kind is None:
            continue
        if not isinstance(value, kind):
            raise FormatError(f"field {key!r} of leaf {data['path']!r} has a wrong type")
        known[key] = tuple(value) if isinstance(value, list) else value
    known.setdefault("stored_dtype", known.get("dtype", ""))
    known.setdefault("stored_shape", known.get("shape", ()))
    return StoredLeaf(**known)


@dataclass(frozen=True, slots=True)
class StoredTree:
    """One stored pytree: its leaves, its containers, the shardings its leaves had.

    Attributes:
      leaves: in JAX's leaf order.
      containers: see `ckptmgr.core.tree`.
      shardings: table of the distinct shardings, as JSON objects.
      plain: containers that come back in a plain form -> the class they had.
      driver: TensorStore driver of the arrays, "zarr" or "zarr3".
      compression: None or a name in `ckptmgr.core.compression.CODECS`.
      ocdbt: whether the arrays lie in an OCDBT database (False only in steps of Orbax).
      sparse: whether chunks of zeros may be missing (only in zarr3 trees of Orbax before 0.7).
    """

    leaves: tuple[StoredLeaf, ...]
    containers: Any
    shardings: tuple[dict[str, Any], ...] = ()
    plain: Mapping[str, str] = field(default_factory=dict)
    driver: str = "zarr"
    compression: str | None = None
    ocdbt: bool = True
    sparse: bool = False

    @property
    def has_arrays(self) -> bool:
        return any(leaf.has_array for leaf in self.leaves)

    def to_json(self) -> str:
        return values.dumps(
            {
                "driver": self.driver,
                "compression": self.compression,
                "shardings": list(self.shardings),
                "plain": dict(self.plain),
                "containers": self.containers,
                "leaves": [leaf_to_json(leaf) for leaf in self.leaves],
            }
        )

    @classmethod
    def from_json(cls, text: bytes | str) -> StoredTree:
        data = json_object(text)
        try:
            leaves = tuple(leaf_from_json(leaf) for leaf in data["leaves"])
            return cls(
                leaves,
                data["containers"],
                tuple(data["shardings"]),
                data["plain"],
                data["driver"],
                data["compression"],
            )
        except (KeyError, TypeError) as exc:
            raise FormatError(f"the tree lacks {exc}") from exc


def chunk_box(leaf: StoredLeaf, index: Shape) -> Box:
    """The elements of one chunk, cut to the array."""
    start = tuple(i * size for i, size in zip(index, leaf.chunk, strict=True))
    stop = tuple(
        min(a + size, end)
        for a, size, end in zip(start, leaf.chunk, leaf.stored_shape, strict=True)
    )
    return Box(start, stop)


def chunk_index(leaf: StoredLeaf, box: Box) -> Shape:
    """The chunk that holds the first element of `box`."""
    return tuple(a // size for a, size in zip(box.start, leaf.chunk, strict=True))


@dataclass(frozen=True, slots=True)
class Manifest:
    """The truth about a step: it exists when its manifest does.

    Attributes:
      step: its number; must be the directory's name.
      kind: one of `KINDS`.
      created: seconds since the epoch, when `save()` was called.
      attempt: the attempt that wrote it, unique.
      nbytes: array bytes before compression.
      items: name -> "tree" or "state".
      metrics, extra: as the user gave them, encoded by `ckptmgr.core.values`.
      topology: processes, devices, device kind, meshes, versions.
      files: every metadata file, path below the step -> [size in bytes, xxh3-128].
      since_heartbeat: accepted saves since the last heartbeat, this one counted; 0 for one.
      stored_bytes, stored_files: of the whole directory but for the manifest; None in early steps.
    """

    step: int
    kind: str
    created: float
    attempt: str
    nbytes: int
    items: Mapping[str, str]
    metrics: Any
    extra: Any
    topology: Mapping[str, Any]
    files: Mapping[str, tuple[int, str]]
    since_heartbeat: int = 0
    stored_bytes: int | None = None
    stored_files: int | None = None

    def to_json(self) -> str:
        """One line: {"digest": of the text of the body, "body": {...}}."""
        body = values.dumps(
            {
                "format": FORMAT,
                "step": self.step,
                "kind": self.kind,
                "created": self.created,
                "attempt": self.attempt,
                "nbytes": self.nbytes,
                "items": dict(self.items),
                "metrics": self.metrics,
                "extra": self.extra,
                "topology": dict(self.topology),
                "files": {path: list(entry) for path, entry in self.files.items()},
                "since_heartbeat": self.since_heartbeat,
                "stored_bytes": self.stored_bytes,
                "stored_files": self.stored_files,
            }
        )
        return f"{_HEAD}{digest(body.encode())}{_MIDDLE}{body}}}\n"

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        body = _checked_body(text)
        version = body.get("format")
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise FormatError(f"the format version is {version!r}, not a number from 1 up")
        if version > FORMAT:
            raise FormatError(
                f"written by format {version}, this reads up to {FORMAT}; upgrade ckptmgr"
            )
        try:
            manifest = cls(
                body["step"],
                body["kind"],
                float(body["created"]),
                body["attempt"],
                body["nbytes"],
                body["items"],
                body["metrics"],
                body["extra"],
                body["topology"],
                {path: (size, found) for path, (size, found) in body["files"].items()},
                body.get("since_heartbeat", 0),
                body.get("stored_bytes"),
                body.get("stored_files"),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise FormatError(f"the manifest lacks or misstates {exc}") from exc
        _check_types(manifest)
        return manifest


def _check_types(manifest: Manifest) -> None:
    def whole_number(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0

    sound = {
        "step": whole_number(manifest.step),
        "kind": isinstance(manifest.kind, str),
        "attempt": isinstance(manifest.attempt, str),
        "nbytes": whole_number(manifest.nbytes),
        "since_heartbeat": whole_number(manifest.since_heartbeat),
        "stored_bytes": manifest.stored_bytes is None or whole_number(manifest.stored_bytes),
        "stored_files": manifest.stored_files is None or whole_number(manifest.stored_files),
        "items": isinstance(manifest.items, dict)
        and all(kind in ("tree", "state") for kind in manifest.items.values()),
        "topology": isinstance(manifest.topology, dict),
        "files": all(
            whole_number(size) and isinstance(found, str) for size, found in manifest.files.values()
        ),
    }
    for name, good in sound.items():
        if not good:
            raise FormatError(f"the manifest's {name} is not what it should be")


_HEAD = '{"digest":"'
_MIDDLE = '","body":'


def _checked_body(text: bytes) -> dict[str, Any]:
    """The parsed body, after its digest was compared."""
    outer = json_object(text)
    body = outer.get("body")
    if not isinstance(body, dict) or not isinstance(outer.get("digest"), str):
        raise FormatError("the manifest has no body or no digest")
    start = len(_HEAD) + 32 + len(_MIDDLE)
    if body.get("format") == FORMAT and digest(text.rstrip()[start:-1]) != outer["digest"]:
        raise FormatError("the manifest's digest does not fit its text")
    return body


def json_object(text: bytes | str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise FormatError(f"not JSON ({exc})") from exc
    if not isinstance(data, dict):
        raise FormatError("not a JSON object")
    return data
