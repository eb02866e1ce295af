"""The child process: one workload, all systems in turn, one record per system and repetition.

`run.py` starts it with the right number of devices, and reads the records from a file.
"""

import contextlib
import gc
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from command import child, name_of, progress
from systems import SYSTEMS, System
from workloads import Workload, catalogue


@dataclass(frozen=True)
class Task:
    """What the parent asks for, passed as JSON on the command line.

    `systems` are labels: `orbax#2` is a second, separate Orbax. `cache` is the state of the page
    cache before a restore: `warm` or `cold`.
    """

    workload: str
    smoke: bool
    systems: list[str]
    reps: int
    cache: str
    directory: str
    result: str


@dataclass(frozen=True)
class Measures:
    """One save and one restore by one system. Seconds, bytes, counts."""

    in_save: float = 0.0  # until save() returns
    durable: float = 0.0  # from the call of save() until the step is durable
    restore: float = 0.0  # until every array is ready
    cpu_save: float = 0.0  # user + system time of this process, all threads, until durable
    cpu_restore: float = 0.0
    disk_bytes: int = 0
    files: int = 0


class Clock:
    """Wall and CPU seconds of a `with` block; `lap()` is the wall time so far."""

    def __enter__(self) -> "Clock":
        self._cpu_start = cpu_seconds()
        self._start = time.perf_counter()
        return self

    def lap(self) -> float:
        return time.perf_counter() - self._start

    def __exit__(self, *_) -> None:
        self.wall = self.lap()
        self.cpu = cpu_seconds() - self._cpu_start


def measure(
    system: System, workload: Workload, like: dict, step: int, seed: int, cache: str
) -> Measures:
    """Save a new state, drop it, restore it, check it, delete it. Two parts are timed."""
    import jax

    bytes_before, files_before = _usage(system.root)
    state = workload.state(seed)
    to_save = system.prepare(state)
    settle()
    with Clock() as save:
        system.save(step, to_save)
        in_save = save.lap()
        system.wait()

    bytes_after, files_after = _usage(system.root)
    for leaf in state.values():
        leaf.delete()
    del state, to_save
    settle()
    _set_page_cache(system.root, cache)
    with Clock() as restore:
        restored = jax.block_until_ready(system.restore(step, like))

    workload.verify(restored, seed)
    del restored
    system.delete(step)
    return Measures(
        in_save=in_save,
        durable=save.wall,
        restore=restore.wall,
        cpu_save=save.cpu,
        cpu_restore=restore.cpu,
        disk_bytes=bytes_after - bytes_before,
        files=files_after - files_before,
    )


def run(task: Task) -> list[dict]:
    """Repetition 0 is the warm-up: measured and marked, left out of the medians."""
    workload = catalogue(task.smoke)[task.workload]
    like = workload.like()
    records: list[dict] = []
    with contextlib.ExitStack() as stack:
        systems: dict[str, System] = {}
        for label in task.systems:
            root = Path(task.directory, label)
            root.mkdir()
            systems[label] = SYSTEMS[name_of(label)](root)
            stack.callback(systems[label].close)
        for rep in range(task.reps + 1):
            for label, system in systems.items():
                seed = len(records)  # new values for each save
                measured = measure(system, workload, like, rep, seed, task.cache)
                warmup = rep == 0
                records.append(
                    {"system": label, "rep": rep, "warmup": warmup, "measures": asdict(measured)}
                )
                _progress(task, label, rep, measured)
    return records


def _progress(task: Task, label: str, rep: int, measured: Measures) -> None:
    which = f"{rep}/{task.reps}" if rep else "warm-up"
    progress(
        f"{task.workload} {which:>7} {label:<9} in save() {measured.in_save:7.3f} s, "
        f"durable {measured.durable:7.3f} s, restore {measured.restore:7.3f} s"
    )


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def settle(flush: bool = True) -> None:
    """Nothing left over from the measure before: no garbage, and with `flush` no dirty pages."""
    gc.collect()
    if flush:
        os.sync()


def _files(root: Path) -> Iterator[Path]:
    return (path for path in root.rglob("*") if path.is_file())


def _usage(root: Path) -> tuple[int, int]:
    sizes = [path.stat().st_size for path in _files(root)]
    return sum(sizes), len(sizes)


def _set_page_cache(root: Path, cache: str) -> None:
    """Every file of the step in the page cache (`warm`), or none of them (`cold`)."""
    buffer = bytearray(1 << 20)
    for path in _files(root):
        with open(path, "rb", buffering=0) as file:
            if cache == "cold":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.readinto(buffer):
                    pass


if __name__ == "__main__":
    child(lambda task: run(Task(**task)))
