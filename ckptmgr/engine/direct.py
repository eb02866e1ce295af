"""Plain chunks straight out of the files in which an OCDBT database keeps them.

TensorStore reads a chunk into memory of its own and copies it from there to where it belongs. This
reads it where it belongs, and takes the digest while the bytes are in the cache: one copy less, and
no fresh memory besides the target. Small chunks that lie one behind the other are read together.

Where a chunk lies is read from the database's tree of keys (`ckptmgr.core.ocdbt`), and nothing
there is believed: what is not found, cannot be read, or has another digest is left to TensorStore,
whose word counts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts
import xxhash

from ckptmgr.core import ocdbt
from ckptmgr.core.ocdbt import Place
from ckptmgr.engine import arrays

logger = logging.getLogger("ckptmgr")

BLOCK_BYTES = 2**20
"""Read at a time, so that the digest finds it in the cache."""

SPAN_BYTES, SPAN_PIECES = 2**20, 1000
"""Up to this size, and so many at most, small chunks are read together: in one call of the system,
which takes 1,024 places (IOV_MAX)."""

ALONE_BYTES = 2**18
"""From this size on a chunk is read alone, straight to where it belongs."""

FEW_KEYS = 50_000
"""The places of so many keys are looked up for any number of chunks; of more only for a good part
of them, since the whole tree of keys is looked through."""

_ROOT = re.compile(r"btreenode:([\w./-]*):([\w./-]+):(\d+):(\d+)", re.ASCII)

Places = Mapping[str, Place | bytes]
"""Key -> where its value lies, as an absolute path, or the value."""


def find_places(path: str, database: Mapping[str, Any], context: ts.Context, count: int) -> Places:
    """Where the values of the database in the directory `path` lie; nothing where that is not told.

    Args:
      database: spec of the database.
      count: how many keys are of interest.
    """
    try:
        root = arrays.root_of(database, context)
        keys = root["statistics"]["num_keys"]
        told = _ROOT.fullmatch(root.get("location", ""))
        if told is None or (keys > FEW_KEYS and keys > 16 * count):
            return {}
        with open(_below(path, told[1] + told[2]), "rb") as file:
            file.seek(int(told[3]))
            node = ocdbt.leaf_node(file.read(int(told[4])))
        files = {place.file for place in node.values() if isinstance(place, Place)}
        paths = {file: _below(path, told[1] + file) for file in files}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
        # whatever is wrong with the database, TensorStore says it better
        logger.debug("%s is read through TensorStore alone (%s)", path, exc)
        return {}
    return {
        key: place._replace(file=paths[place.file]) if isinstance(place, Place) else place
        for key, place in node.items()
    }


def _below(path: str, file: str) -> str:
    if ".." in file.split("/"):
        raise ValueError(f"{file} lies outside")
    return os.path.join(path, file.lstrip("/"))


class Piece(NamedTuple):
    """A chunk to read.

    Attributes:
      number: what the caller calls it.
      place: where it lies; of a chunk that reaches beyond the array its beginning is read.
      nbytes: its bytes, without what reaches beyond the array.
      digest: of these, "" where nothing is compared.
      target: where they belong, as bytes, where that is one run of memory.
      put: takes them otherwise, and is None where there is a target; they are gone when it returns.
    """

    number: int
    place: Place | bytes
    nbytes: int
    digest: str
    target: np.ndarray | None
    put: Callable[[np.ndarray], None] | None = None


class DirectReader:
    """Reads pieces to where they belong, on threads of its own, until `close`."""

    def __init__(self) -> None:
        self._files = _Files()
        self._workers = max(2, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._workers, "ckptmgr-read")

    def start(self, pieces: Sequence[Piece]) -> Callable[[], list[int]]:
        """Begins to read. What it returns waits until all are there, and gives the numbers of those
        that could not be read, or were not what they should be, ascending."""
        failed: list[int] = []
        for piece in pieces:
            if not isinstance(piece.place, Place):
                failed += _take(piece, np.frombuffer(piece.place, np.uint8))
        spans = list(_spans([piece for piece in pieces if isinstance(piece.place, Place)]))
        asked, told = _queue_of(spans), queue.SimpleQueue[list[int] | BaseException]()

        def work() -> None:  # a task for each span would take longer than many a span
            with contextlib.suppress(queue.Empty):
                while True:
                    told.put(_outcome(self._files.span, asked.get_nowait()))

        with contextlib.suppress(RuntimeError):  # no thread starts while the interpreter ends
            for _ in range(min(len(spans), self._workers)):
                self._pool.submit(work)

        def finish() -> list[int]:
            work()
            for found in [told.get() for _ in spans]:  # each is told of, whoever has read it
                if isinstance(found, BaseException):
                    raise found
                failed.extend(found)
            return sorted(failed)

        return finish

    def close(self) -> None:
        """Ends the threads, without what nobody waits for any more, and closes the files."""
        self._pool.shutdown(cancel_futures=True)
        self._files.close()


def _queue_of(spans: Sequence[list[Piece]]) -> queue.SimpleQueue[list[Piece]]:
    found: queue.SimpleQueue[list[Piece]] = queue.SimpleQueue()
    for span in spans:
        found.put(span)
    return found


def _outcome(
    read: Callable[[list[Piece]], list[int]], span: list[Piece]
) -> list[int] | BaseException:
    """What reading a span gives or raises, for the thread that asks."""
    try:
        return read(span)
    except BaseException as exc:
        return exc


def _spans(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces that are read together: neighbours in a file, or a large one alone."""
    span: list[Piece] = []
    size, end = 0, ("", 0)
    for piece in sorted(pieces, key=lambda piece: piece.place):
        place = piece.place
        assert isinstance(place, Place)
        large = place.length >= ALONE_BYTES
        full = size > SPAN_BYTES or len(span) == SPAN_PIECES
        if span and (large or full or (place.file, place.offset) != end):
            yield span
            span, size = [], 0
        span.append(piece)
        size += place.length
        end = ("", 0) if large else (place.file, place.offset + place.length)
    if span:
        yield span


