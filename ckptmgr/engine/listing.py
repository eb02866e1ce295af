"""Which steps there are: what lies under each step's name, and what is on record about it.

No list of steps is kept in memory: every answer comes from the directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckptmgr.core import layout, orbax_format
from ckptmgr.core.manifest import FormatError, Manifest
from ckptmgr.engine.records import Records
from ckptmgr.engine.store import Store
from ckptmgr.errors import Problem, StoreError

TRIES = 100
"""How often to look again where other writers change what is looked at."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A directory with a step's name.

    Attributes:
      step: its number.
      manifest: ours, where it is valid.
      foreign: whether Orbax wrote it.
      problem: why it is not a step; None for a committed one.
      suspect: why its values are in doubt, of a committed step; "" where they are not.
      verified: whether a full verification of this very attempt is on record.
      pinned: why retention must leave it, of a committed step; "" where it may go.
      unreadable: set besides `problem` where storage refused to say what it is.
    """

    step: int
    manifest: Manifest | None = None
    foreign: bool = False
    problem: Problem | None = None
    suspect: str = ""
    verified: bool = False
    pinned: str = ""
    unreadable: StoreError | None = None


_NO_MANIFEST = Problem(layout.MANIFEST, "missing")


class Listing:
    """The steps below one root."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.records = Records(store)

    def entries(self, look: Callable[[int], Entry | None] | None = None) -> Iterator[Entry]:
        """Every directory with a step's name, newest first; each read, or looked at by `look`, when
        it is its turn."""
        look = look or self.entry
        seen: set[int] = set()
        gone = True
        while gone:  # what was listed may have gone since, and newer steps come
            gone = False
            numbers = {layout.parse_step(name) for name in self.store.names()}
            found = {number for number in numbers if number is not None and number not in seen}
            for step in sorted(found, reverse=True):
                seen.add(step)
                entry = look(step)
                if entry is not None:
                    yield entry
                elif not self.store.exists(layout.step_name(step)):
                    gone = True
                    break

    def committed(self) -> Iterator[Entry]:
        """The committed steps, newest first."""
        return (entry for entry in self.entries() if entry.problem is None)

    def entry(self, step: int) -> Entry | None:
        """What lies under a step's name; None where no directory does."""
        for _ in range(TRIES):
            found = self._look(step)
            lost = found is not None and found.problem == _NO_MANIFEST
            if not lost or not self.store.exists(f"{layout.step_name(step)}/{layout.MANIFEST}"):
                break  # else another writer replaced the step between two looks
        return found

    def _look(self, step: int) -> Entry | None:
        name = layout.step_name(step)
        if not self.store.is_dir(name):
            return None
        try:
            text = self.store.read_file(f"{name}/{layout.MANIFEST}")
        except StoreError as exc:
            if not isinstance(exc.__cause__, FileNotFoundError):
                problem = Problem(layout.MANIFEST, str(exc))
                return Entry(step, problem=problem, unreadable=exc)
            return self._without_manifest(step)
        try:
            manifest = Manifest.from_json(text)
        except FormatError as exc:
            return Entry(step, problem=Problem(layout.MANIFEST, str(exc)))
        if manifest.step != step:
            why = f"it is the manifest of step {manifest.step}; rename the directory to that number"
            return Entry(step, problem=Problem(layout.MANIFEST, why))
        return self.with_records(step, manifest, self.records)

    def with_records(self, step: int, manifest: Manifest, records: Records) -> Entry:
        """A step of ours with what is on record about it."""
        if records.damaged(step) == manifest.attempt:
            record = layout.damaged_name(step)
            why = f"found damaged by an earlier restore, see {self.store.path(record)}"
            return Entry(step, problem=Problem(record, why))
        return Entry(
            step,
            manifest,
            suspect=records.doubt(step, manifest.attempt),
            verified=records.verified(step, manifest.attempt),
            pinned=records.pin(step),
        )

    def _without_manifest(self, step: int) -> Entry | None:
        """Orbax's, ours but damaged, or no step at all."""
        name = layout.step_name(step)
        found = False
        for item in self.store.names(name):
            if self.store.is_dir(f"{name}/{layout.own_dir(item)}"):
                return Entry(step, problem=_NO_MANIFEST)
            text = self.read_or_none(f"{name}/{layout.pytree_metadata(item)}")
            if text is None:
                continue
            try:
                tree = orbax_format.parse_pytree_metadata(text)
            except FormatError:
                continue
            if tree.marked:
                return Entry(step, problem=_NO_MANIFEST)
            found = True
        if found or self._has_checkpoint_metadata(name):
            return Entry(step, foreign=True, pinned=self.records.pin(step))
        if not self.store.is_dir(name):
            return None
        return Entry(step, problem=Problem("", "no manifest of ckptmgr and no metadata of Orbax"))

    def _has_checkpoint_metadata(self, name: str) -> bool:
        """Orbax's metadata of a step, and an item that it lists: one without trees is a step too."""
        text = self.read_or_none(f"{name}/{layout.CHECKPOINT_METADATA}")
        try:
            items = json.loads(text)["item_handlers"] if text is not None else ()
            own = (item for item in items if item != layout.METRICS_ITEM)
            return any(self.store.is_dir(f"{name}/{item}") for item in own)
        except (ValueError, TypeError, KeyError):
            return False

    def read_or_none(self, name: str) -> bytes | None:
        """A file, None where it cannot be read."""
        try:
            return self.store.read_file(name)
        except StoreError:
            return None
