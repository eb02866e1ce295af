"""After a crash: replacements that were cut in two, and attempts and trash that are nobody's."""

from __future__ import annotations

import json
import logging
import os
import threading
from dataclasses import dataclass
from typing import Any

from ckptmgr.core import layout
from ckptmgr.engine import owners
from ckptmgr.engine.store import Store
from ckptmgr.errors import StoreError
from ckptmgr.events import Clock

logger = logging.getLogger("ckptmgr")

FOREIGN_LEASE_SECONDS = 24 * 3600.0
"""A temporary directory of another host is nobody's when nothing in it changed for this long."""


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Names of intents, of trash, and of temporary directories that a sweep looks at."""

    intents: tuple[str, ...]
    trash: tuple[str, ...]
    temporary: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.intents or self.trash or self.temporary)


def remove_attempt(store: Store, unique: str, tmp: str) -> None:
    """Removes the directory of an attempt that is given up, then its intent."""
    owners.LIVE.discard(unique)
    if store.exists(tmp):
        store.remove_tree(tmp)
    store.remove_file(layout.intent_name(unique))


def remove_if_possible(store: Store, path: str) -> None:
    """Nobody sees it any more; bytes that stay go at a next start."""
    try:
        store.remove_tree(path)
    except StoreError as exc:
        logger.warning("leftovers remain: %s", exc)


class Recovery:
    """Cleans up below one root."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def recover(self) -> None:
        """Finishes or undoes replacements that a crash cut in two. Quick; call before reading."""
        for unique, owner in self._intents():
            if owner.get("replaces") and (
                owners.is_dead(unique, owner) or self._is_stale(unique, owner)
            ):
                self._finish_replacement(unique, owner)

    def _finish_replacement(self, unique: str, owner: dict[str, Any]) -> None:
        final, tmp = layout.step_name(owner["step"]), owner["tmp"]
        old = layout.trash_name(owner["step"], unique)
        if self._store.exists(final) or not self._store.exists(old):
            return
        whole = self._store.exists(f"{tmp}/{layout.MANIFEST}")
        self._store.rename(tmp if whole else old, final)
        self._store.sync_path("")

    def leftovers(self) -> Leftovers:
        """What lies there now and may be nobody's; only lists names."""
        return Leftovers(
            tuple(self._store.names(layout.intents_dir())),
            tuple(self._store.names(layout.trash_dir())),
            tuple(name for name in self._store.names() if layout.parse_tmp(name)),
        )

    def sweep_in_background(self) -> None:
        """Leftovers of dead processes go while the caller gets on."""
        found = self.leftovers()
        if not found:
            return

        def sweep() -> None:
            try:
                self.sweep(found)
            except Exception as exc:
                logger.warning("leftovers in %s remain: %s", self._store.root, exc)

        threading.Thread(target=sweep, name="ckptmgr-sweep", daemon=True).start()

    def sweep(self, found: Leftovers) -> None:
        """Removes what of `found` is provably nobody's: attempts whose process is gone, and trash.

        Each leftover on its own: one that cannot be removed does not keep the others.
        """
        owned = set()
        known = set()
        for unique, owner in self._intents():
            known.add(f"{unique}.json")
            if f"{unique}.json" not in found.intents:
                continue
            if owners.is_dead(unique, owner) or self._is_stale(unique, owner):
                self._give_up(unique, owner)
            else:
                owned.add(os.path.basename(layout.trash_name(owner["step"], unique)))
        for name in found.trash:
            if name not in owned:
                remove_if_possible(self._store, f"{layout.trash_dir()}/{name}")
        self._sweep_unreadable([name for name in found.intents if name not in known])
        self._sweep_ownerless(found.temporary)

    def _sweep_ownerless(self, temporary: tuple[str, ...]) -> None:
        """Directories of attempts without an intent, which a crash may leave, once they are old."""
        for name in temporary:
            parsed = layout.parse_tmp(name)
            if parsed is None or self._store.exists(layout.intent_name(parsed[1])):
                continue
            if self._clock.time() - self._store.modified(name) > FOREIGN_LEASE_SECONDS:
                remove_if_possible(self._store, name)

    def _sweep_unreadable(self, intents: list[str]) -> None:
        """Intents that nobody can read, and what they own, once both are old."""
        for name in intents:
            path = f"{layout.intents_dir()}/{name}"
            unique = layout.parse_intent(name)
            found = [(tmp, layout.parse_tmp(tmp)) for tmp in self._store.names()]
            own = [tmp for tmp, parsed in found if parsed and parsed[1] == unique]
            newest = max(self._store.modified(place) for place in (path, *own))
            if self._clock.time() - newest > FOREIGN_LEASE_SECONDS:
                for place in own:
                    remove_if_possible(self._store, place)
                if not any(self._store.exists(place) for place in own):
                    remove_if_possible(self._store, path)

    def _intents(self) -> list[tuple[str, dict[str, Any]]]:
        found = []
        for name in self._store.names(layout.intents_dir()):
            unique = layout.parse_intent(name)
            text = unique and self._text_of(layout.intent_name(unique))
            if not unique or not text:
                continue
            try:
                owner = json.loads(text)
                tmp = layout.parse_tmp(owner["tmp"])
            except (ValueError, KeyError, TypeError):
                continue
            if tmp == (owner.get("step"), unique):
                found.append((unique, owner))
        return found

    def _is_stale(self, unique: str, owner: dict[str, Any]) -> bool:
        """Of another host, and neither it nor anything of its directory changed for long."""
        me = owners.me()
        if owner.get("host") == me["host"] and owner.get("pid_ns") == me["pid_ns"]:
            return False
        places = (layout.intent_name(unique), owner["tmp"])
        newest = max(self._store.modified(place) for place in places)
        return self._clock.time() - newest > FOREIGN_LEASE_SECONDS

    def _text_of(self, name: str) -> bytes | None:
        try:
            return self._store.read_file(name)
        except StoreError:
            return None

    def _give_up(self, unique: str, owner: dict[str, Any]) -> None:
        try:
            remove_attempt(self._store, unique, owner["tmp"])
        except StoreError as exc:
            logger.warning("leftovers of step %s remain: %s", owner["step"], exc)
