"""What the fault tests share: a state that tells its number, and managers over faulty stores."""

import json
import os
import pathlib
import shutil
import threading

import jax
import numpy as np

import ckptmgr
from ckptmgr.core import layout
from ckptmgr.engine.store import Store
from ckptmgr.testing import FaultyStore

LIMIT = 30.0  # seconds, for every wait that should be over at once


def state(number):
    """A tree whose every leaf depends on `number`."""
    return {
        # made without a program, whose compilation would be most of a test's time
        "w": jax.device_put(np.arange(6, dtype=np.float32).reshape(2, 3) + number),
        "host": np.array([number, number + 1], np.int64),
        "n": number,
    }


def assert_state(found, number):
    """Bit-exact: no leaf differs from those of `state(number)`."""
    wanted = state(number)
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        got, right = np.asarray(found[name]), np.asarray(value)
        assert got.dtype == right.dtype, name
        assert got.tobytes() == right.tobytes(), f"{name}: {got!r} instead of {right!r}"


def target():
    return jax.eval_shape(lambda: {**state(0), "n": 0}) | {"n": 0, "host": np.zeros(2, np.int64)}


def faulty(root, *plan, exchange=True):
    return FaultyStore(Store(str(root), durable=False, exchange=exchange), plan)


def manager(root, store=None, **options):
    """A manager that does not sync, so that thousands of saves cost little."""
    options.setdefault("storage", ckptmgr.Storage(durable=False))
    options.setdefault("coordination", ckptmgr.Coordination(deadline_seconds=LIMIT))
    return ckptmgr.CheckpointManager(root, ckptmgr.Options(**options), store=store)


def reader(root):
    return manager(root, read_only=True)


def join_sweep():
    """Waits for the clean-up that the newest managers started."""
    for thread in threading.enumerate():
        if thread.name == "ckptmgr-sweep":
            thread.join(LIMIT)
            assert not thread.is_alive(), "the sweep did not end"


def swept(root, **options):
    """A new manager, after its clean-up."""
    found = manager(root, **options)
    join_sweep()
    return found


def numbers(found):
    return tuple(info.step for info in found.steps())


def leftovers(root):
    """Everything below the root that belongs to no step: temporary, intents, trash."""
    root = pathlib.Path(root)
    out = [p.name for p in root.iterdir() if layout.parse_tmp(p.name)]
    for private in (layout.intents_dir(), layout.trash_dir()):
        if (root / private).is_dir():
            out += [f"{private}/{p.name}" for p in (root / private).iterdir()]
    return sorted(out)


def remove(path):
    """Removes a directory in which somebody may still be writing: a wave that is being committed."""
    while os.path.lexists(path):
        shutil.rmtree(path, ignore_errors=True)


def contents(root):
    """Path below `root` -> bytes, of every file."""
    root = pathlib.Path(root)
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def write_dead_intent(root, step, attempt, replaces=False):
    """The intent of a process that is gone: it ran before this system was started."""
    folder = pathlib.Path(root, layout.intents_dir())
    folder.mkdir(parents=True, exist_ok=True)
    owner = {
        "step": step,
        "tmp": layout.tmp_name(step, attempt),
        "replaces": replaces,
        "host": os.uname().nodename,
        "boot": "an earlier one",
        "pid_ns": "",
        "pid": 1,
        "started": "0",
    }
    pathlib.Path(root, layout.intent_name(attempt)).write_text(json.dumps(owner))


def bury_owners(root):
    """As after a restart of the system: whoever was saving here is gone."""
    for intent in pathlib.Path(root, layout.intents_dir()).glob("*.json"):
        owner = json.loads(intent.read_text())
        intent.write_text(json.dumps({**owner, "boot": "an earlier one"}))


def age(root):
    """Nobody touched anything below `root` for years."""
    old = 1_000_000_000
    for path in pathlib.Path(root).rglob("*"):
        os.utime(path, (old, old), follow_symlinks=False)
