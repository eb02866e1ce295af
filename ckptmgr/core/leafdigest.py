"""The leaf digest: of a leaf's values, whatever the mesh and the chunks they were saved with.

Every 32-bit word of a leaf is mixed with its position into four numbers, and these are summed
modulo 2**32 over the leaf. A sum has no order and no grouping, so each chunk, shard and process
sums what it holds, and the sums of all are the leaf's. `docs/FORMAT.md` defines it; this is the
form that others are compared with, and the quicker one for arrays of up to a few hundred words.

A mix is a Feistel network over (word, position) with the rounds of a well-known hash, and the
last four of the halves that its six rounds make are the four numbers. So a word and its position
are recovered from what they add: another word at the same position, or the same word at another,
always adds something else. More than one change goes unseen with the probability of chance, 2**-128
for changes that were not made to cancel; the digest is no protection against an adversary.

Constants: the multipliers are those of MurmurHash3's finaliser (Austin Appleby), of lowbias32
(Chris Wellons, hash-prospector) with its shifts 16 and 15, and primes of xxHash32 (Yann Collet).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptmgr.core.boxes import Box, Shape, whole

Sums = tuple[int, int, int, int]
"""Four sums modulo 2**32."""

ZERO: Sums = (0, 0, 0, 0)
"""The sums of nothing."""

MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35, 0x7FEB352D, 0x846CA68B, 0x9E3779B1, 0x27D4EB2F)
"""Of the six rounds."""

HIGH_SALTS = (0x9E3779B9, 0x85EBCA77)
"""What sets the two keys that the high half of a position gives apart."""

_HEADER_HIGH = 2**32 - 1
"""High half of the positions of the header, beyond those of any array."""

_BLOCK = 2**14
"""Words at a time, so that they stay in a core's cache."""

_BITS = {
    "int1": 1,
    "uint1": 1,
    "int2": 2,
    "uint2": 2,
    "int4": 4,
    "uint4": 4,
    "float4_e2m1fn": 4,
    "float6_e2m3fn": 6,
    "float6_e3m2fn": 6,
}
"""Types narrower than the byte that holds an element of them on the host."""


def add(a: Sums, b: Sums) -> Sums:
    """The sums of two disjoint pieces of a leaf together."""
    w, x, y, z = ((i + j) % 2**32 for i, j in zip(a, b, strict=True))
    return w, x, y, z


def partial(values: np.ndarray, box: Box, shape: Shape) -> Sums:
    """The sums of one piece of a leaf.

    Args:
      values: the elements of `box`, as stored.
      box: where they lie in the leaf.
      shape: of the whole leaf, as stored.
    """
    if values.shape != box.shape:
        raise ValueError(f"values of shape {values.shape} are not those of the box {box}")
    words = raw_words(values)
    return of_words(words, Runs.of(box, shape, words_per_element(values.dtype)), 0, words.size)


def finish(sums: Sums, dtype: str, shape: Shape) -> str:
    """The digest of a leaf, as 32 hexadecimal digits, from the sums of all of it.

    Args:
      sums: of boxes that tile the leaf.
      dtype: name of the dtype that its values are stored in.
      shape: of the whole leaf, as stored.
    """
    header = np.frombuffer(f"{dtype}[{','.join(map(str, shape))}]".encode("ascii"), np.uint8)
    k1, k2 = high_keys(_HEADER_HIGH)
    low = np.arange(header.size, dtype=np.uint32)
    total = add(sums, _summed(header.astype(np.uint32), low ^ np.uint32(k1), np.uint32(k2)))
    return "".join(f"{lane:08x}" for lane in total)


def of_words(words: np.ndarray, runs: Runs, start: int, stop: int) -> Sums:
    """The sums of `words`, which are those from `start` to `stop` of the box of `runs`."""
    total = ZERO
    for a in range(start, stop, _BLOCK):
        b = min(a + _BLOCK, stop)
        block = words[a - start : b - start].astype(np.uint32)
        positions = runs.positions(a, b)
        k1, k2 = _high_keys(positions)
        total = add(total, _summed(block, positions.astype(np.uint32) ^ k1, k2))
    return total


