"""Talking to the other processes of a job: one primitive, `exchange`, in two forms.

`exchange`: every process gives a payload, process 0 makes an answer of all of them, every process
gets it. `lead`: process 0 gives the answer by itself, nobody else is waited for. Each has a name
(the phase) and an end (the deadline). Both are notes on a board: a payload has a key of its own per
process, the answer has one key that is written once. A process that fails writes the failure where
the answer would go; so all that wait for the answer learn of it at once, nobody waits for a process
that has failed already, and all raise the same `PeerFailed`. Process 0 looks for such a failure
while it waits for payloads.

No payload is sent to everybody: an answer is what process 0 makes of them. So a phase costs each
process two messages and process 0 one for each, whatever the number of processes.

`Alone` is the whole truth for a job of one process.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import jax

from ckptmgr.core import manifest
from ckptmgr.engine.board import Board, BoardLost, JaxBoard
from ckptmgr.errors import CheckpointError, PeerFailed

logger = logging.getLogger("ckptmgr")

LOOK_SECONDS = 0.25
"""How often process 0, waiting for a payload, looks whether somebody has failed."""

TELL_SECONDS = 30.0
"""How often somebody who waits says for whom."""

GRACE_SECONDS = 2.0
"""What others wait longer than process 0, which knows who is silent."""

BUCKET = 256
"""Payloads that are fetched together."""

TEXT = 2000
"""Characters of a failure that are passed on."""

Answer = Callable[[Sequence[bytes]], bytes]
"""What process 0 makes of the payloads of all, in rank order."""


def nothing(_: Sequence[bytes]) -> bytes:
    """The answer where only that all have come counts."""
    return b""


class Coordinator(Protocol):
    """Attributes: rank: this process's number. world: how many there are."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def exchange(
        self, phase: str, payload: bytes, deadline_seconds: float, answer: Answer = nothing
    ) -> bytes:
        """Gives a payload; returns what `answer` makes of all of them on process 0.

        Raises PeerFailed, on every process alike, where one has failed or stays silent.
        """
        ...

    def lead(self, phase: str, work: Callable[[], bytes], deadline_seconds: float) -> bytes:
        """What `work`, done by process 0 alone, returns. Raises PeerFailed as `exchange` does."""
        ...

    def failed(self, phase: str, error: BaseException) -> BaseException:
        """Tells all that wait in `phase`, now or later, that this process failed; what to raise."""
        ...

    def forget(self, phase: str) -> None:
        """Removes the notes of a phase, and of those whose names begin with it and "/"."""
        ...


class Alone:
    """A job of one process."""

    rank = 0
    world = 1

    def exchange(
        self, phase: str, payload: bytes, deadline_seconds: float, answer: Answer = nothing
    ) -> bytes:
        return answer([payload])

    def lead(self, phase: str, work: Callable[[], bytes], deadline_seconds: float) -> bytes:
        return work()

    def failed(self, phase: str, error: BaseException) -> BaseException:
        return error

    def forget(self, phase: str) -> None:
        pass


