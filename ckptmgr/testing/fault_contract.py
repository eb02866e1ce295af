"""Saves that go wrong at every operation, as checks that run on anybody's file system.

For every change that a save, a heartbeat, an overwrite and a deletion make: it fails once, fails for
good, takes effect and fails, or is cut short. Then every listed step is whole and has the values
of its call, steps that nobody touched are as they were, and the next save works. Besides, a process
that saves is killed at random moments.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

import ckptmgr
from ckptmgr.engine.store import Store
from ckptmgr.testing.faults import Fault, FaultyStore
from ckptmgr.testing.outcome import Broken, Outcome, outcome_of

FAULTS: Mapping[str, Callable[[int], Fault]] = {
    "fails": lambda k: Fault(k),
    "fails for good": lambda k: Fault(k, for_good=True),
    "takes effect and fails": lambda k: Fault(k, effect="full"),
    "is cut short": lambda k: Fault(k, effect="half"),
}

CHILD_LIMIT = 120.0
"""Seconds that a process may take until it has saved and is killed."""

_OLD, _NEW, _NEXT = 20, 21, 3


@dataclass(frozen=True, slots=True)
class Scenario:
    """Step 1 lies there, maybe step 2; something is done to step 2.

    Attributes:
      act: does it.
      before: whether step 2 is there before.
      allowed: what step 2 may hold after a failure; None for not there.
      heartbeat: whether saves are heartbeats.
    """

    act: Callable[[ckptmgr.CheckpointManager], Any]
    before: bool
    allowed: tuple[int | None, ...]
    heartbeat: bool = False


SCENARIOS: Mapping[str, Scenario] = {
    "a save": Scenario(lambda m: m.save(2, _state(_NEW)).result(), False, (None, _NEW)),
    "a heartbeat": Scenario(
        lambda m: m.save(2, _state(_NEW)).result(), False, (None, _NEW), heartbeat=True
    ),
    "an overwrite": Scenario(
        lambda m: m.save(2, _state(_NEW), overwrite=True).result(), True, (_OLD, _NEW)
    ),
    "a deletion": Scenario(lambda m: m.delete(2), True, (None, _OLD)),
}


def run(directory: str | os.PathLike[str], kills: int = 10) -> Iterator[Outcome]:
    """Runs everything, telling each outcome as it is there.

    Args:
      directory: created if it is not there; what is written is removed.
      kills: how often the saving process is killed.
    """
    root = os.path.abspath(directory)
    os.makedirs(root, exist_ok=True)
    for what, scenario in SCENARIOS.items():
        for how, fault in FAULTS.items():
            sentence = f"whichever operation of {what} {how}, every listed step is whole"
            yield outcome_of(sentence, root, functools.partial(_every_operation, scenario, fault))
    if kills:
        sentence = f"after each of {kills} kills the latest step is whole, and none is lost"
        yield outcome_of(sentence, root, lambda own: _killed(own, kills))


def _state(number: int) -> dict[str, Any]:
    return {"w": np.arange(6, dtype=np.float32).reshape(2, 3) + number, "n": np.int64(number)}


def _number_of(found: Any, where: str) -> int:
    """Which state it is; raises Broken where it is none."""
    number = int(found["n"])
    if found["w"].tobytes() != _state(number)["w"].tobytes():
        raise Broken(f"{where}: w is {found['w']!r} beside n={number}")
    return number


def _options(heartbeat: bool) -> ckptmgr.Options:
    return ckptmgr.Options(heartbeat=ckptmgr.Heartbeat(every_saves=1) if heartbeat else None)


def _every_operation(scenario: Scenario, fault: Callable[[int], Fault], own: str) -> None:
    operation = 0
    while True:
        operation += 1
        root = os.path.join(own, str(operation))
        with ckptmgr.CheckpointManager(root, _options(False)) as manager:
            manager.save(1, _state(1)).result()
            if scenario.before:
                manager.save(2, _state(_OLD)).result()
        store = FaultyStore(Store(root))
        options = _options(scenario.heartbeat)
        failed = False
        with suppress(ckptmgr.CheckpointError):
            with ckptmgr.CheckpointManager(root, options, store=store) as manager:
                store.arm(fault(operation))
                failed = True
                scenario.act(manager)
                failed = False
        reached = len(store.operations) >= operation
        name = store.operations[operation - 1].name if reached else ""
        _check(root, scenario, f"operation {operation} ({name})")
        shutil.rmtree(root)
        if not reached:
            if failed:
                raise Broken("it fails although nothing was made to")
            return


def _check(root: str, scenario: Scenario, where: str) -> None:
    with ckptmgr.CheckpointManager(root, _options(False)) as manager:
        steps = [info.step for info in manager.steps()]
        held = {step: _number_of(manager.restore(step=step), where) for step in steps}
        if held.pop(1, None) != 1:
            raise Broken(f"{where}: step 1 was lost or changed")
        if held.pop(2, None) not in scenario.allowed or held:
            raise Broken(f"{where}: steps {steps} are there")
        manager.save(_NEXT, _state(_NEXT)).result()
        latest = manager.restore_latest(None)
        if latest is None or _number_of(latest.state, where) != _NEXT:
            raise Broken(f"{where}: the next save was not restored")


_CHILD = """
import sys
import ckptmgr
from ckptmgr.testing.fault_contract import _state
options = ckptmgr.Options(
    retention=ckptmgr.KeepLast(3), heartbeat=ckptmgr.Heartbeat(every_saves=5)
)
with ckptmgr.CheckpointManager(sys.argv[1], options) as manager:
    step = (manager.latest_step() or 0) + 1
    print("begun", flush=True)
    while True:
        print(manager.save(step, _state(step)).result().step, flush=True)
        step += 1
"""


def _killed(own: str, kills: int) -> None:
    chance = random.Random(0)
    durable = 0
    for kill in range(kills):
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, own], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        late = threading.Timer(CHILD_LIMIT, child.kill)  # it must not keep us waiting for ever
        late.start()
        told = iter(child.stdout)
        if next(told, "").strip() != "begun":
            late.cancel()
            raise Broken(f"the saving process ended with status {child.wait()}")
        for _ in range(chance.randrange(1, 6)):
            durable = int(next(told, durable))
        time.sleep(chance.random() * 0.02)  # somewhere in the save that is under way
        child.kill()
        late.cancel()
        durable = max([durable, *(int(line) for line in told if line.strip().isdigit())])
        child.wait()
        child.stdout.close()
        with ckptmgr.CheckpointManager(own, ckptmgr.Options(read_only=True)) as manager:
            latest = manager.restore_latest(None)
        where = f"kill {kill + 1}"
        if latest is None or latest.skipped or latest.step < durable:
            raise Broken(f"{where}: step {durable} was durable; found {latest}")
        if _number_of(latest.state, where) != latest.step:
            raise Broken(f"{where}: step {latest.step} holds another's values")
