"""Arrays out of zarr: strict, verified, straight into the caller's memory.

Where a unit is one whole chunk that lies in the database as plain bytes, its digest says more than
opening the array would. A restore reads such chunks from their files, see `ckptmgr.engine.direct`;
what does not come that way, or is not looked for there, is read by its key where it is small, for
the opening is most of the time that a small leaf takes. Everything else goes through TensorStore's
zarr driver.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts

from ckptmgr.core import boxes, layout, manifest
from ckptmgr.core.boxes import Box, Shape
from ckptmgr.core.manifest import StoredLeaf, StoredTree
from ckptmgr.core.plan import Unit
from ckptmgr.engine import arrays, direct
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
        self._places: direct.Places = {}
        self._direct: direct.DirectReader | None = None

    def locate(self, units: Sequence[Unit]) -> None:
        """Looks for the places of chunks in their files, for what `start` is going to be asked."""
        if self._tree.ocdbt and self._tree.compression is None and self._digests and units:
            kvstore, count = self._kvstore(), len(units)
            self._places = direct.find_places(self._path, kvstore, self._context, count)

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

    def start(
        self,
        units: Sequence[Unit],
        wanted: Mapping[int, Sequence[Box]],
        into: Mapping[int, Sequence[np.ndarray]],
    ) -> Callable[[], None]:
        """Begins to fill `into[leaf][i]`, the arrays for `wanted[leaf][i]`, from `units`.

        What it returns must be called, once: it ends when all is there, and raises CorruptCheckpoint
        for whatever cannot be read or has another digest. When all is read, `close` must be called.
        """
        if self._direct is None:
            self._direct = direct.DirectReader()
        pieces: list[direct.Piece] = []
        left: list[int] = []
        for number, unit in enumerate(units):
            piece = self._piece(number, unit, wanted[unit.leaf], into[unit.leaf])
            if piece is None:
                left.append(number)
            else:
                pieces.append(piece)
        reading = self._direct.start(pieces)

        def finish() -> None:
            numbers = sorted([*left, *reading()])
            self._read([units[number] for number in numbers], wanted, into)

        return finish

    def close(self) -> None:
        """Ends what `start` has made."""
        if self._direct is not None:
            self._direct.close()

    def _read(
        self,
        units: Sequence[Unit],
        wanted: Mapping[int, Sequence[Box]],
        into: Mapping[int, Sequence[np.ndarray]],
    ) -> None:
        """The same through TensorStore."""
        pending: collections.deque[tuple[Asked, bool]] = collections.deque()
        ahead = 0
        for unit, opening in zip(units, self.begin(units), strict=True):
            leaf = self._tree.leaves[unit.leaf]
            values, straight = _place_for(unit, leaf, wanted[unit.leaf], into[unit.leaf])
            pending.append((self.ask(unit, opening, values), straight))
            ahead += values.nbytes
            while ahead > READ_AHEAD_BYTES and len(pending) > 1:
                ahead -= self._finish(*pending.popleft(), wanted, into)
        while pending:
            self._finish(*pending.popleft(), wanted, into)

    def _piece(
        self, number: int, unit: Unit, wanted: Sequence[Box], into: Sequence[np.ndarray]
    ) -> direct.Piece | None:
        leaf = self._tree.leaves[unit.leaf]
        shape = unit.box.shape
        known = self._digest_of_plain(unit, leaf, shape) if self._places else None
        if known is None:
            return None
        place = self._places.get(layout.chunk_key(self._tree.driver, leaf.name, unit.chunks[0]))
        size = manifest.itemsize(leaf.stored_dtype)
        length = place.length if isinstance(place, direct.Place) else len(place or b"")
        if place is None or length != math.prod(leaf.chunk) * size:
            return None
        target = _target_of(unit, leaf, wanted, into)
        nbytes, digest = math.prod(shape) * size, known if self._compare else ""
        if target is not None and target.flags.c_contiguous:
            run = target.reshape(-1).view(np.uint8)
            return direct.Piece(number, place, nbytes, digest, run)

        def put(found: np.ndarray) -> None:
            values = found.view(leaf.stored_dtype).reshape(shape)
            _scatter(unit, leaf, values, wanted, into)

        return direct.Piece(number, place, nbytes, digest, None, put)

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

    def _digest_of_plain(self, unit: Unit, leaf: StoredLeaf, shape: Shape) -> str | None:
        """Of one whole chunk that is stored as its plain bytes, padding only behind them."""
        if (
            len(unit.chunks) != 1
            or self._tree.compression is not None
            or shape[1:] != leaf.chunk[1:]
        ):
            return None
        return self._digests.get((unit.leaf, unit.chunks[0])) or None

    def _goes_by_key(self, unit: Unit) -> bool:
        """A whole chunk, small, and without padding."""
        leaf = self._tree.leaves[unit.leaf]
        shape = unit.box.shape
        return (
            shape == leaf.chunk
            and self._digest_of_plain(unit, leaf, shape) is not None
            and math.prod(shape) * manifest.itemsize(leaf.stored_dtype) <= SMALL_BYTES
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
        straight: bool,
        wanted: Mapping[int, Sequence[Box]],
        into: Mapping[int, Sequence[np.ndarray]],
    ) -> int:
        """Settles a unit and hands it on unless it lies in its target; returns its bytes."""
        self.settle(asked)
        unit, values = asked.unit, asked.values
        if not straight:
            leaf = self._tree.leaves[unit.leaf]
            _scatter(unit, leaf, values, wanted[unit.leaf], into[unit.leaf])
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
    target = _target_of(unit, leaf, wanted, into)
    if target is None:
        return np.empty(unit.box.shape, leaf.stored_dtype), False
    return target, True


def _target_of(
    unit: Unit, leaf: StoredLeaf, wanted: Sequence[Box], into: Sequence[np.ndarray]
) -> np.ndarray | None:
    """Where the values of a unit lie in the one target that takes all of them as they are stored."""
    if len(unit.targets) != 1:
        return None
    box, target = wanted[unit.targets[0]], into[unit.targets[0]]
    if target.dtype != manifest.dtype_of(leaf.dtype or leaf.stored_dtype):
        return None
    if box == unit.box:
        return target.view(leaf.stored_dtype)
    if not boxes.contains(box, unit.box):
        return None
    where: Any = (*unit.box.within(box), ...)  # the dots keep 0-d arrays arrays
    return target[where].view(leaf.stored_dtype)


def _scatter(
    unit: Unit,
    leaf: StoredLeaf,
    values: np.ndarray,
    wanted: Sequence[Box],
    into: Sequence[np.ndarray],
) -> None:
    """Copies the values of a unit to every target that it meets."""
    logical = values.view(leaf.dtype) if leaf.dtype else values
    for i in unit.targets:
        common = boxes.intersect(unit.box, wanted[i])
        if common is not None:
            into[i][common.within(wanted[i])] = logical[common.within(unit.box)]


def _read_into(values: np.ndarray, source: ts.TensorStore) -> Any:
    target = ts.array(values)
    if source.rank:
        source = source[ts.d[:].translate_to[0]]
    return target.write(source)
