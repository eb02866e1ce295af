"""All steps at the price of a look at each: there may be ten thousand.

Retention wants them after every save, and `watch` at every poll. A committed step does not change, so
what its manifest says is remembered, and read again where the file is not the same any more. To read
a step, to save or to list one is another matter: those ask the `Catalog`, which reads what it tells.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

from ckptmgr.core import layout
from ckptmgr.core.manifest import Manifest
from ckptmgr.engine.catalog import Catalog
from ckptmgr.engine.listing import Entry
from ckptmgr.engine.store import Stamp
from ckptmgr.events import Clock

SETTLED_SECONDS = 2.0
"""File systems tell time in ticks: a file that changed less than this ago may change once more
without another stamp."""

LAST_WRITTEN = 8
"""As many steps as may be written in another order than they were saved in, and more."""


class Overview:
    """The steps below one root, for one who asks for all of them again and again."""

    def __init__(self, catalog: Catalog, clock: Clock) -> None:
        self._catalog = catalog
        self._clock = clock
        self._known: dict[int, tuple[Stamp, Manifest]] = {}

    def committed(self) -> list[Entry]:
        """The committed steps, newest first; their manifests lack `files`, `topology` and `extra`,
        which may be large."""
        records = self._catalog.records.listed()
        known: dict[int, tuple[Stamp, Manifest]] = {}

        def look(step: int) -> Entry | None:
            stamp = self._catalog.store.stamp(manifest_of(step))
            if stamp is not None and step in self._known and self._known[step][0] == stamp:
                known[step] = self._known[step]
                return self._catalog.with_records(step, known[step][1], records)
            entry = self._catalog.entry(step)
            if entry is None or entry.manifest is None:
                return entry
            brief = replace(entry.manifest, files={}, topology={}, extra=None)
            if stamp is not None and self._clock.time() - stamp.changed / 1e9 > SETTLED_SECONDS:
                known[step] = stamp, brief
            return replace(entry, manifest=brief)

        found = [entry for entry in self._catalog.entries(look) if entry.problem is None]
        self._known = known  # steps that are gone are forgotten
        return found


def last_saved(catalog: Catalog) -> Manifest | None:
    """The manifest of the latest save, which a rollback may have given a lower number than others.

    By the clock of the saves, among those that the file system says were written last; only these
    are read.
    """
    stamps = {}
    for name in catalog.store.names():
        step = layout.parse_step(name)
        stamp = None if step is None else catalog.store.stamp(manifest_of(step))
        if step is not None and stamp is not None:
            stamps[step] = stamp
    manifests = (
        entry.manifest
        for step in heapq.nlargest(len(stamps), stamps, key=stamps.__getitem__)
        if (entry := catalog.entry(step)) is not None
        and entry.problem is None
        and entry.manifest is not None
    )
    last = [manifest for _, manifest in zip(range(LAST_WRITTEN), manifests, strict=False)]
    return max(last, key=lambda manifest: manifest.created, default=None)


def manifest_of(step: int) -> str:
    return f"{layout.step_name(step)}/{layout.MANIFEST}"
