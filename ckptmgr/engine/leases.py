"""Leases: a reader says that it reads a step, and retention leaves the step alone.

A lease is a small file that names its owner and when it ends by itself. One whose owner has died is
void where that can be known, which is on the same machine. What is not guaranteed: a clock that is
minutes off ends a lease so much earlier or later.
"""

from __future__ import annotations

import json
import uuid

from ckptmgr.core import layout
from ckptmgr.engine import owners
from ckptmgr.engine.store import Store
from ckptmgr.errors import StoreError


class Lease:
    """A step held for a reader until `end`.

    Raises StoreError where nothing can be written.
    """

    def __init__(self, store: Store, step: int, now: float, seconds: float) -> None:
        self._store = store
        self._id = uuid.uuid4().hex[:16]
        self._name = layout.lease_name(step, self._id)
        store.keep_dir(layout.leases_dir())
        text = json.dumps({"until": now + seconds, "id": self._id, **owners.me()})
        owners.LIVE.add(self._id)
        store.put_file(self._name, text.encode())

    def end(self) -> None:
        """Lets the step go; again is fine."""
        self._store.remove_file(self._name)
        owners.LIVE.discard(self._id)


def held(store: Store, now: float) -> set[int]:
    """The steps that somebody reads; leases that are void are removed where that is possible."""
    found = set()
    for name in store.names(layout.leases_dir()):
        step = layout.parse_lease(name)
        if step is None:
            continue
        path = f"{layout.leases_dir()}/{name}"
        if _is_void(store, path, now):
            try:
                store.remove_file(path)
            except StoreError:  # then somebody else will
                continue
        else:
            found.add(step)
    return found


def _is_void(store: Store, path: str, now: float) -> bool:
    try:
        lease = json.loads(store.read_file(path))
        return lease["until"] < now or owners.is_dead(lease["id"], lease)
    except (ValueError, KeyError, TypeError):
        return True
    except StoreError as exc:
        return isinstance(exc.__cause__, FileNotFoundError)  # ended meanwhile
