"""How a step comes to be and goes.

The order of a save, and why:

1. An intent is written: who saves what, where. Every temporary directory has an owner to ask.
2. Everything goes into `<step>.orbax-checkpoint-tmp-<attempt>`; no two attempts share a name.
3. Files, then directories bottom up, are synced; the manifest is written and synced last, so that
   a directory with a manifest is whole.
4. One rename makes the step exist. A rename onto a step that exists fails; two writers of one
   step cannot both win. To replace a step the two directories are exchanged in one operation, or,
   where the file system cannot, by two renames that the intent lets the next manager finish.
5. The root is synced. Then the intent is removed.

Deletion goes the other way: one rename out of sight, synced, then the bytes. Not guaranteed:
anything on a file system whose rename is not atomic.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptmgr.core import layout
from ckptmgr.core.manifest import FormatError, Manifest
from ckptmgr.engine import owners
from ckptmgr.engine.listing import TRIES, Entry, Listing
from ckptmgr.engine.recovery import remove_attempt, remove_if_possible
from ckptmgr.engine.store import Store
from ckptmgr.errors import Problem, StepExists, StoreError
from ckptmgr.events import Clock

logger = logging.getLogger("ckptmgr")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to save a step; `tmp` is its directory, relative to the root."""

    step: int
    id: str
    tmp: str


