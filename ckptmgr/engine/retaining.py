"""Retention at work: deletes what the policy drops, and says what a user should know."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from ckptmgr.core import layout, retention
from ckptmgr.core.info import StepInfo
from ckptmgr.core.retention import Decision, KeepAll, Policy
from ckptmgr.engine import leases
from ckptmgr.engine.catalog import Catalog
from ckptmgr.engine.listing import Entry
from ckptmgr.engine.overview import Overview
from ckptmgr.engine.steps import info_of
from ckptmgr.events import Clock

logger = logging.getLogger("ckptmgr")


class Retention:
    """The policy of one manager.

    Attributes:
      policy: what it keeps.
    """

    def __init__(self, catalog: Catalog, policy: Policy, clock: Clock) -> None:
        self.policy = policy
        self._catalog = catalog
        self._overview = Overview(catalog, clock)
        self._clock = clock
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def decide(self, just_saved: int | None = None, in_flight: int = 0) -> Decision:
        """What would stay and go now. What Orbax wrote is not ours to delete, and what is suspect
        is the user's to judge: neither counts."""
        now = self._clock.time()
        infos = infos_of(self._overview.committed())
        held = leases.held(self._catalog.store, now)
        return retention.decide(infos, self.policy, now, just_saved, held, in_flight)

    def apply(self, just_saved: int | None = None, in_flight: int = 0) -> Decision:
        """Deletes what goes; call it when `just_saved` is durable."""
        if isinstance(self.policy, KeepAll):
            return Decision({}, ())
        decision = self.decide(just_saved, in_flight)
        self._tell(decision)
        store = self._catalog.store
        for step in decision.drop:
            if not any(store.is_dir(layout.step_name(kept)) for kept in decision.keep):
                break  # somebody rolled back meanwhile; what is left is all there is

            def is_read(step: int = step) -> bool:
                return step in leases.held(store, self._clock.time())

            self._catalog.forget(step, unless=is_read)
        return decision

    def _tell(self, decision: Decision) -> None:
        """Warnings once, until they no longer hold; the figures in them change."""
        if decision.given_up:
            steps = ", ".join(f"{step} ({why})" for step, why in decision.given_up.items())
            logger.warning("the budget does not allow to keep step %s", steps)
        with self._lock:
            kinds = {
                "".join(c for c in text if not c.isdigit()): text for text in decision.warnings
            }
            new = [text for kind, text in kinds.items() if kind not in self._told]
            self._told = set(kinds)
        for text in new:
            logger.warning("%s", text)


def infos_of(committed: Iterable[Entry]) -> list[StepInfo]:
    """Those of the committed steps that retention looks at."""
    return [
        info_of(entry.manifest, "", entry.verified, bool(entry.pinned))
        for entry in committed
        if entry.manifest is not None and not entry.suspect
    ]
