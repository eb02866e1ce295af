"""Run one script in several processes of a JAX job on this machine, under a watchdog.

The script finds `rank`, `world`, `root` (its first argument), `mesh(*shape)` and `report(**facts)`;
what it reports comes back as one dict per process. Each process has `DEVICES` CPU devices; gloo
carries collectives over the loopback interface.
"""

import json
import socket
import subprocess
from collections.abc import Sequence
from typing import Any

from tests.support.child import OWN_OUTPUT, ChildFailed, finish, start_python

DEVICES = 2  # per process

PRELUDE = '''
import json, os, signal, sys, threading, time, logging
import numpy as np
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

rank, world, port, root = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
arguments = sys.argv[5:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    f"localhost:{port}", world, rank, coordinator_bind_address=f"localhost:{port}",
    shutdown_timeout_seconds=10,
)
import ckptmgr
from ckptmgr import Options, Coordination, Heartbeat, Items, Schedule, Snapshot
from ckptmgr.errors import *
from tests.support.trees import assert_same_values

facts = {}

def report(**found):
    facts.update(found)

def mesh(*shape, names="xyz"):
    return Mesh(np.array(jax.devices()).reshape(shape), tuple(names[: len(shape)]))

def put(value, sharding):
    """A global array, made without communication."""
    value = np.asarray(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

def same(array, value):
    """Whether what this process holds of an array is that of a numpy array, bit by bit."""
    value = np.asarray(value)
    assert array.shape == value.shape and array.dtype == value.dtype, (array.shape, array.dtype)
    return all(
        np.asarray(shard.data).tobytes() == np.ascontiguousarray(value[shard.index]).tobytes()
        for shard in array.addressable_shards
    )

def leave(status=0):
    """Ends at once: JAX's own shutdown waits for processes that have gone."""
    print("FACTS " + json.dumps(facts), flush=True)
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)

def outcome(call):
    """The chain of what a call raises, as text."""
    try:
        call()
    except BaseException as exc:
        found = []
        while exc is not None:
            found.append(f"{type(exc).__name__}: {exc}")
            exc = exc.__cause__
        return found
    return []
'''


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


class Job:
    """A job under way; `children` in rank order."""

    def __init__(
        self, text: str, root: Any, *args: Any, world: int, devices: int, timeout: float
    ) -> None:
        self.timeout = timeout
        port = free_port()
        env = {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": "1",
        }
        script = OWN_OUTPUT + PRELUDE + text + "\nleave()\n"
        self.children = [
            start_python(script, rank, world, port, root, *args, env=env, timeout=timeout)
            for rank in range(world)
        ]

    def finish(self, *, check: bool = True) -> list[dict[str, Any] | None]:
        """What each process reported; None for one that did not come to its end.

        Raises ChildFailed, after all have ended, for the first that failed where `check`.
        """
        done: list[subprocess.CompletedProcess[str]] = []
        failures: list[ChildFailed] = []
        for child in self.children:
            try:
                done.append(finish(child, timeout=self.timeout, check=check))
            except ChildFailed as exc:
                failures.append(exc)
                done.append(exc.done)
        if failures:
            raise failures[0]
        self.stderr = [each.stderr for each in done]
        return [_facts(each.stdout) for each in done]


def _facts(stdout: str) -> dict[str, Any] | None:
    lines = [line for line in stdout.splitlines() if line.startswith("FACTS ")]
    found: dict[str, Any] | None = json.loads(lines[-1].removeprefix("FACTS ")) if lines else None
    return found


def start_job(
    text: str, root: Any, *args: Any, world: int = 2, devices: int = DEVICES, timeout: float = 60
) -> Job:
    return Job(text, root, *args, world=world, devices=devices, timeout=timeout)


def run_job(
    text: str, root: Any, *args: Any, world: int = 2, devices: int = DEVICES, timeout: float = 60
) -> Sequence[dict[str, Any]]:
    """Runs a job to its end; every process has to come to it."""
    found = start_job(text, root, *args, world=world, devices=devices, timeout=timeout).finish()
    assert all(facts is not None for facts in found)
    return [facts for facts in found if facts is not None]
