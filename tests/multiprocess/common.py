"""What the tests of jobs that go wrong share: a state that tells its number, and what each was told."""

import threading

import numpy as np

from tests.fault import common
from tests.support.child import ChildFailed

SCRIPT = '''
import select
from jax.experimental import multihost_utils
from ckptmgr.core import layout
from ckptmgr.engine import arrays, coord, pipeline, writing
from ckptmgr.engine.store import Store
from ckptmgr.testing import Fault, FaultyStore
from tests.multiprocess import common

LIMIT = 60.0  # seconds, for a wait that should be over at once

def wanted(number):
    return common.wanted(world, number)

def holds(found, number):
    return common.holds(found, world, number)

def state(number, **changes):
    """A tree with a sharded and a replicated array and values that each process has for itself."""
    m, values = mesh(world), wanted(number)
    values["w"] = put(values["w"], NamedSharding(m, P("x")))
    values["r"] = put(values["r"], NamedSharding(m, P()))
    return {**values, **changes}

def manager(where, *, deadline=LIMIT, store=None, stager=None, **options):
    """A manager that does not sync, over a store that can be told to fail."""
    options.setdefault("storage", ckptmgr.Storage(durable=False))
    found = Options(coordination=Coordination(deadline_seconds=deadline), **options)
    store = store or FaultyStore(Store(str(where), durable=False))
    return ckptmgr.CheckpointManager(str(where), found, store=store, stager=stager)

def numbers(found):
    return [info.step for info in found.steps()]

with open(f"{root}/pid.{rank}", "w") as file:
    file.write(str(os.getpid()))

def pid_of(other):
    with open(f"{root}/pid.{other}") as file:
        return int(file.read())

def leave_in_order():
    """Process 0 leaves last: when it goes, JAX ends the others."""
    meet()
    for other in range(1, world) if rank == 0 else ():
        try:
            select.select([os.pidfd_open(pid_of(other))], [], [], LIMIT)
        except OSError:
            pass
    leave()

meetings = iter(range(10**6))

def meet():
    """Waits until all are here."""
    multihost_utils.sync_global_devices(str(next(meetings)))

def told(call):
    """What a call raises: its chain as text, the PeerFailed in it, and when; {} if nothing."""
    try:
        call()
    except BaseException as exc:
        found = {"at": time.monotonic(), "chain": []}
        while exc is not None:
            found["chain"].append([type(exc).__name__, str(exc)])
            if isinstance(exc, PeerFailed) and "phase" not in found:
                found |= {"phase": exc.phase, "failures": sorted(exc.failures.items())}
                found |= {"silent": list(exc.silent), "words": str(exc)}
            exc = exc.__cause__
        return found
    return {}

def saving(found, step, tree=None, **how):
    """What a save raises, from the call or in the background."""
    return told(lambda: found.save(step, state(step) if tree is None else tree, **how).result())
'''


def wanted(world, number):
    """The values of the script's `state(number)`, whole, in a job of so many processes."""
    base = np.arange(world * 256 * 8, dtype=np.float32).reshape(world * 256, 8)
    host = np.array([number, number + 1])
    return {"w": base + number, "r": base[:3] - number, "host": host, "n": number, "text": "text"}


def holds(found, world, number):
    """Whether what was restored without a target is that state, bit by bit."""
    right = wanted(world, number)
    return sorted(found) == sorted(right) and all(
        np.asarray(found[name]).dtype == np.asarray(value).dtype
        and np.asarray(found[name]).tobytes() == np.asarray(value).tobytes()
        for name, value in right.items()
    )


def leftovers(root):
    """Everything below the root that belongs to no step, once a clean-up under way has ended."""
    for thread in threading.enumerate():
        if thread.name == "ckptmgr-sweep":
            thread.join(common.LIMIT)
    return common.leftovers(root)


def finish_all(jobs, *, check=True):
    """What each process of each job reported; ends all of them, whatever becomes of one."""
    found, failures = [], []
    for job in jobs:
        try:
            found.append(job.finish(check=check))
        except ChildFailed as exc:
            failures.append(exc)
    if failures:
        raise failures[0]
    return found
