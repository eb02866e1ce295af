"""Plain values as strict JSON: metrics, `extra`, iterator state, dictionary keys.

JSON's own values stand for themselves; everything else is an object with one key that starts
with "$": `{"$float": "nan"}`, `{"$bytes": base64}`, `{"$tuple": [...]}`, `{"$map": [[k, v]...]}`
(a dict whose keys are not all strings, or one that could be taken for a tag), `{"$complex":
[re, im]}`, `{"$array": {"dtype", "shape", "data": base64}}`.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 and friends with numpy
import numpy as np


def encode(value: Any, where: str = "") -> Any:
    """`value` as JSON-able data, captured by value. Raises TypeError naming `where`."""
    if value is None or isinstance(value, (bool, str)):
        return bool(value) if isinstance(value, bool) else value if value is None else str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, complex):
        return {"$complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return _encode_mapping(value, where)
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        try:
            array = np.asarray(value)
        except TypeError as exc:  # a typed PRNG key, for one
            raise TypeError(f"{where or 'value'} cannot be kept: {exc}") from exc
        return _encode_array(array.astype(array.dtype.newbyteorder("="), copy=False), where)
    raise TypeError(f"{where or 'value'} has the type {type(value).__name__}, which cannot be kept")


def _encode_mapping(value: Mapping[Any, Any], where: str) -> Any:
    plain = all(isinstance(key, str) for key in value)
    if plain and not any(key.startswith("$") for key in value):
        return {str(key): encode(item, f"{where}[{key!r}]") for key, item in value.items()}
    pairs = [[encode(k, f"{where} key"), encode(v, f"{where}[{k!r}]")] for k, v in value.items()]
    return {"$map": pairs}


def _encode_array(array: np.ndarray, where: str) -> Any:
    if array.dtype.hasobject or array.dtype.names or array.dtype.kind in "SUMm":
        raise TypeError(f"{where or 'value'} is an array of {array.dtype}, which cannot be kept")
    if array.ndim == 0:
        return encode(scalar(array), where)
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"$array": {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}}


def scalar(array: np.ndarray) -> Any:
    """The Python value of a 0-d array; small floats such as bfloat16 become `float`."""
    value = array.item()
    return value if isinstance(value, (bool, int, float, complex)) else float(value)


def decode(data: Any) -> Any:
    """The value that `encode` was given (0-d arrays as Python scalars, mappings as dict)."""
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1 or not next(iter(data)).startswith("$"):
        return {key: decode(item) for key, item in data.items()}
    ((tag, body),) = data.items()
    if tag == "$float":
        return float(body)
    if tag == "$complex":
        return complex(*(decode(part) for part in body))
    if tag == "$bytes":
        return base64.b64decode(body)
    if tag == "$tuple":
        return tuple(decode(item) for item in body)
    if tag == "$map":
        return {decode(key): decode(item) for key, item in body}
    if tag == "$array":
        raw = np.frombuffer(base64.b64decode(body["data"]), np.dtype(body["dtype"]))
        return raw.reshape(body["shape"]).copy()
    raise ValueError(f"unknown tag {tag!r}")


def dumps(data: Any) -> str:
    """Compact strict JSON of already encoded data."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False)
