"""Threads that play the processes of a job, over one board."""

import threading
import time
from dataclasses import dataclass
from typing import Any

from ckptmgr.engine.board import LocalBoard
from ckptmgr.engine.coord import Together
from ckptmgr.errors import PeerFailed

LONG = 600.0  # a deadline that no test lives to see


@dataclass
class Outcome:
    value: Any = None
    error: BaseException | None = None
    seconds: float = 0.0


def job(world, board=None, name="job"):
    board = board or LocalBoard()
    return [Together(board, rank, world, name) for rank in range(world)]


def play(members, body, without=()):
    """What `body(member)` comes to in a thread per process, by rank."""
    found = {member.rank: Outcome() for member in members if member.rank not in without}

    def run(member):
        mine, start = found[member.rank], time.monotonic()
        try:
            mine.value = body(member)
        except BaseException as exc:
            mine.error = exc
        mine.seconds = time.monotonic() - start

    threads = [
        threading.Thread(target=run, args=(member,), daemon=True)
        for member in reversed(members)  # process 0 last
        if member.rank in found
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "somebody waits for ever"
    return found


def one_error(outcomes):
    """The PeerFailed that all of them raised alike."""
    errors = [outcome.error for outcome in outcomes.values()]
    assert all(type(error) is PeerFailed for error in errors), errors
    assert len({(e.phase, tuple(e.failures.items()), e.silent) for e in errors}) == 1, errors
    return errors[0]
