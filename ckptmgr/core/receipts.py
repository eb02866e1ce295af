"""Receipts: which chunks a process wrote of an item, with their digests, and what is missing."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptmgr.core import leafdigest, values
from ckptmgr.core.boxes import Shape, tiles, whole
from ckptmgr.core.leafdigest import Sums
from ckptmgr.core.manifest import FormatError, StoredTree, chunk_index, json_object


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk that a process wrote.

    Attributes:
      leaf: number of the leaf in the tree.
      index: position in the leaf's chunk grid.
      nbytes: bytes of its elements before compression, without padding at the array's edge.
      digest: xxh3-128 of those bytes in C order; "" where none was taken.
    """

    leaf: int
    index: Shape
    nbytes: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one process wrote of one item.

    Attributes:
      process: its number.
      chunks: every chunk, grouped by leaf.
      files: path below the item of every data file -> its size in bytes.
      sums: leaf -> what the process's part of it adds to its leaf digest; empty where none were
        taken. See `ckptmgr.core.leafdigest`.
    """

    process: int
    chunks: tuple[Chunk, ...]
    files: Mapping[str, int]
    sums: Mapping[int, Sums] = field(default_factory=dict)

    def to_json(self, chunks: str | None = None) -> str:
        """`chunks` is what `chunks_to_json` makes of its chunks, where that is known."""
        if chunks is None:
            chunks = chunks_to_json(self.chunks)
        head = values.dumps({"process": self.process, "files": dict(self.files)})
        sums = ""
        if self.sums:
            found = values.dumps([[leaf, list(sums)] for leaf, sums in sorted(self.sums.items())])
            sums = f',"sums":{found}'
        return f'{head[:-1]},"chunks":{chunks}{sums}}}'

    @classmethod
    def from_json(cls, text: bytes | str) -> Receipt:
        data = json_object(text)
        try:
            chunks = tuple(
                Chunk(leaf, tuple(index), nbytes, digest)
                for leaf, found in data["chunks"]
                for index, nbytes, digest in found
            )
            sums = {leaf: (a, b, c, d) for leaf, (a, b, c, d) in data.get("sums", ())}
            return cls(data["process"], chunks, data["files"], sums)
        except (KeyError, TypeError, ValueError) as exc:
            raise FormatError(f"the receipt lacks {exc}") from exc


def chunks_to_json(chunks: Sequence[Chunk]) -> str:
    """The part of a receipt that grows with the tree; `chunks` are grouped by leaf."""
    # text at once: thousands of lists would make Python look for cycles, while training waits
    leaves = (
        f"[{leaf},[{','.join(map(_chunk_to_json, found))}]]"
        for leaf, found in itertools.groupby(chunks, operator.attrgetter("leaf"))
    )
    return f"[{','.join(leaves)}]"


def _chunk_to_json(chunk: Chunk) -> str:
    return f'[{_index_to_json(chunk.index)},{chunk.nbytes},"{chunk.digest}"]'


@functools.lru_cache(maxsize=4096)
def _index_to_json(index: Shape) -> str:
    return values.dumps(list(index))


def missing_chunks(tree: StoredTree, receipts: Sequence[Receipt]) -> list[tuple[int, Shape, str]]:
    """(leaf, chunk index, why) of every chunk not recorded exactly once."""
    seen: dict[tuple[int, Shape], int] = {}
    for receipt in receipts:
        for chunk in receipt.chunks:
            seen[chunk.leaf, chunk.index] = seen.get((chunk.leaf, chunk.index), 0) + 1
    found = []
    for number, leaf in enumerate(tree.leaves):
        if not leaf.has_array:
            continue
        if leaf.chunk == leaf.stored_shape and seen.pop((number, (0,) * len(leaf.chunk)), 0) == 1:
            continue  # one chunk, as small leaves have
        for box in tiles(whole(leaf.stored_shape), leaf.chunk):
            index = chunk_index(leaf, box)
            times = seen.pop((number, index), 0)
            if times != 1:
                why = "is in no receipt" if not times else f"is in {times} receipts"
                found.append((number, index, why))
    found += [(leaf, index, "does not belong to the array") for leaf, index in seen]
    return found


def leaf_digests(tree: StoredTree, receipts: Sequence[Receipt]) -> dict[int, str]:
    """Leaf -> its digest, where all of its parts were summed."""
    found: dict[int, Sums] = {}
    for receipt in receipts:
        for leaf, sums in receipt.sums.items():
            found[leaf] = leafdigest.add(found.get(leaf, leafdigest.ZERO), sums)
    if not found or not all(receipt.sums or not receipt.chunks for receipt in receipts):
        return {}
    return {
        number: leafdigest.finish(
            found.get(number, leafdigest.ZERO), leaf.stored_dtype, leaf.stored_shape
        )
        for number, leaf in enumerate(tree.leaves)
        if leaf.has_array
    }