class Catalog(Listing):
    """The steps below one root, and how they change."""

    def __init__(self, store: Store, clock: Clock, new_attempt: Callable[[], str]) -> None:
        super().__init__(store)
        self._clock = clock
        self._new_attempt = new_attempt

    def mark_damaged(self, entry: Entry, reason: str) -> None:
        """Puts a step of ours aside: it is no longer listed, counted or in the way of a save.

        Nothing of it is changed; removing the record takes that back.
        """
        if entry.manifest is not None:
            self.records.put_damaged(entry.step, entry.manifest.attempt, reason)

    def mark_suspects(self, reason: str) -> tuple[int, ...]:
        """Marks the staged saves since the last heartbeat; returns their steps.

        A clock may have gone back, and steps too: what is later by either counts. On an
        accelerator every save but a heartbeat is staged.
        """
        manifests = [entry.manifest for entry in self.committed() if entry.manifest is not None]
        beats = [m for m in manifests if m.kind == "heartbeat"]
        last = max(beats, key=lambda m: m.created, default=None)
        found = [
            m
            for m in manifests
            if (
                m.kind == "async" or (m.topology.get("platform") != "cpu" and m.kind != "heartbeat")
            )
            and (last is None or m.created > last.created or m.step > last.step)
        ]
        marked = []
        for document in found:
            try:
                self.records.put_doubt(document.step, document.attempt, reason)
            except StoreError as exc:
                logger.warning("step %d: its doubt is not on record: %s", document.step, exc)
            else:
                marked.append(document.step)
        return tuple(sorted(marked))

    def record_verdict(self, step: int, attempt: str, problems: Sequence[Problem]) -> None:
        """Puts on record that all of a step was compared and is right, or takes that back.

        The record is void once another attempt is in the step's place. `attempt` is "" for a step
        of Orbax's, of which nothing is recorded. What cannot be recorded is logged.
        """
        try:
            if attempt and not problems:
                self.records.put_verified(step, attempt, self._clock.time())
            elif not all(problem.transient for problem in problems):
                self.records.retract_verified(step)
        except StoreError as exc:
            logger.warning("step %d: its verification is not on record: %s", step, exc)

    # -- a save -----------------------------------------------------------------------------

    def begin(self, step: int, overwrite: bool = False) -> Attempt:
        """Writes the intent and makes the temporary directory."""
        unique = self._new_attempt()
        attempt = Attempt(step, unique, layout.tmp_name(step, unique))
        owners.LIVE.add(unique)
        try:
            self._write_intent(attempt, overwrite)
            self.store.make_dir(attempt.tmp)
        except BaseException:
            self.abandon(attempt)
            raise
        return attempt

    def _write_intent(self, attempt: Attempt, replaces: bool) -> None:
        self.store.keep_dir(layout.intents_dir())
        owner = {"step": attempt.step, "tmp": attempt.tmp, "replaces": replaces, **owners.me()}
        name = layout.intent_name(attempt.id)
        self.store.put_file(name, json.dumps(owner).encode())
        if replaces:
            self.store.sync_path(name)
            self.store.sync_path(layout.intents_dir())

    def publish(self, attempt: Attempt, manifest: Manifest, overwrite: bool) -> None:
        """Steps 3 to 5 of the order above. Raises StepExists if another writer was first, and
        StoreError with `unknown` set where the step is there but may not survive a crash."""
        self.store.write_file(f"{attempt.tmp}/{layout.MANIFEST}", manifest.to_json().encode())
        self.store.sync_path(f"{attempt.tmp}/{layout.MANIFEST}")
        self.store.sync_path(attempt.tmp)
        final = layout.step_name(attempt.step)
        try:
            self._put_in_place(attempt, final, overwrite)
        except StoreError:
            if not self._is_in_place(attempt):
                raise
            logger.warning("step %d is in place, although storage reported a failure", attempt.step)
        try:
            self.store.sync_path("")
            if self.store.exists(attempt.tmp):  # the replaced step, exchanged and not yet moved
                remove_if_possible(self.store, attempt.tmp)
            if self.store.exists(attempt.tmp):
                owners.LIVE.discard(attempt.id)  # its intent lets the next start remove it
            else:
                self._end(attempt)
            self.records.retract_doubt(attempt.step)  # of the step before
        except StoreError as exc:
            raise StoreError(
                f"step {attempt.step} is in place, but may not survive a crash of the machine: "
                f"{exc}",
                unknown=True,
            ) from exc

    def _is_in_place(self, attempt: Attempt) -> bool:
        """Whether the step that is there is the one this attempt made."""
        there = self.entry(attempt.step)
        return (
            there is not None
            and there.manifest is not None
            and (there.manifest.attempt == attempt.id)
        )

    def _end(self, attempt: Attempt) -> None:
        self.store.remove_file(layout.intent_name(attempt.id))
        owners.LIVE.discard(attempt.id)

    def _put_in_place(self, attempt: Attempt, final: str, overwrite: bool) -> None:
        """Renames; where something is in the way, deals with that and looks again, since other
        writers may have done the same meanwhile."""
        for _ in range(TRIES):
            if self.store.rename(attempt.tmp, final):
                return
            there = self.entry(attempt.step)
            if there is not None and there.unreadable is not None:
                raise there.unreadable
            if there is not None and there.problem is None:
                if not overwrite:
                    raise StepExists(attempt.step, self.store.path(final))
                if self._replace(attempt, final):
                    return
            elif there is not None or self.store.exists(final):
                self._put_aside(attempt, final, there)
        raise StoreError(f"{self.store.path(final)} was taken by others {TRIES} times in a row")

    def _put_aside(self, attempt: Attempt, final: str, there: Entry | None) -> None:
        """Moves what lies at a step's place and is none to quarantine, with a warning."""
        aside = layout.quarantine_name(attempt.step, attempt.id)
        self.store.keep_dir(os.path.dirname(aside))
        try:
            self.store.rename(final, aside)
            self.store.sync_path("")
        except StoreError as exc:
            if isinstance(exc.__cause__, FileNotFoundError):
                return
            raise
        known = self.records.damaged(attempt.step)
        if self.store.is_own_dir(aside) and self._is_whole_step(aside, attempt.step, known):
            self.store.rename(aside, final)  # another writer just put it there
            return
        if known:
            self.store.remove_file(layout.damaged_name(attempt.step))
        logger.warning(
            "step %d: what lay at %s was not a step (%s); moved to %s",
            attempt.step,
            self.store.path(final),
            there.problem if there is not None else "not a directory",
            self.store.path(aside),
        )

    def _is_whole_step(self, path: str, step: int, damaged: str) -> bool:
        """Whether a directory holds a valid manifest of `step`, other than the damaged attempt's."""
        try:
            found = Manifest.from_json(self.read_or_none(f"{path}/{layout.MANIFEST}") or b"")
        except FormatError:
            return False
        return found.step == step and found.attempt != damaged

    def _replace(self, attempt: Attempt, final: str) -> bool:
        """Replaces a step; False, changing nothing, where another writer was quicker."""
        old = layout.trash_name(attempt.step, attempt.id)
        self.store.keep_dir(layout.trash_dir())
        try:
            exchanged = self.store.exchange(attempt.tmp, final)
            if not exchanged:
                self.store.rename(final, old)
        except StoreError as exc:
            if isinstance(exc.__cause__, FileNotFoundError):
                return False
            if not self.store.exists(final) and self.store.exists(old):
                self.store.rename(old, final)
            raise
        if exchanged:
            self.store.sync_path("")
            self.store.rename(attempt.tmp, old)
        else:
            try:
                placed = self.store.rename(attempt.tmp, final)
            except BaseException:
                if not self.store.exists(final):
                    self.store.rename(old, final)
                raise
            if not placed:
                remove_if_possible(self.store, old)
                return False
            self.store.sync_path("")
        remove_if_possible(self.store, old)
        return True

    def abandon(self, attempt: Attempt) -> None:
        """Removes what a failed attempt left; what cannot be removed now goes at a next start."""
        try:
            remove_attempt(self.store, attempt.id, attempt.tmp)
        except StoreError as exc:
            logger.warning("step %d: leftovers of the failed save remain: %s", attempt.step, exc)

    def leave(self, attempt: Attempt) -> None:
        """Leaves what a failed attempt made to a next start: somebody may write there yet."""
        owners.LIVE.discard(attempt.id)
        logger.warning(
            "step %d: leftovers of the failed save remain at %s", attempt.step, attempt.tmp
        )

    # -- deletion ---------------------------------------------------------------------------

    def forget(self, step: int, unless: Callable[[], bool] = lambda: False) -> bool:
        """Deletes a step; False where it was gone already, or `unless` said to leave it.

        That is asked when the step is out of sight and can be put back, so that nobody who begins
        to read it in the meantime is missed.
        """
        name = layout.step_name(step)
        if not self.store.is_own_dir(name):
            return False
        try:
            if not self._discard(name, step, self._new_attempt(), unless):
                return False
        except StoreError as exc:
            if isinstance(exc.__cause__, FileNotFoundError):
                return False  # somebody else deleted it meanwhile
            raise
        self.store.remove_file(layout.suspect_name(step))
        self.records.retract_verified(step)
        self.records.remove_pin(step)
        return True

    def _discard(self, name: str, step: int, unique: str, unless: Callable[[], bool]) -> bool:
        """Out of sight in one rename, then the bytes."""
        trash = layout.trash_name(step, unique)
        self.store.make_dir(layout.trash_dir())
        self.store.rename(name, trash)
        if unless() and self.store.rename(trash, name):
            return False
        self.store.sync_path("")
        self.store.remove_tree(trash)
        return True
