"""JAX's coordination service as a board where processes leave notes. The only module that knows
JAX's private client.

`jax.distributed.initialize` starts the service in process 0 and gives each process a client of its
key-value store. JAX has no public name for that client; what is used of it here is looked for when
this module is imported, so that a release of JAX that moves it is told by name and not by a hang.
"""

from __future__ import annotations

import math
import threading
from typing import Any, Protocol

import jax

from ckptmgr.errors import CheckpointError, InvalidOption

_METHODS = (
    "blocking_key_value_get_bytes",
    "key_value_delete",
    "key_value_dir_get_bytes",
    "key_value_set_bytes",
    "key_value_try_get_bytes",
)


class BoardLost(CheckpointError):
    """The coordination service does not answer: process 0, where it runs, has gone."""


class Board(Protocol):
    """Notes by key, seen by every process. Keys use "/"."""

    def put(self, key: str, value: bytes) -> bool:
        """Leaves a note; False where there is one, which stays."""
        ...

    def get(self, key: str, seconds: float) -> bytes | None:
        """The note, as soon as it is there; None where it does not come in time."""
        ...

    def all(self, prefix: str) -> dict[str, bytes]:
        """All notes whose keys begin with `prefix` + "/"."""
        ...

    def remove(self, prefix: str) -> None:
        """Removes a note, and all whose keys begin with `prefix` + "/"."""
        ...


def _client() -> Any | None:
    """JAX's client, None where `jax.distributed` is not initialised."""
    try:
        from jax._src import distributed

        return distributed.global_state.client
    except (ImportError, AttributeError) as exc:
        raise InvalidOption(
            f"JAX {jax.__version__} keeps the client of its coordination service elsewhere "
            f"({exc}); a job of several processes needs a release of ckptmgr that knows it"
        ) from exc


def _probe() -> str:
    """Why this release of JAX cannot be used with several processes; "" where it can."""
    try:
        from jax._src.lib import _jax

        missing = [name for name in _METHODS if not hasattr(_jax.DistributedRuntimeClient, name)]
        _client()
    except (ImportError, AttributeError, InvalidOption) as exc:
        return str(exc)
    return f"its client lacks {', '.join(missing)}" if missing else ""


UNUSABLE = _probe()


class JaxBoard:
    """The key-value store of JAX's coordination service.

    Raises InvalidOption where the job did not call `jax.distributed.initialize`, or JAX's client is
    not the one that is known here.
    """

    def __init__(self) -> None:
        if UNUSABLE:
            raise InvalidOption(
                f"JAX {jax.__version__} cannot coordinate saves of several processes: {UNUSABLE}; "
                "use a release of ckptmgr that supports it"
            )
        client = _client()
        if client is None:
            raise InvalidOption(
                f"this job has {jax.process_count()} processes and no coordination service; call "
                "jax.distributed.initialize() before the first use of JAX"
            )
        self._client = client

    def put(self, key: str, value: bytes) -> bool:
        try:
            self._client.key_value_set_bytes(key, value)
        except jax.errors.JaxRuntimeError as exc:
            if "ALREADY_EXISTS" in str(exc):
                return False
            raise _lost(exc) from exc
        return True

    def get(self, key: str, seconds: float) -> bytes | None:
        try:
            if seconds <= 0:
                return bytes(self._client.key_value_try_get_bytes(key))
            wait = math.ceil(seconds * 1000)
            return bytes(self._client.blocking_key_value_get_bytes(key, wait))
        except jax.errors.JaxRuntimeError as exc:
            if "DEADLINE_EXCEEDED" in str(exc) or "NOT_FOUND" in str(exc):
                return None
            raise _lost(exc) from exc

    def all(self, prefix: str) -> dict[str, bytes]:
        try:
            found = self._client.key_value_dir_get_bytes(prefix + "/")
        except jax.errors.JaxRuntimeError as exc:
            if "NOT_FOUND" in str(exc):
                return {}
            raise _lost(exc) from exc
        return {key: bytes(value) for key, value in found}

    def remove(self, prefix: str) -> None:
        try:
            self._client.key_value_delete(prefix)
            self._client.key_value_delete(prefix + "/")
        except jax.errors.JaxRuntimeError as exc:
            if "NOT_FOUND" not in str(exc):
                raise _lost(exc) from exc


def _lost(exc: Exception) -> BoardLost:
    return BoardLost(f"JAX's coordination service does not answer ({exc})")


class LocalBoard:
    """A board within one process: for threads that play the processes of a job."""

    def __init__(self) -> None:
        self._notes: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> bool:
        with self._changed:
            if key in self._notes:
                return False
            self._notes[key] = value
            self._changed.notify_all()
        return True

    def get(self, key: str, seconds: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self._notes, seconds)
            return self._notes.get(key)

    def all(self, prefix: str) -> dict[str, bytes]:
        with self._changed:
            return {k: v for k, v in self._notes.items() if k.startswith(prefix + "/")}

    def remove(self, prefix: str) -> None:
        with self._changed:
            for key in [k for k in self._notes if k == prefix or k.startswith(prefix + "/")]:
                del self._notes[key]
