"""What is on record about a step besides the step itself: damaged, suspect, verified, pinned.

Each is a small file below `_ckptmgr/` that names the attempt it is about; another attempt in the
step's place makes it void, but for a pin, which is about the step whoever wrote it. Records are
synced, for what they say was told to somebody.
"""

from __future__ import annotations

import json
import os
from typing import Any

from ckptmgr.core import layout
from ckptmgr.engine.store import Store
from ckptmgr.errors import StoreError


class Records:
    """The records below one root."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def damaged(self, step: int) -> str:
        """The attempt that is on record as damaged, or ""."""
        return str(self._read(layout.damaged_name(step), "reason").get("attempt", ""))

    def put_damaged(self, step: int, attempt: str, reason: str) -> None:
        self._put(layout.damaged_name(step), attempt=attempt, reason=reason)
        self.retract_verified(step)

    def doubt(self, step: int, attempt: str) -> str:
        """Why a step is suspect, or ""; a record that cannot be read is no reason to trust it."""
        name = layout.suspect_name(step)
        record = self._read(name, "reason")
        if record:
            return str(record["reason"]) if record.get("attempt") == attempt else ""
        if not self._exists(name):
            return ""
        return f"the record {self._store.path(name)} cannot be read; remove it if the step is good"

    def put_doubt(self, step: int, attempt: str, reason: str) -> None:
        self._put(layout.suspect_name(step), attempt=attempt, reason=reason)

    def retract_doubt(self, step: int) -> None:
        if self._store.exists(layout.suspect_name(step)):
            self._store.remove_tree(layout.suspect_name(step))

    def verified(self, step: int, attempt: str) -> bool:
        """Whether a full verification of this very attempt is on record."""
        return self._read(layout.verified_name(step), "time").get("attempt") == attempt

    def put_verified(self, step: int, attempt: str, time: float) -> None:
        self._put(layout.verified_name(step), attempt=attempt, time=time)

    def retract_verified(self, step: int) -> None:
        if self._store.exists(layout.verified_name(step)):
            self._store.remove_file(layout.verified_name(step))

    def pin(self, step: int) -> str:
        """Why retention must leave a step, or ""; a record that cannot be read is a pin."""
        name = layout.pin_name(step)
        if not self._exists(name):
            return ""
        reason = self._read(name, "reason").get("reason")
        return str(reason) if reason else f"the record {self._store.path(name)} cannot be read"

    def put_pin(self, step: int, reason: str, time: float) -> None:
        self._put(layout.pin_name(step), reason=reason, time=time)

    def remove_pin(self, step: int) -> None:
        if self._store.exists(layout.pin_name(step)):
            self._store.remove_file(layout.pin_name(step))
            self._store.sync_path(os.path.dirname(layout.pin_name(step)))

    def listed(self) -> Records:
        """The same records for one pass over all steps, most of which have none: their directories
        are listed, each once, instead of trying every file."""
        return _Listed(self._store)

    def _put(self, name: str, **fields: Any) -> None:
        self._store.keep_dir(os.path.dirname(name))
        self._store.remove_tree(name)
        self._store.put_file(name, json.dumps(fields).encode())
        self._store.sync_path(name)
        self._store.sync_path(os.path.dirname(name))

    def _exists(self, name: str) -> bool:
        return self._store.exists(name)

    def _read(self, name: str, needed: str) -> dict[str, Any]:
        """A record, empty where there is none that can be read."""
        try:
            found = json.loads(self._store.read_file(name))
        except (StoreError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) and needed in found else {}


class _Listed(Records):
    """Records whose directories are listed once. One that cannot be listed may hold any of them."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._names: dict[str, frozenset[str] | None] = {}

    def _exists(self, name: str) -> bool:
        return self._is_listed(name) and super()._exists(name)

    def _read(self, name: str, needed: str) -> dict[str, Any]:
        return super()._read(name, needed) if self._is_listed(name) else {}

    def _is_listed(self, name: str) -> bool:
        directory, _, file = name.rpartition("/")
        if directory not in self._names:
            try:
                self._names[directory] = frozenset(self._store.names(directory))
            except StoreError:
                self._names[directory] = None
        names = self._names[directory]
        return names is None or file in names
