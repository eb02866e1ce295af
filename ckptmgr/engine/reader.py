"""Arrays out of zarr: strict, verified, straight into the caller's memory.

Where a unit is one whole chunk that lies in the database as plain bytes, which is what small
leaves are, it is read by its key: its digest says more than opening the array would, and the
opening is most of the time that a small leaf takes. Everything else goes through TensorStore's
zarr driver.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts

from ckptmgr.core import boxes, layout, manifest
from ckptmgr.core.boxes import Box, Shape
from ckptmgr.core.manifest import StoredLeaf, StoredTree
from ckptmgr.core.plan import Unit
from ckptmgr.engine import arrays
from ckptmgr.errors import CorruptCheckpoint, Problem

READ_AHEAD_BYTES = 128 * 2**20
"""Bytes asked for and not yet checked during a restore."""

SMALL_BYTES = 2**20
"""Up to this size a chunk is read by its key."""

Digests = Mapping[tuple[int, Shape], str]

Opening = Any
"""The future of an array that is being opened, or None where a unit is read by its key."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A unit that was asked for.

    Attributes:
      unit: what was asked for.
      values: where its elements go, right once it is settled.
      future: TensorStore's; of the chunk's bytes where `by_key`, else of the filled array.
    """

    unit: Unit
    values: np.ndarray
    future: Any
    by_key: bool


class Reader:
    """Reads units of one item into arrays that the caller gives.

    Args:
      digests: of the chunks that are recorded.
      compare: whether what was read is compared with them.
    """

    def __init__(
        self,
        step: int | None,
        tree: StoredTree,
        item_path: str,
        digests: Digests,
        compare: bool = True,
    ) -> None:
        self._compare = compare
        self._step = step
        self._tree = tree
        self._path = item_path
        self._digests = digests
        self._context = arrays.context()
        self._database: ts.KvStore | None = None

    def _kvstore(self) -> dict[str, Any]:
        if self._tree.ocdbt:
            spec = arrays.database(self._path)
            del spec["config"]  # the writer's holds; Orbax has used several
            return spec
        return {"driver": "file", "path": self._path.rstrip("/") + "/"}

    def _open(self, leaf: StoredLeaf) -> ts.Future[ts.TensorStore]:
        kvstore = self._kvstore()
        path = kvstore.get("path", "") + layout.array_prefix(leaf.name)
        spec: dict[str, Any] = {
            "driver": self._tree.driver,
            "kvstore": {**kvstore, "path": path},
            "fill_missing_data_reads": self._tree.sparse,
        }
        return ts.open(spec, context=self._context, open=True, read=True)

    def metadata(self, names: Sequence[str]) -> list[tuple[Shape, str, Shape] | str]:
        """(shape, dtype, chunk shape) of arrays by name, or the error text of one."""
        opening = [self._open(StoredLeaf((), "array", name=name)) for name in names]
        found: list[tuple[Shape, str, Shape] | str] = []
        for future in opening:
            try:
                array = future.result()
            except ValueError as exc:
                found.append(str(exc))
                continue
            chunk: Any = array.chunk_layout.read_chunk.shape or array.shape
            found.append((tuple(array.shape), array.dtype.name, tuple(map(int, chunk))))
        return found

    def read(
        self,
        units: Sequence[Unit],
        wanted: Mapping[int, Sequence[Box]],
        into: Mapping[int, Sequence[np.ndarray]],
    ) -> None:
        """Fills `into[leaf][i]`, the arrays for `wanted[leaf][i]`, from `units`.

        Raises CorruptCheckpoint for whatever cannot be read or has another digest.
        """
        pending: collections.deque[tuple[Asked, bool]] = collections.deque()
        ahead = 0
        for unit, opening in zip(units, self.begin(units), strict=True):
            leaf = self._tree.leaves[unit.leaf]
            values, direct = _place_for(unit, leaf, wanted[unit.leaf], into[unit.leaf])
            pending.append((self.ask(unit, opening, values), direct))
            ahead += values.nbytes
            while ahead > READ_AHEAD_BYTES and len(pending) > 1:
                ahead -= self._finish(*pending.popleft(), wanted, into)
        while pending:
            self._finish(*pending.popleft(), wanted, into)

    def begin(self, units: Sequence[Unit]) -> list[Opening]:
        """Starts to open the array of each unit, once per leaf; None where a key is enough."""
        opening: dict[int, Opening] = {}
        found: list[Opening] = []
        for unit in units:
            if self._goes_by_key(unit):
                found.append(None)
                continue
            if unit.leaf not in opening:
                opening[unit.leaf] = self._open(self._tree.leaves[unit.leaf])
            found.append(opening[unit.leaf])
        return found

    def ask(self, unit: Unit, opening: Opening, values: np.ndarray) -> Asked:
        """Starts to read a unit that was begun into `values`.

        Raises CorruptCheckpoint where its array is not the one that the tree names.
        """
        leaf = self._tree.leaves[unit.leaf]
        if opening is None:
            return Asked(unit, values, self._ask_by_key(leaf, unit.chunks[0]), True)
        array = self._checked(leaf, opening)
        future = _read_into(values, array[unit.box.slices] if unit.box.start else array)
        return Asked(unit, values, future, False)

    def settle(self, asked: Asked) -> None:
        """Waits until a unit's values are there and compares their digest.

        Raises CorruptCheckpoint with one problem, which names leaf and box.
        """
        unit, values = asked.unit, asked.values
        leaf = self._tree.leaves[unit.leaf]
        try:
            found = asked.future.result()
        except ValueError as exc:
            raise self._corrupt(
                leaf, f"box {unit.box} cannot be read ({exc})", not _is_damage(str(exc))
            ) from exc
        if asked.by_key:
            data = found.value  # a copy each time
            if found.state != "value" or len(data) != values.nbytes:
                there = f"{len(data)} bytes" if found.state == "value" else "missing"
                raise self._corrupt(leaf, f"the chunk of box {unit.box} is {there}")
            values[...] = np.frombuffer(data, values.dtype).reshape(values.shape)
        for index in unit.chunks if self._compare else ():
            known = self._digests.get((unit.leaf, index))
            if known and arrays.digest(values) != known:
                raise self._corrupt(leaf, f"box {unit.box} has other bytes than were saved")

    def _goes_by_key(self, unit: Unit) -> bool:
        """A whole chunk with a digest, small, and stored as its plain bytes without padding."""
        leaf = self._tree.leaves[unit.leaf]
        return (
            len(unit.chunks) == 1
            and bool(self._digests.get((unit.leaf, unit.chunks[0])))
            and self._tree.compression is None
            and unit.box.shape == leaf.chunk
            and unit.box.size * manifest.itemsize(leaf.stored_dtype) <= SMALL_BYTES
        )

    def _ask_by_key(self, leaf: StoredLeaf, index: Shape) -> ts.Future[Any]:
        if self._database is None:
            self._database = ts.KvStore.open(self._kvstore(), context=self._context).result()
        return self._database.read(layout.chunk_key(self._tree.driver, leaf.name, index))

    def _checked(self, leaf: StoredLeaf, opening: ts.Future[ts.TensorStore]) -> ts.TensorStore:
        try:
            array = opening.result()
        except ValueError as exc:
            raise self._corrupt(
                leaf, f"its array cannot be opened ({exc})", not _is_damage(str(exc))
            ) from exc
        if tuple(array.shape) != leaf.stored_shape or array.dtype.name != leaf.stored_dtype:
            raise self._corrupt(
                leaf,
                f"the array has {array.dtype.name}{list(array.shape)}, the tree says "
                f"{leaf.stored_dtype}{list(leaf.stored_shape)}",
            )
        return array

    def _finish(
        self,
        asked: Asked,
        direct: bool,
        wanted: Mapping[int, Sequence[Box]],
        into: Mapping[int, Sequence[np.ndarray]],
    ) -> int:
        """Settles a unit and hands it on unless it lies in its target; returns its bytes."""
        self.settle(asked)
        unit, values = asked.unit, asked.values
        leaf = self._tree.leaves[unit.leaf]
        if not direct:
            logical = values.view(leaf.dtype) if leaf.dtype else values
            for i in unit.targets:
                common = boxes.intersect(unit.box, wanted[unit.leaf][i])
                if common is not None:
                    piece = logical[common.within(unit.box)]
                    into[unit.leaf][i][common.within(wanted[unit.leaf][i])] = piece
        return values.nbytes

    def _corrupt(
        self, leaf: StoredLeaf, message: str, transient: bool = False
    ) -> CorruptCheckpoint:
        item = self._path.rstrip("/").rsplit("/", 1)[-1]
        place = item if self._tree.ocdbt else f"{item}/{leaf.name}"
        return CorruptCheckpoint(self._step, [Problem(place, message, leaf.dotted, transient)])


def _is_damage(text: str) -> bool:
    """Whether TensorStore's error is about what is stored rather than about reaching it."""
    return any(code in text for code in ("DATA_LOSS", "NOT_FOUND", "OUT_OF_RANGE", "FAILED_PRE"))


def _place_for(
    unit: Unit, leaf: StoredLeaf, wanted: Sequence[Box], into: Sequence[np.ndarray]
) -> tuple[np.ndarray, bool]:
    """Where a unit is read to: straight into its one target, else an array of its own."""
    if len(unit.targets) == 1:
        box, target = wanted[unit.targets[0]], into[unit.targets[0]]
        same_type = target.dtype == np.dtype(leaf.dtype or leaf.stored_dtype)
        if same_type and boxes.contains(box, unit.box):
            where: Any = (*unit.box.within(box), ...)  # the dots keep 0-d arrays arrays
            return target[where].view(leaf.stored_dtype), True
    return np.empty(unit.box.shape, leaf.stored_dtype), False


def _read_into(values: np.ndarray, source: ts.TensorStore) -> Any:
    target = ts.array(values)
    if source.rank:
        source = source[ts.d[:].translate_to[0]]
    return target.write(source)
