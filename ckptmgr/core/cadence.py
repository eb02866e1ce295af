"""When to save: pure rules over a step number."""

from __future__ import annotations

from collections.abc import Collection


def due(step: int, every_steps: int | None, at_steps: Collection[int]) -> bool:
    """Whether the schedule wants `step`: a multiple of `every_steps`, or one of `at_steps`."""
    return step in at_steps or (every_steps is not None and step % every_steps == 0)
