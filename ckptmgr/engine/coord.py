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

The n-th calls of a kind belong together: the first part of a phase's name is "save.3". Where a
process has made none, the others give that one up and leave a note of it; the process passes over
it when it comes to it with another call. So one call that was missed does not spoil all later ones.

`Alone` is the whole truth for a job of one process.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import jax

from ckptmgr.core import manifest
from ckptmgr.engine.board import Board, BoardLost, JaxBoard
from ckptmgr.engine.meeting import Alone, Answer, Coordinator, InDoubt, nothing
from ckptmgr.errors import PeerFailed, StoreError

logger = logging.getLogger("ckptmgr")

LOOK_SECONDS = 0.25
"""How often process 0, waiting for a payload, looks whether somebody has failed."""

TELL_SECONDS = 30.0
"""How often somebody who waits says for whom."""

GRACE_SECONDS = 2.0
"""What others wait longer than process 0, which knows who is silent."""

ANSWER_SECONDS = 10.0
"""How long the board may take for a note, beyond the deadline. JAX's client would wait for a process
0 that has stopped until it goes on."""

BUCKET = 256
"""Payloads that are fetched together."""

TEXT = 2000
"""Characters of a failure that are passed on."""


class Together:
    """One process of several, and one purpose: two managers never meet.

    Args:
      board: where notes are left.
      rank, world: this process's number, and how many there are.
      name: of the purpose, the same in every process; what all keys begin with.
      monotonic: seconds.
      root, number: of a manager its directory, and its number among those of this directory.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        world: int,
        name: str,
        monotonic: Callable[[], float] = time.monotonic,
        root: str = "",
        number: int = 1,
    ) -> None:
        self.rank = rank
        self.world = world
        self._board = board
        self._name = name
        self._monotonic = monotonic
        self._root = root
        self._number = number
        self._calls: dict[str, tuple[int, str]] = {}  # kind -> number of the latest, and its digest
        self._passed: Counter[str] = Counter()  # kind -> how many were passed over
        self._met = False  # whether all were ever heard of

    def exchange(
        self, phase: str, payload: bytes, deadline_seconds: float, answer: Answer = nothing
    ) -> bytes:
        until = self._monotonic() + deadline_seconds
        phase = self._join(phase, payload, deadline_seconds)
        if self.rank != 0:
            note = (self._payload_key(phase, self.rank), payload)
            self._put(phase, note, seconds=until - self._monotonic())
            return self._hear(phase, until - self._monotonic())
        payloads = [payload, *self._gather(phase, deadline_seconds)]
        return self._decide(phase, lambda: answer(payloads))

    def lead(
        self,
        phase: str,
        work: Callable[[], bytes],
        deadline_seconds: float,
        call: bytes | None = None,
    ) -> bytes:
        until = self._monotonic() + deadline_seconds
        if call is None:
            phase = self._named(phase)
        else:
            phase = self._join(phase, call, deadline_seconds)
        if self.rank == 0:
            return self._decide(phase, work)
        return self._hear(phase, until - self._monotonic())

    def _decide(self, phase: str, work: Callable[[], bytes]) -> bytes:
        try:
            answer = work()
        except BaseException as exc:
            told = self._fail(phase, exc)
            if told is exc or not isinstance(exc, Exception):
                raise
            raise told from exc
        self._settle(phase, b"+" + answer)
        return answer

    def failed(self, phase: str, error: BaseException) -> BaseException:
        return self._fail(self._named(phase), error)

    def _fail(self, phase: str, error: BaseException, *notes: tuple[str, bytes]) -> BaseException:
        """What to raise for `error`, after leaving other notes and telling all."""
        if isinstance(error, PeerFailed):
            told = error
        else:
            text = f"{type(error).__name__}: {error}"
            unknown = isinstance(error, StoreError) and error.unknown
            told = (InDoubt if unknown else PeerFailed)(phase, {self.rank: text[:TEXT]}, ())
        try:
            self._settle(phase, _failure(told), *notes)
        except PeerFailed as others:  # another failure was there first
            told = others
        return told

    def forget(self, phase: str) -> None:
        try:
            self._ask(self._board.remove, f"{self._name}/{self._named(phase)}")
        except BoardLost:
            logger.debug("the notes of %s stay", phase)

    def mark(self, name: str) -> None:
        with suppress(BoardLost):
            self._ask(self._board.put, f"{self._name}/marks/{name}", b"")

    def is_marked(self, name: str) -> bool:
        with suppress(BoardLost):
            return self._ask(self._board.get, f"{self._name}/marks/{name}", 0) is not None
        return False

    # -- calls ------------------------------------------------------------------------------

    def _named(self, phase: str) -> str:
        """The phase as the others name it, who have made calls that this process has not."""
        call, slash, rest = phase.partition("/")
        kind, number = _numbered(call)
        return f"{kind}.{number + self._passed[kind]}{slash}{rest}" if kind else phase

    def _join(self, phase: str, call: bytes, deadline_seconds: float) -> str:
        """The same; where a call begins, after passing over those that this process has missed."""
        kind, number = _numbered(phase.partition("/")[0])
        if kind and number > self._calls.get(kind, (0, ""))[0]:
            mine = manifest.digest(call)
            self._calls[kind] = number, mine
            while self._was_missed(self._named(phase), mine, deadline_seconds):
                self._passed[kind] += 1
        return self._named(phase)

    def _missed_key(self, phase: str) -> str:
        return f"{self._name}/missed/{phase.partition('/')[0]}"

    def _was_missed(self, phase: str, mine: str, deadline_seconds: float) -> bool:
        """Whether others have given up, and this process has not made, another call than this one.
        Who comes late with the very call hears that they gave up."""
        try:
            key = self._missed_key(phase)
            note = self._ask(self._board.get, key, 0, seconds=deadline_seconds, phase=phase)
        except BoardLost as exc:
            raise PeerFailed(phase, {}, (0,)) from exc
        return note is not None and note != mine.encode()

    def _give_up(self, phase: str, silent: Sequence[int]) -> BaseException:
        """What to raise where processes stay silent, after all have been told."""
        kind, number = _numbered(phase.partition("/")[0])
        latest, mine = self._calls.get(kind, (0, ""))
        notes = []
        if kind and latest + self._passed[kind] == number:
            notes.append((self._missed_key(phase), mine.encode()))
        return self._fail(phase, PeerFailed(phase, self._elsewhere(silent), silent), *notes)

    # -- managers ---------------------------------------------------------------------------

    def announce(self, count: int) -> None:
        """Says that there is this manager, `count` being its number among all of this process."""
        with suppress(BoardLost):
            self._ask(self._board.put, f"{_MADE}/{self.rank}/{count}", self._root.encode())

    def _elsewhere(self, silent: Sequence[int]) -> dict[int, str]:
        """What is wrong with those that do not have this manager."""
        found: dict[int, str] = {}
        if self._met or not self._root:
            return found
        with suppress(BoardLost):
            for rank in silent[:_LOOKED_AT]:
                notes = self._ask(self._board.all, f"{_MADE}/{rank}")
                newest = sorted(notes, key=lambda key: -int(key.rpartition("/")[2]))
                roots = [notes[key].decode() for key in newest]
                count = roots.count(self._root)
                if not count:
                    others = ", ".join(map(repr, list(dict.fromkeys(roots))[:3]))
                    found[rank] = (
                        f"has no manager of {self._root!r}"
                        + (f" but of {others}" if others else "")
                        + ": all processes of a job must make one, of one directory that they share"
                    )
                elif count < self._number:
                    found[rank] = (
                        f"has made {count} managers of {self._root!r} and process {self.rank} "
                        f"{self._number}: every process has to make the same ones"
                    )
        return found

    # -- notes ------------------------------------------------------------------------------

    def _bucket(self, phase: str, number: int) -> str:
        return f"{self._name}/{phase}/{number}"

    def _payload_key(self, phase: str, rank: int) -> str:
        return f"{self._bucket(phase, rank // BUCKET)}/{rank}"

    def _answer_key(self, phase: str) -> str:
        return f"{self._name}/{phase}/answer"

    def _ask(
        self, call: Callable[..., Any], *args: Any, seconds: float | None = None, phase: str = ""
    ) -> Any:
        """What the board answers. Raises BoardLost where it does not in time; says meanwhile in
        which phase somebody waits."""
        if self.rank == 0:  # which has the board
            return call(*args)
        seconds = ANSWER_SECONDS if seconds is None else max(0.0, seconds)
        answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answer.put((call(*args), None))
            except BaseException as exc:
                answer.put((None, exc))

        try:
            threading.Thread(target=ask, name="ckptmgr-ask", daemon=True).start()
        except RuntimeError:  # while the interpreter exits
            ask()
        until = self._monotonic() + seconds
        waiting = _Waiting(phase, self._monotonic)
        while True:
            left = until - self._monotonic()
            with suppress(queue.Empty):
                found, error = answer.get(timeout=max(0.0, min(TELL_SECONDS, left)))
                break
            if left <= TELL_SECONDS:
                raise BoardLost(f"JAX's coordination service has not answered for {seconds:.0f} s")
            if phase:
                waiting.tell((0,))
        if error is not None:
            raise error
        return found

    def _put(self, phase: str, *notes: tuple[str, bytes], seconds: float | None = None) -> bool:
        """Leaves notes one after the other; False where the last was there, which stays."""

        def put() -> bool:
            return [self._board.put(key, value) for key, value in notes][-1]

        try:
            return bool(self._ask(put, seconds=seconds, phase=phase))
        except BoardLost as exc:
            raise PeerFailed(phase, {}, (0,)) from exc

    def _get(self, phase: str, key: str, seconds: float) -> bytes | None:
        try:
            if seconds > 0:  # which JAX's client keeps
                return self._board.get(key, seconds)
            found: bytes | None = self._ask(self._board.get, key, seconds)
            return found
        except BoardLost as exc:
            raise PeerFailed(phase, {}, (0,)) from exc

    def _settle(self, phase: str, note: bytes, *before: tuple[str, bytes]) -> None:
        """Writes the outcome of a phase, after other notes. Raises PeerFailed where a failure was
        there first."""
        if self._put(phase, *before, (self._answer_key(phase), note)):
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
                        raise self._give_up(phase, sorted(missing))
                    waiting.tell(missing)
                continue
            self._fetch(phase, {r for r in missing if r // BUCKET == rank // BUCKET}, found)
            missing -= found.keys()
        self._met = True
        return [found[rank] for rank in range(1, self.world)]

    def _fetch(self, phase: str, ranks: Collection[int], found: dict[int, bytes]) -> None:
        """Adds what is there of `ranks`, and of others in their buckets, to `found`."""
        for bucket in {rank // BUCKET for rank in ranks}:
            try:
                notes = self._ask(self._board.all, self._bucket(phase, bucket))
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
                raise self._give_up(phase, (0,))
            waiting.tell(self._silent(phase))
        if not note.startswith(b"+"):
            raise _read(note)
        self._met = True
        return note[1:]

    def _silent(self, phase: str) -> Collection[int]:
        """Whose payload process 0 may be waiting for; process 0 itself where that is unknown, and
        in a job of more than `BUCKET`, where process 0 says it: looking costs all payloads."""
        if self.world > BUCKET:
            return (0,)
        try:
            notes = self._ask(self._board.all, self._bucket(phase, 0), seconds=LOOK_SECONDS)
        except BoardLost:
            return (0,)
        there = {int(key.rpartition("/")[2]) for key in notes}
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


def _numbered(call: str) -> tuple[str, int]:
    """The kind and the number of a call; ("", 0) for what is not one of several."""
    kind, _, number = call.rpartition(".")
    return (kind, int(number)) if number.isdigit() else ("", 0)


def _failure(error: PeerFailed) -> bytes:
    failures, doubt = list(error.failures.items()), isinstance(error, InDoubt)
    return json.dumps([error.phase, failures, list(error.silent), doubt]).encode()


def _read(note: bytes) -> PeerFailed:
    phase, failures, silent, doubt = json.loads(note)
    kind = InDoubt if doubt else PeerFailed
    return kind(phase, {rank: text for rank, text in failures}, silent)


_MADE = "ckptmgr/made"
_LOOKED_AT = 20  # silent processes of which is told why

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
    rank, world = jax.process_index(), jax.process_count()
    found = Together(JaxBoard(), rank, world, name, root=root, number=_made[root])
    found.announce(_made.total())
    return found
