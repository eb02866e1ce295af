"""Small chunks in blocks: what one array operation and one loop can write of many leaves.

Opening an array takes TensorStore far longer than writing a few kilobytes. Plain chunks that are
not large are therefore written by their keys, and a leaf's metadata, which TensorStore made once
for all arrays like it, by another: the same keys and bytes in the same transaction. Where parts of
one chunk are equal but for their values, and their shards lie one behind the other in gathered
memory, they are put together by one operation for all of them.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ckptmgr.core import boxes, manifest
from ckptmgr.core.boxes import Box, Shape
from ckptmgr.core.manifest import StoredLeaf, StoredTree
from ckptmgr.core.plan import LeafWrite, Part, Wave
from ckptmgr.engine import leaves as leaf_values

PLAIN_BYTES = 2**17
"""Up to this size a chunk is written by its key: the copies that this takes cost less than opening
the array."""


class Values(Protocol):
    """Where values come from, see `ckptmgr.engine.staged.Staged`."""

    def get(self, leaf: int, position: int) -> np.ndarray: ...

    def run(self, leaf: int, position: int, count: int) -> np.ndarray | None: ...


class Members(Protocol):
    """Which leaves lie one behind the other, see `ckptmgr.engine.recipe.Recipe`."""

    def follows(self, leaf: int, position: int, other: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class Block:
    """A part of plain chunks, or several of one chunk each, equal in all but leaf and values.

    Attributes:
      parts: what is written.
      creates: of each whether its leaf's metadata is written with it.
      chunks: of each part the chunks: index, and where its values lie in those of the part.
    """

    parts: tuple[Part, ...]
    creates: tuple[bool, ...]
    chunks: tuple[tuple[Shape, tuple[slice, ...]], ...]


def cut(wave: Wave, tree: StoredTree, members: Members) -> tuple[tuple[Block, ...], Wave]:
    """The blocks of a wave, and what has to go through TensorStore's arrays."""
    plain: list[tuple[Part, bool]] = []
    rest: list[LeafWrite] = []
    for job in wave:
        if job.parts and all(is_plain(part, tree) for part in job.parts):
            plain += [(part, job.first and not n) for n, part in enumerate(job.parts)]
        else:
            rest.append(job)
    return tuple(_blocks(plain, tree, members)), tuple(rest)


def is_plain(part: Part, tree: StoredTree) -> bool:
    """Whether a part is made of small chunks that are stored as their plain bytes, unpadded."""
    leaf = tree.leaves[part.leaf]
    return (
        part.write
        and tree.compression is None
        and math.prod(leaf.chunk) * manifest.itemsize(leaf.stored_dtype) <= PLAIN_BYTES
        and not any(map(operator.mod, part.box.shape, leaf.chunk))
    )


def _blocks(
    plain: Sequence[tuple[Part, bool]], tree: StoredTree, members: Members
) -> Iterator[Block]:
    run: list[tuple[Part, bool]] = []
    for part, creates in plain:
        if run and not _goes_on(run[-1][0], part, tree, members):
            yield _block(run, tree)
            run = []
        run.append((part, creates))
    if run:
        yield _block(run, tree)


def _block(run: Sequence[tuple[Part, bool]], tree: StoredTree) -> Block:
    part = run[0][0]
    leaf = tree.leaves[part.leaf]
    chunks = tuple(
        (manifest.chunk_index(leaf, tile), tile.within(part.box))
        for tile in boxes.tiles(part.box, leaf.chunk)
    )
    return Block(tuple(part for part, _ in run), tuple(creates for _, creates in run), chunks)


def _goes_on(last: Part, part: Part, tree: StoredTree, members: Members) -> bool:
    a, b = tree.leaves[last.leaf], tree.leaves[part.leaf]
    return (
        last.box == part.box
        and part.box.shape == b.chunk
        and last.sources == part.sources
        and (a.kind, a.dtype, a.stored_dtype, a.chunk, a.stored_shape)
        == (b.kind, b.dtype, b.stored_dtype, b.chunk, b.stored_shape)
        and all(members.follows(last.leaf, position, part.leaf) for position, _ in part.sources)
    )


def values_of(block: Block, tree: StoredTree, staged: Values) -> Iterable[np.ndarray]:
    """The values of each part of a block as they are stored."""
    part, count = block.parts[0], len(block.parts)
    leaf = tree.leaves[part.leaf]
    if count > 1:
        pieces = _pieces(part.box, part.sources)
        runs = [staged.run(part.leaf, position, count) for position, _, _ in pieces]
        found = [leaf_values.to_stored(run, leaf) for run in runs if run is not None]
        if len(found) == len(pieces):
            if len(pieces) == 1 and part.sources[0][1] == part.box:
                return found[0]
            out = np.empty((count, *part.box.shape), leaf.stored_dtype)
            for run, (_, there, here) in zip(found, pieces, strict=True):
                out[(slice(None), *there)] = run[(slice(None), *here)]
            return out
    return [assemble(tree.leaves[one.leaf], one, staged) for one in block.parts]


def assemble(leaf: StoredLeaf, part: Part, staged: Values) -> np.ndarray:
    """The values of a part in C order, as stored; its own shard where that is one."""
    if len(part.sources) == 1 and boxes.contains(part.sources[0][1], part.box):
        position, box = part.sources[0]
        values = leaf_values.to_stored(staged.get(part.leaf, position), leaf)
        if box != part.box:
            values = values[part.box.within(box)]
        return np.ascontiguousarray(values).reshape(part.box.shape)
    out = np.empty(part.box.shape, leaf.stored_dtype)
    for position, there, here in _pieces(part.box, part.sources):
        out[there] = leaf_values.to_stored(staged.get(part.leaf, position), leaf)[here]
    return out


@functools.lru_cache(maxsize=4096)
def _pieces(
    box: Box, sources: tuple[tuple[int, Box], ...]
) -> tuple[tuple[int, tuple[slice, ...], tuple[slice, ...]], ...]:
    """(position of a source, where its piece goes in `box`, where the piece lies in it)."""
    met = ((position, source, boxes.intersect(source, box)) for position, source in sources)
    return tuple(
        (position, common.within(box), common.within(source))
        for position, source, common in met
        if common is not None
    )
