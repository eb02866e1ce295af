"""Saves and restores of several workloads by several systems, in turns, in the present process.

Every repetition goes through all of them, so that a slow minute of the machine hits each.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from command import name_of, progress
from measure import measure
from systems import SYSTEMS
from workloads import Workload


def take_turns(
    entries: Iterable[tuple[Workload, list[str]]], directory: str, reps: int, warm_ups: int
) -> list[dict[str, Any]]:
    """A record per workload, system and repetition; those up to 0 are warm-ups.

    Args:
      entries: the workloads, each with the labels of its systems.
    """
    records: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        turns = []
        for workload, labels in entries:
            for label in labels:
                root = Path(directory, workload.name, label)
                root.mkdir(parents=True)
                system = SYSTEMS[name_of(label)](root)
                stack.callback(system.close)
                turns.append((workload, label, system))
        likes = {workload.name: workload.like() for workload, _, _ in turns}
        for step, rep in enumerate(range(1 - warm_ups, reps + 1)):
            for workload, label, system in turns:
                seed = len(records)  # new values for each save
                found = asdict(measure(system, workload, likes[workload.name], step, seed, "warm"))
                records.append(
                    {
                        "workload": workload.name,
                        "system": label,
                        "rep": rep,
                        "warmup": rep <= 0,
                        "measures": found,
                    }
                )
                which = f"{rep}/{reps}" if rep > 0 else "warm-up"
                progress(
                    f"{workload.name} {which:>7} {label:<9} in save() {found['in_save']:7.3f} s, "
                    f"durable {found['durable']:7.3f} s, restore {found['restore']:7.3f} s"
                )
    return records
