"""The chunk grid of one leaf.

A zarr array has one chunk shape for the whole array. It must be such that no chunk is written by
two processes. Small leaves get as few chunks as that allows, whatever the number of devices;
large ones are cut at device shards, so that a shard is written as it lies in memory, and then
along the leading axes to about `chunk_bytes`, so that a chunk is one run of memory and a mesh that
is finer along these axes reads only what it needs. A grid that is finer along the other axes too
would take a copy of every chunk on its way to disk, see docs/PERFORMANCE.md.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence

from ckptmgr.core.boxes import Box, Shape

LEAST_BYTES, MOST_BYTES, PIECES = 2 * 2**20, 16 * 2**20, 8


def usual_chunk_bytes(shard_bytes: int) -> int:
    """The size to aim for where the user names none: an eighth of a shard, so that a mesh eight
    times as fine reads no more than it needs; a quarter or half where that would be less than
    2 MiB, since the number of chunks costs time, and a sixteenth and so on where it would be more
    than 16 MiB. Powers of two, for meshes grow by these."""
    pieces = PIECES
    while pieces > 1 and shard_bytes < pieces * LEAST_BYTES:
        pieces //= 2
    while shard_bytes > pieces * MOST_BYTES:
        pieces *= 2
    return max(LEAST_BYTES, -(-shard_bytes // pieces))


SHARED_BYTES = 2**20
"""What several processes hold is not cut finer than this to share the writing."""

SHARED_PIECES = 16
"""Chunks in the even share of a process: what it gets is off by half a chunk at most."""


def shared_chunk_bytes(chunk_bytes: int, shared: int, processes: int) -> int:
    """The size to aim for where `processes` share the writing of `shared` bytes."""
    return min(chunk_bytes, max(SHARED_BYTES, shared // (processes * SHARED_PIECES)))


GATHER_BYTES = 2**20
"""A process's part of a leaf up to this size is assembled on the host before it is written."""


def chunk_shape(
    shape: Shape, itemsize: int, boxes: Sequence[Box], owners: Sequence[Hashable], chunk_bytes: int
) -> Shape:
    """The chunk shape of an array of `shape` whose distinct shards `boxes` belong to `owners`.

    Args:
      shape: global shape.
      itemsize: bytes of one element as stored.
      boxes: the distinct shard boxes; together they tile the array.
      owners: of each box the process that writes it, or those of which one will.
      chunk_bytes: the size to aim for; a chunk is at most this large unless the only even
        divisions of a shard are far smaller.
    """
    if not math.prod(shape):
        return tuple(max(1, size) for size in shape)
    by_owner: dict[Hashable, int] = defaultdict(int)
    for box, owner in zip(boxes, owners, strict=True):
        by_owner[owner] += box.size * itemsize
    gather = max(by_owner.values()) <= min(GATHER_BYTES, chunk_bytes)
    fixed = [_may_not_cross(d, boxes, owners, merge_same_owner=gather) for d in range(len(shape))]
    cell = [
        math.gcd(*_inner_edges(d, size, boxes)) if fixed[d] else size
        for d, size in enumerate(shape)
    ]
    for d in range(len(shape)):
        rest = math.prod(cell[d + 1 :]) * math.prod(cell[:d]) * itemsize
        if rest * cell[d] <= chunk_bytes:
            break
        most = max(1, chunk_bytes // rest)
        if cell[d] == shape[d]:  # no inner edge to respect: even pieces, the last one shorter
            cell[d] = math.ceil(shape[d] / math.ceil(shape[d] / most))
        else:
            cell[d] = _divisor(cell[d], most)
    return tuple(cell)


def _inner_edges(d: int, size: int, boxes: Sequence[Box]) -> set[int]:
    """Where shards meet along axis d; the far end of the array counts only with no other."""
    edges = {box.start[d] for box in boxes} | {box.stop[d] for box in boxes}
    return (edges - {0, size}) or {size}


def _may_not_cross(
    d: int, boxes: Sequence[Box], owners: Sequence[Hashable], merge_same_owner: bool
) -> bool:
    """Whether chunks must stop at the shard edges along axis d."""
    if len(boxes) == 1:
        return False
    if not merge_same_owner:
        return True
    lines: dict[tuple[Shape, Shape], set[Hashable]] = defaultdict(set)
    for box, owner in zip(boxes, owners, strict=True):
        across = (box.start[:d] + box.start[d + 1 :], box.stop[:d] + box.stop[d + 1 :])
        lines[across].add(owner)
    return any(len(found) > 1 for found in lines.values())


def _divisor(n: int, most: int) -> int:
    """The largest divisor of n up to `most`; a larger one where that would be under most / 16."""
    small = {d for d in range(1, math.isqrt(n) + 1) if n % d == 0}
    divisors = sorted(small | {n // d for d in small})
    below = max(d for d in divisors if d <= most)
    if below * 16 >= most:
        return below
    return next(d for d in divisors if d > below)