def words_per_element(dtype: np.dtype[Any]) -> int:
    """How many words an element has. Raises ValueError for a dtype that has no digest."""
    if dtype.kind in "OSUmM" or dtype.names or dtype.itemsize not in (1, 2, 4, 8, 16):
        raise ValueError(f"values of dtype {dtype} have no digest")
    return max(1, dtype.itemsize // 4)


def raw_words(values: np.ndarray) -> np.ndarray:
    """The words of an array in C order as one axis of uint8, uint16 or uint32; where it can, a view."""
    words_per_element(values.dtype)
    values = values.astype(values.dtype.newbyteorder("<"), copy=False)
    flat = np.ascontiguousarray(values).reshape(-1)
    raw = flat.view(f"uint{8 * min(4, values.dtype.itemsize)}")
    if values.dtype == np.bool_:
        return (raw != 0).view(np.uint8)
    bits = _BITS.get(values.dtype.name)
    return raw & np.uint8(2**bits - 1) if bits else raw


@dataclass(frozen=True, slots=True)
class Runs:
    """Where the words of a box lie in its leaf: runs of the same length, evenly spaced by axis.

    Attributes:
      length: words of a run.
      counts: how many runs there are along each axis that is left.
      steps: for each of these axes, words from a run to the next.
      first: position of the first word.
    """

    length: int
    counts: Shape
    steps: Shape
    first: int

    @classmethod
    def of(cls, box: Box, shape: Shape, words: int = 1) -> Runs:
        """Of a box of a leaf of `shape` whose elements have so many words."""
        first, step, length = 0, words, words
        counts: list[int] = []
        steps: list[int] = []
        joined = True
        for begin, size, extent in reversed(
            list(zip(box.start, box.shape, whole(shape).stop, strict=True))
        ):
            first += begin * step
            if joined:
                length *= size
                joined = size == extent
            elif size != 1:
                counts.insert(0, size)
                steps.insert(0, step)
            step *= extent
        return cls(length, tuple(counts), tuple(steps), first)

    def at(self, words: np.ndarray) -> np.ndarray:
        """The positions in the leaf, as uint64, of words of the box, counted in C order."""
        if not self.counts:
            return words.astype(np.uint64) + np.uint64(self.first)
        rest, offset = np.divmod(words.astype(np.uint64), np.uint64(self.length))
        return self._bases(rest) + offset

    def positions(self, start: int, stop: int) -> np.ndarray:
        """The positions in the leaf, as uint64, of the words of the box from `start` to `stop`."""
        if not self.counts or self.length > stop - start:
            return self.at(np.arange(start, stop, dtype=np.uint64))
        first, last = start // self.length, -(-stop // self.length)
        bases = self._bases(np.arange(first, last, dtype=np.uint64))
        found = (bases[:, None] + np.arange(self.length, dtype=np.uint64)).reshape(-1)
        skipped = first * self.length
        return found[start - skipped : stop - skipped]

    def _bases(self, numbers: np.ndarray) -> np.ndarray:
        """The positions of the first words of these runs."""
        found = np.full(numbers.shape, self.first, np.uint64)
        for count, step in zip(self.counts[:0:-1], self.steps[:0:-1], strict=True):
            numbers, along = np.divmod(numbers, np.uint64(count))
            found += along * np.uint64(step)
        return found + numbers * np.uint64(self.steps[0])


@functools.lru_cache(maxsize=256)
def high_keys(high: int) -> tuple[int, int]:
    """The two keys that the high half of a position gives."""
    k1, k2 = (int(_lowbias32(np.array([high ^ salt], np.uint32))[0]) for salt in HIGH_SALTS)
    return k1, k2


def _high_keys(positions: np.ndarray) -> tuple[Any, Any]:
    """The keys of each of these positions, which ascend; scalars where all have the same."""
    high = int(positions[0]) >> 32
    if high == int(positions[-1]) >> 32:
        k1, k2 = high_keys(high)
        return np.uint32(k1), np.uint32(k2)
    each = (positions >> np.uint64(32)).astype(np.uint32)
    a, b = (_lowbias32(each ^ np.uint32(salt)) for salt in HIGH_SALTS)
    return a, b


def _lowbias32(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def _summed(a: np.ndarray, b: np.ndarray, k2: Any) -> Sums:
    """The sums of words `a` at positions whose low halves with the first key are `b`."""
    scratch = [np.empty_like(a), np.empty_like(a)]
    a = a ^ k2
    a += _round(b, 0, scratch)
    b ^= _round(a, 1, scratch)
    lanes = []
    for number in (2, 4):
        a += _round(b, number, scratch)
        lanes.append(int(np.add.reduce(a, dtype=np.uint32)))
        b ^= _round(a, number + 1, scratch)
        lanes.append(int(np.add.reduce(b, dtype=np.uint32)))
    w, x, y, z = lanes
    return w, x, y, z


def _round(half: np.ndarray, number: int, scratch: list[np.ndarray]) -> np.ndarray:
    out, shifted = scratch
    np.right_shift(half, np.uint32(16), out=shifted)
    np.bitwise_xor(half, shifted, out=out)
    out *= np.uint32(MULTIPLIERS[number])
    np.right_shift(out, np.uint32(15), out=shifted)
    out ^= shifted
    return out
