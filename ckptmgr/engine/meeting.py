"""What the rest of the library knows of the other processes of a job: how to meet them, and how a
failure travels. `ckptmgr.engine.coord` has the meetings themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from ckptmgr.engine.board import BoardLost
from ckptmgr.errors import CheckpointError, PeerFailed, StoreError


class InDoubt(PeerFailed, StoreError):
    """A failure after which what was to be done may be done all the same."""

    def __init__(self, phase: str, failures: Mapping[int, str], silent: Sequence[int]) -> None:
        super().__init__(phase, failures, silent)
        self.unknown = True


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

    def lead(
        self,
        phase: str,
        work: Callable[[], bytes],
        deadline_seconds: float,
        call: bytes | None = None,
    ) -> bytes:
        """What `work`, done by process 0 alone, returns. Raises PeerFailed as `exchange` does.

        `call` tells the calls of a kind apart where this is the first phase of one; of an
        `exchange` its payload does.
        """
        ...

    def failed(self, phase: str, error: BaseException) -> BaseException:
        """Tells all that wait in `phase`, now or later, that this process failed; what to raise."""
        ...

    def forget(self, phase: str) -> None:
        """Removes the notes of a phase, and of those whose names begin with it and "/"."""
        ...

    def mark(self, name: str) -> None:
        """Lets all know something for good."""
        ...

    def is_marked(self, name: str) -> bool:
        """Whether somebody has marked that."""
        ...


class Alone:
    """A job of one process."""

    rank = 0
    world = 1

    def exchange(
        self, phase: str, payload: bytes, deadline_seconds: float, answer: Answer = nothing
    ) -> bytes:
        return answer([payload])

    def lead(
        self,
        phase: str,
        work: Callable[[], bytes],
        deadline_seconds: float,
        call: bytes | None = None,
    ) -> bytes:
        return work()

    def failed(self, phase: str, error: BaseException) -> BaseException:
        return error

    def forget(self, phase: str) -> None:
        pass

    def mark(self, name: str) -> None:
        pass

    def is_marked(self, name: str) -> bool:
        return False


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
