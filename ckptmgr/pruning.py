"""Retention without a training job: what `ckptmgr prune` does."""

from __future__ import annotations

import os
from typing import Any

from ckptmgr import reading
from ckptmgr.core.retention import Decision, Policy
from ckptmgr.engine.catalog import Catalog
from ckptmgr.engine.retaining import Retention
from ckptmgr.engine.store import Store
from ckptmgr.errors import InvalidOption, StepNotFound
from ckptmgr.events import Clock


def prune(directory: Any, policy: Policy, *, dry_run: bool = True) -> Decision:
    """What `policy` keeps and drops of a run's directory, as a manager with it would after a save.

    With `dry_run` nothing is deleted. Pinned steps, steps that somebody reads, and the newest stay;
    what Orbax wrote and what is suspect is left alone. Raises StepNotFound where there is no such
    directory.
    """
    if not isinstance(policy, Policy):
        raise InvalidOption(f"prune() needs a retention policy, got {policy!r}")
    root = reading.finished_directory(directory)
    reading.refuse_inside_a_step(root)
    if not os.path.isdir(root):
        raise StepNotFound(f"{root} does not exist")
    clock = Clock()
    catalog = Catalog(Store(root), clock, reading.new_attempt)
    retention = Retention(catalog, policy, clock)
    return retention.decide() if dry_run else retention.apply()
