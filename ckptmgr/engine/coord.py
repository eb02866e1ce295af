"""Talking to the other processes of a job: one primitive, `exchange`.

A coordinator hands every process's payload to every process, phase by phase. `Alone` is the whole
truth for a job of one process.
"""

from __future__ import annotations

from typing import Protocol

import jax

from ckptmgr.errors import InvalidOption


class Coordinator(Protocol):
    """Attributes: rank: this process's number. world: how many there are."""

    rank: int
    world: int

    def exchange(self, phase: str, payload: bytes, deadline_seconds: float) -> tuple[bytes, ...]:
        """The payloads of all processes in rank order; raises PeerFailed."""
        ...


class Alone:
    """A job of one process."""

    rank = 0
    world = 1

    def exchange(self, phase: str, payload: bytes, deadline_seconds: float) -> tuple[bytes, ...]:
        return (payload,)


def of_this_job() -> Coordinator:
    """The coordinator for the running job. Raises InvalidOption for several processes."""
    if jax.process_count() > 1:
        raise InvalidOption(
            f"this job has {jax.process_count()} processes; "
            "ckptmgr saves from one process with any number of devices so far"
        )
    return Alone()
