"""Verifying steps without a manager: what the manager, the module's functions and the command share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ckptmgr import reading
from ckptmgr.core import layout
from ckptmgr.engine import foreign
from ckptmgr.engine.presence import is_ours
from ckptmgr.engine.readback import Progress
from ckptmgr.engine.store import Store, local_path
from ckptmgr.engine.verify import Verdict, verify_entry
from ckptmgr.engine.verify import verify as verify_directory
from ckptmgr.errors import Problem, StepNotFound


def verify(
    path: Any,
    step: int | None = None,
    *,
    from_storage: bool = False,
    leaf_digests: bool = False,
    progress: Progress | None = None,
) -> Verdict:
    """Reads all of a step and tells everything that is wrong with it; damage is not raised.

    No device is touched and nothing is written. Chunks under way take at most 128 MiB, or one
    chunk where that is larger; besides, caches and the step's metadata are in memory. A step that
    another writer replaces meanwhile is verified anew. Raises StepNotFound.

    Args:
      path: a step's directory, whatever its name; a run's; or bare output of Orbax.
      step: of a run; None: the newest, damaged or not.
      from_storage: drop the step from the page cache first, where the system can.
      leaf_digests: take digests of the leaves' values, whatever their mesh and chunks, and compare
        them where they were recorded.
      progress: is told array bytes that are done and in all; first (0, all), last (all, all).
    """
    how = How(from_storage, leaf_digests, progress)
    where = reading.finished_directory(path)
    if step is not None:
        return verify_in(where, reading.step_number(step), how)
    bare = foreign.is_bare(where) and not reading.looks_like_step(os.path.dirname(where))
    number = layout.parse_step(os.path.basename(where))
    if bare or (number is None and reading.looks_like_step(where)):
        orbax = not is_ours(Store(where))
        return verify_directory(
            where,
            number,
            is_foreign=orbax,
            from_storage=from_storage,
            leaf_digests=leaf_digests,
            progress=progress,
        )
    root = os.path.dirname(where)
    entry = None if number is None else reading.catalog_of(root).entry(number)
    if entry is not None and not reading.is_no_step(entry):
        return verify_in(root, number, how)
    return verify_in(where, None, how)


@dataclass(frozen=True, slots=True)
class How:
    """The arguments of `verify`."""

    from_storage: bool = False
    leaf_digests: bool = False
    progress: Progress | None = None


def verify_in(root: str, step: int | None, how: How) -> Verdict:
    """Verifies a step of the run in `root`; None: the newest, damaged or not."""
    catalog = reading.catalog_of(root)
    if step is None:
        step = next((e.step for e in catalog.entries() if not reading.is_no_step(e)), None)
        if step is None:
            raise StepNotFound(f"there is no step in {root}{reading.hint(root)}")
    elif catalog.entry(step) is None:
        raise StepNotFound(f"there is no step {step} in {root}{reading.hint(root)}", step)
    return verify_entry(
        catalog,
        step,
        from_storage=how.from_storage,
        leaf_digests=how.leaf_digests,
        progress=how.progress,
    )


def problems_of(path: Any) -> tuple[tuple[int, Problem], ...]:
    """Directories below `path` that have a step's name and are not a committed step."""
    root = local_path(path)
    return tuple(
        (entry.step, entry.problem)
        for entry in reading.catalog_of(root).entries()
        if entry.problem is not None
    )
