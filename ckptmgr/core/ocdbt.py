"""Where the values of an OCDBT database lie: one leaf node of its B+tree, taken apart.

The format is described at https://google.github.io/tensorstore/kvstore/ocdbt/#storage-format; of it
this reads leaf nodes that are not compressed, which is how our databases have them. A node's own
checksum is not looked at: whoever uses a place compares the digest of what is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_MAGIC = bytes.fromhex("0cdb20de")
_HEADER = len(_MAGIC) + 8  # and the length of the node
_CHECKSUM = 4
_MOST_BITS, _MOST_TEXT = 63, 2**16


class Place(NamedTuple):
    """Where a value lies: `length` bytes of a file from `offset` on.

    Attributes:
      file: path below the directory that the node's own path counts from.
    """

    file: str
    offset: int
    length: int


def leaf_node(data: bytes) -> Mapping[str, Place | bytes]:
    """Key -> where its value lies, or the value where it lies in the node.

    Raises ValueError for anything but a whole leaf node without compression.
    """
    try:
        return _leaf_node(data)
    except (IndexError, UnicodeDecodeError) as exc:
        raise ValueError("not a whole leaf node") from exc


def _leaf_node(data: bytes) -> Mapping[str, Place | bytes]:
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError("not a node")
    if int.from_bytes(data[len(_MAGIC) : _HEADER], "little") != len(data):
        raise ValueError("not as long as it says")
    node = _Bytes(data[:-_CHECKSUM], _HEADER)
    version, compression = node.numbers(2)
    height = node.take(1)[0]
    if version or compression or height:
        raise ValueError(f"version {version}, compression {compression}, height {height}")
    files = node.file_table()
    (count,) = node.numbers(1)
    keys = node.texts(count)
    lengths, kinds = node.numbers(count), node.numbers(count)
    apart = sum(kinds)
    numbers, offsets = iter(node.numbers(apart)), iter(node.numbers(apart))
    found: dict[str, Place | bytes] = {}
    for key, length, kind in zip(keys, lengths, kinds, strict=True):
        if kind:
            found[key] = Place(files[next(numbers)], next(offsets), length)
        else:
            found[key] = node.take(length)
    return found


class _Bytes:
    """Bytes that are read one after the other; IndexError where they end too soon."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at

    def take(self, count: int) -> bytes:
        found = self._data[self._at : self._at + count]
        if len(found) != count:
            raise IndexError
        self._at += count
        return found

    def numbers(self, count: int) -> list[int]:
        """Numbers of 7 bits a byte, the lowest first; the last byte of each is below 128."""
        data, at = self._data, self._at
        found = []
        for _ in range(count):
            value = data[at]
            at += 1
            if value >= 128:
                value, shift = value - 128, 7
                while True:
                    if shift > _MOST_BITS:
                        raise ValueError("a number without an end")
                    byte = data[at]
                    at += 1
                    value += (byte & 127) << shift
                    if byte < 128:
                        break
                    shift += 7
            found.append(value)
        self._at = at
        return found

    def texts(self, count: int) -> list[str]:
        """Texts of which each shares a beginning with the one before."""
        shared = [0, *self.numbers(max(0, count - 1))]
        return self._texts(shared, self.numbers(count))

    def file_table(self) -> list[str]:
        """Paths of files; how much of each is its base does not matter for values."""
        (count,) = self.numbers(1)
        shared = [0, *self.numbers(max(0, count - 1))]
        lengths = self.numbers(count)
        self.numbers(count)
        return self._texts(shared, lengths)

    def _texts(self, shared: list[int], lengths: list[int]) -> list[str]:
        last = b""
        found = []
        for begin, length in zip(shared, lengths, strict=False):
            if begin + length > _MOST_TEXT:
                raise ValueError("a text that is too long")
            last = last[:begin] + self.take(length)
            found.append(last.decode())
        return found