class _Files:
    """The files that are read, and memory for what goes to its place by a copy."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()
        self._scratch = threading.local()

    def span(self, pieces: Sequence[Piece]) -> list[int]:
        """Reads pieces that lie one behind the other; the numbers of those that failed."""
        if len(pieces) == 1:
            return self._one(pieces[0])
        first, last = pieces[0].place, pieces[-1].place
        assert isinstance(first, Place) and isinstance(last, Place)
        nbytes = last.offset + last.length - first.offset
        targets = [piece.target.data for piece in pieces if piece.target is not None]
        if len(targets) == len(pieces) and sum(piece.nbytes for piece in pieces) == nbytes:
            return self._straight(first, pieces, targets, nbytes)
        found = self._memory(nbytes)
        if not self._filled(first, found):
            return [piece.number for piece in pieces]
        failed = []
        at = 0
        for piece in pieces:
            failed += _take(piece, found[at : at + piece.nbytes])
            at += piece.place.length  # type: ignore[union-attr]
        return failed

    def _straight(
        self, first: Place, pieces: Sequence[Piece], targets: Sequence[memoryview], nbytes: int
    ) -> list[int]:
        """Reads pieces, from the place of the first on, to where they belong, in one call."""
        try:
            count = os.preadv(self._open(first.file), targets, first.offset)
        except (OSError, OverflowError, ValueError):
            return [piece.number for piece in pieces]
        if count != nbytes:
            return [number for piece in pieces for number in self._one(piece)]
        return [
            piece.number
            for piece, target in zip(pieces, targets, strict=True)
            if piece.digest and xxhash.xxh3_128_hexdigest(target) != piece.digest
        ]

    def _one(self, piece: Piece) -> list[int]:
        assert isinstance(piece.place, Place)
        found = piece.target
        if found is None:
            found = self._memory(piece.nbytes)
        seen = xxhash.xxh3_128() if piece.digest else None
        if not self._filled(piece.place, found, seen):
            return [piece.number]
        if seen is not None and seen.hexdigest() != piece.digest:
            return [piece.number]
        if piece.target is None:
            _put(piece, found)
        return []

    def _filled(self, place: Place, into: np.ndarray, seen: Any = None) -> bool:
        """Whether what lies at a place could be read; `seen`, a hash, is shown it."""
        try:
            _fill(self._open(place.file), place.offset, into, seen)
        except (OSError, EOFError, OverflowError, ValueError):  # no such file, place or name
            return False
        return True

    def _open(self, path: str) -> int:
        with self._lock:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._files[path]

    def _memory(self, nbytes: int) -> np.ndarray:
        """Memory of this thread, used again for the next."""
        kept: np.ndarray | None = getattr(self._scratch, "memory", None)
        if kept is None or kept.nbytes < nbytes:
            kept = self._scratch.memory = np.empty(max(nbytes, SPAN_BYTES), np.uint8)
        return kept[:nbytes]

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)


def _fill(file: int, offset: int, into: np.ndarray, seen: Any = None) -> None:
    """Fills `into` from a file, and shows `seen`, a hash, what was read."""
    view = into.data
    at = 0
    while at < len(view):
        count = os.preadv(file, [view[at : at + BLOCK_BYTES]], offset + at)
        if not count:
            raise EOFError
        if seen is not None:
            seen.update(view[at : at + count])
        at += count


def _put(piece: Piece, found: np.ndarray) -> None:
    assert piece.put is not None, "a piece without a target has somewhere to be put"
    piece.put(found)


def _take(piece: Piece, found: np.ndarray) -> list[int]:
    """Puts what was read in its place if it is what it should be, else gives its number."""
    found = found[: piece.nbytes]
    if found.nbytes != piece.nbytes:
        return [piece.number]
    if piece.digest and xxhash.xxh3_128_hexdigest(found.data) != piece.digest:
        return [piece.number]
    if piece.target is not None:
        piece.target[...] = found
    else:
        _put(piece, found)
    return []