class Together:
    """One process of several, and one purpose: two managers never meet.

    Args:
      board: where notes are left.
      rank, world: this process's number, and how many there are.
      name: of the purpose, the same in every process; what all keys begin with.
      monotonic: seconds.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        world: int,
        name: str,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.world = world
        self._board = board
        self._name = name
        self._monotonic = monotonic

    def exchange(
        self, phase: str, payload: bytes, deadline_seconds: float, answer: Answer = nothing
    ) -> bytes:
        if self.rank != 0:
            self._put(phase, self._payload_key(phase, self.rank), payload)
            return self._hear(phase, deadline_seconds)
        payloads = [payload, *self._gather(phase, deadline_seconds)]
        return self.lead(phase, lambda: answer(payloads), deadline_seconds)

    def lead(self, phase: str, work: Callable[[], bytes], deadline_seconds: float) -> bytes:
        if self.rank != 0:
            return self._hear(phase, deadline_seconds)
        try:
            answer = work()
        except BaseException as exc:
            told = self.failed(phase, exc)
            if told is exc or not isinstance(exc, Exception):
                raise
            raise told from exc
        self._settle(phase, b"+" + answer)
        return answer

    def failed(self, phase: str, error: BaseException) -> BaseException:
        if isinstance(error, PeerFailed):
            told = error
        else:
            text = f"{type(error).__name__}: {error}"
            told = PeerFailed(phase, {self.rank: text[:TEXT]}, ())
        try:
            self._settle(phase, _failure(told))
        except PeerFailed as others:  # another failure was there first
            told = others
        return told

    def forget(self, phase: str) -> None:
        try:
            self._board.remove(f"{self._name}/{phase}")
        except BoardLost:
            logger.debug("the notes of %s stay", phase)

    # -- notes ------------------------------------------------------------------------------

    def _bucket(self, phase: str, number: int) -> str:
        return f"{self._name}/{phase}/{number}"

    def _payload_key(self, phase: str, rank: int) -> str:
        return f"{self._bucket(phase, rank // BUCKET)}/{rank}"

    def _answer_key(self, phase: str) -> str:
        return f"{self._name}/{phase}/answer"

    def _put(self, phase: str, key: str, value: bytes) -> bool:
        try:
            return self._board.put(key, value)
        except BoardLost as exc:
            raise PeerFailed(phase, {}, (0,)) from exc

    def _get(self, phase: str, key: str, seconds: float) -> bytes | None:
        try:
            return self._board.get(key, seconds)
        except BoardLost as exc:
            raise PeerFailed(phase, {}, (0,)) from exc

    def _settle(self, phase: str, note: bytes) -> None:
        """Writes the outcome of a phase. Raises PeerFailed where a failure was there first."""
        if self._put(phase, self._answer_key(phase), note):
            return
        there = self._get(phase, self._answer_key(phase), LOOK_SECONDS)
        if there is not None and not there.startswith(b"+"):
            raise _read(there)

    def _gather(self, phase: str, deadline_seconds: float) -> list[bytes]:
        """The payloads of all others, for process 0."""
        found: dict[int, bytes] = {}
        until = self._monotonic() + deadline_seconds
        waiting = _Waiting(phase, self._monotonic)
        missing = set(range(1, self.world))
        while missing:
            rank = min(missing)
            left = until - self._monotonic()
            if self._get(phase, self._payload_key(phase, rank), min(LOOK_SECONDS, left)) is None:
                note = self._get(phase, self._answer_key(phase), 0)
                if note is not None and not note.startswith(b"+"):
                    raise _read(note)
                if left <= LOOK_SECONDS or waiting.is_due():
                    self._fetch(phase, missing, found)
                    missing -= found.keys()
                    if missing and left <= LOOK_SECONDS:
                        raise self.failed(phase, PeerFailed(phase, {}, tuple(missing)))
                    waiting.tell(missing)
                continue
            self._fetch(phase, {r for r in missing if r // BUCKET == rank // BUCKET}, found)
            missing -= found.keys()
        return [found[rank] for rank in range(1, self.world)]

    def _fetch(self, phase: str, ranks: Collection[int], found: dict[int, bytes]) -> None:
        """Adds what is there of `ranks`, and of others in their buckets, to `found`."""
        for bucket in {rank // BUCKET for rank in ranks}:
            try:
                notes = self._board.all(self._bucket(phase, bucket))
            except BoardLost as exc:
                raise PeerFailed(phase, {}, (0,)) from exc
            for key, value in notes.items():
                found[int(key.rpartition("/")[2])] = value

    def _hear(self, phase: str, deadline_seconds: float) -> bytes:
        """The answer of process 0, for all others."""
        until = self._monotonic() + deadline_seconds + GRACE_SECONDS
        waiting = _Waiting(phase, self._monotonic)
        while True:
            left = until - self._monotonic()
            note = self._get(phase, self._answer_key(phase), max(0.0, min(TELL_SECONDS, left)))
            if note is not None:
                break
            if left <= TELL_SECONDS:
                raise self.failed(phase, PeerFailed(phase, {}, (0,)))
            waiting.tell(self._silent(phase))
        if not note.startswith(b"+"):
            raise _read(note)
        return note[1:]

    def _silent(self, phase: str) -> Collection[int]:
        """Whose payload process 0 may be waiting for; process 0 itself where that is unknown, and
        in a job of more than `BUCKET`, where process 0 says it: looking costs all payloads."""
        if self.world > BUCKET:
            return (0,)
        try:
            there = {int(key.rpartition("/")[2]) for key in self._board.all(self._bucket(phase, 0))}
        except BoardLost:
            return (0,)
        return set(range(1, self.world)) - there or (0,) if there else (0,)


class _Waiting:
    """Says now and then for whom somebody waits."""

    def __init__(self, phase: str, monotonic: Callable[[], float]) -> None:
        self._phase = phase
        self._monotonic = monotonic
        self._started = self._told = monotonic()

    def is_due(self) -> bool:
        return self._monotonic() - self._told >= TELL_SECONDS * 0.99

    def tell(self, ranks: Collection[int]) -> None:
        if ranks and self.is_due():
            self._told = self._monotonic()
            names = sorted(ranks)
            shown = ", ".join(map(str, names[:20])) + (" and others" if len(names) > 20 else "")
            waited = self._told - self._started
            logger.warning("%s: waiting for process %s since %.0f s", self._phase, shown, waited)


def _failure(error: PeerFailed) -> bytes:
    return json.dumps([error.phase, list(error.failures.items()), list(error.silent)]).encode()


def _read(note: bytes) -> PeerFailed:
    phase, failures, silent = json.loads(note)
    return PeerFailed(phase, {rank: text for rank, text in failures}, silent)


def odd_ones(phase: str, texts: Sequence[str]) -> PeerFailed | None:
    """What is wrong where processes do not say the same; None where they do.

    The most are taken to be right, and of equal groups the one with process 0.

    Args:
      texts: what each process does, in rank order: "saves step 3".
    """
    counts = Counter(texts)
    if len(counts) == 1:
        return None
    most = max(counts.values())
    right = next(text for text in texts if counts[text] == most)
    ranks = [rank for rank, text in enumerate(texts) if text == right]
    shown = ", ".join(map(str, ranks[:20])) + (" and others" if len(ranks) > 20 else "")
    others = f"process{'es' if len(ranks) > 1 else ''} {shown}"
    failures = {
        rank: f"{text}, not as {others}: {right}"
        for rank, text in enumerate(texts)
        if text != right
    }
    return PeerFailed(phase, failures, ())


@contextmanager
def telling(coordinator: Coordinator, *phases: str, own: bool = False) -> Iterator[None]:
    """Whatever goes wrong in the block is told to all that wait in `phases`, now or later.

    In a job of several processes all raise the same `PeerFailed` then, here too, where its cause is
    what went wrong; with `own` this process raises what went wrong itself.
    """
    try:
        yield
    except PeerFailed:
        raise  # all know
    except BaseException as exc:
        told = [coordinator.failed(phase, exc) for phase in phases]
        if own or told[-1] is exc or not isinstance(exc, Exception):
            raise
        raise told[-1] from exc


@contextmanager
def unwrapped() -> Iterator[None]:
    """Where process 0 fails in what it does for all, it raises what went wrong itself."""
    try:
        yield
    except PeerFailed as exc:
        if isinstance(exc.__cause__, CheckpointError) and not isinstance(exc.__cause__, BoardLost):
            raise exc.__cause__ from None
        raise


_made: Counter[str] = Counter()
"""How many coordinators this process has for each directory: the n-th ones belong together."""


def of_this_job(root: str, alone: bool = False) -> Coordinator:
    """The coordinator of the running job for one manager of the directory `root`.

    Every process has to make its managers of a directory in the same order. Raises InvalidOption
    where JAX's coordination service is not there.
    """
    if alone or jax.process_count() == 1:
        return Alone()
    _made[root] += 1
    name = f"ckptmgr/{manifest.digest(root.encode())[:16]}.{_made[root]}"
    return Together(JaxBoard(), jax.process_index(), jax.process_count(), name)
