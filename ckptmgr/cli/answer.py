"""What a command answers, and values as text and as JSON."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

GOOD, FAILED, USAGE, EMPTY = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class Answer:
    """Attributes: text: for stdout. status: exit status. message: one line for stderr, or ""."""

    text: str
    status: int = GOOD
    message: str = ""


def as_json(data: Any) -> str:
    return json.dumps(plain(data), indent=2, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """Strict JSON that other tools can read: "nan" and "inf" as text, bytes as base64, keys as
    text, tuples and arrays as lists."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def size(nbytes: int | None) -> str:
    if nbytes is None:
        return "-"
    number = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if number < 999.5 or unit == "PB":
            break
        number /= 1000
    return f"{nbytes} B" if unit == "B" else f"{number:.3g} {unit}"


def moment(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "-"


def age(seconds: float) -> str:
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def short(value: Any) -> str:
    """A metric on one line."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return printable(value if isinstance(value, str) else json.dumps(plain(value)))


def pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{printable(str(key))}={short(value)}" for key, value in values.items())


def printable(text: str) -> str:
    """Text that cannot break a line or a terminal."""
    return text if text.isprintable() else repr(text)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> str:
    """Columns of equal width under `head`; those named in `right` are flush right."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "".join(
        "  ".join(
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(head, line, widths, strict=True)
        ).rstrip()
        + "\n"
        for line in lines
    )
