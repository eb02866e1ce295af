"""A training loop to save from: a donated, jitted step, and what a save costs it.

A step multiplies matrices that fit the cache, as the compute of a model would, and passes once over
the whole state, as an optimiser does. How much it computes is set when it starts, so that a step
has a realistic length; the pass over the state is bound by memory and comes on top.

The pass moves every value along the circle [-0.5, 0.5) in units of 2**-23, which floats add
without rounding. bfloat16 has too few bits for that; there it turns the mantissa of every value,
whose sign and exponent stay. So each step changes every value, the values stay as incompressible as
they were, and those of any step can be computed from the seed and the distance moved, bit for bit.
"""

import functools
import statistics
import threading
import time
from dataclasses import dataclass

import numpy as np

from measure import Clock
from systems import System
from workloads import Workload

CIRCLE = 2**23  # places on it
STRIDE = 2_908_957  # places that a step moves; odd, so that it takes 2**23 steps to come back
MANTISSA = 2**7 - 1  # of bfloat16; CIRCLE is a multiple of its places
POLL_SECONDS = 0.002


class Training:
    """The state on its devices, and the step that donates it.

    Attributes:
      state: the present arrays.
      moved: the places that the present values are away from those of the seed.
    """

    def __init__(self, workload: Workload, seed: int, matrix: int = 256):
        import jax

        self.workload = workload
        self._seed = seed
        self._iterations = np.int32(0)
        self.moved = 0
        shardings = {name: target.sharding for name, target in workload.like().items()}
        mesh = next(iter(shardings.values())).mesh
        split = jax.NamedSharding(mesh, jax.P(mesh.axis_names))
        turn = np.roll(np.eye(matrix, dtype=np.float32), 1, axis=0)
        self._matrices = jax.device_put(np.stack([turn] * mesh.size), split)
        self._step = jax.jit(_step, donate_argnums=0, out_shardings=(shardings, split))
        self.state = workload.state(seed)
        self.step()  # compiles

    def step(self) -> float:
        """One step, waited for; returns its seconds."""
        import jax

        start = time.perf_counter()
        done = self._step(self.state, self._matrices, np.int32(STRIDE), self._iterations)
        self.state, self.loss = jax.block_until_ready(done)
        self.moved = (self.moved + STRIDE) % CIRCLE
        return time.perf_counter() - start

    def compute_for(self, seconds: float) -> None:
        """Let a step compute for about so long, besides its pass over the state."""
        if seconds <= 0:
            return
        alone = min(self.step() for _ in range(5))
        trial = 4
        while True:
            self._iterations = np.int32(trial)
            more = min(self.step() for _ in range(3)) - alone
            if more > seconds / 4 or trial > 2**24:
                break
            trial *= 4
        self._iterations = np.int32(max(1, round(trial * seconds / more)))

    def same(self, name: str, array, moved: int) -> bool:
        """Whether the array has, bit for bit, the values of this leaf after so many places."""
        expected = _moved(self.workload.leaf(name, self._seed), np.int32(moved))
        return bool(_same(array, expected))

    def verify(self, restored: dict, moved: int) -> None:
        """Raise unless `restored` is the state as it was then."""
        if set(restored) != set(self.workload.leaves):
            raise AssertionError("the restored tree has other leaves")
        wrong = [name for name, array in restored.items() if not self.same(name, array, moved)]
        if wrong:
            raise AssertionError(f"{len(wrong)} leaves came back with other values: {wrong[:3]}")


def _step(state: dict, matrices, places, iterations):
    import jax

    loss = jax.lax.fori_loop(0, iterations, lambda _, x: x @ matrices, matrices)
    return {name: _moved_by(array, places) for name, array in state.items()}, loss[:, 0, 0]


def _moved_by(array, places):
    import jax
    import jax.numpy as jnp

    if array.dtype == jnp.float32:
        there = array + places.astype(jnp.float32) / CIRCLE
        return there - jnp.floor(there + 0.5)
    bits = jax.lax.bitcast_convert_type(array, jnp.uint16)
    turned = (bits + places.astype(jnp.uint16)) & MANTISSA
    return jax.lax.bitcast_convert_type(bits & ~jnp.uint16(MANTISSA) | turned, array.dtype)


def _moved(array, places):
    return _jitted(_moved_by)(array, places)


def _same(a, b):
    return _jitted(_equal_bits)(a, b)


def _equal_bits(a, b):
    import jax

    bits = f"uint{8 * a.dtype.itemsize}"
    return (jax.lax.bitcast_convert_type(a, bits) == jax.lax.bitcast_convert_type(b, bits)).all()


@functools.cache
def _jitted(function):
    import jax

    return jax.jit(function)


@dataclass(frozen=True)
class Baseline:
    """Steps without saving: seconds each, and CPU seconds per step."""

    steps: tuple[float, ...]
    cpu: float

    @classmethod
    def of(cls, training: Training, count: int) -> "Baseline":
        with Clock() as clock:
            steps = tuple(training.step() for _ in range(count))
        return cls(steps, clock.cpu / count)

    @property
    def median(self) -> float:
        return statistics.median(self.steps)

    @property
    def mean(self) -> float:
        return statistics.mean(self.steps)


@dataclass(frozen=True)
class Window:
    """One save, and the steps from its call until nothing of it was left to do."""

    in_save: float
    durable: float
    steps: tuple[float, ...]
    wall: float
    cpu: float
    moved: int  # of the values that were saved
    donated: float  # share of the arrays saved that the first step after could take over


def save_and_step(system: System, training: Training, number: int, at_least: int) -> Window:
    saved, moved, steps = list(training.state.values()), training.moved, []
    with Clock() as clock:
        system.save(number, training.state)
        in_save = clock.lap()
        with Watch(system, clock) as watch:
            steps.append(training.step())
            donated = statistics.mean(array.is_deleted() for array in saved)
            while len(steps) < at_least or not system.idle():
                steps.append(training.step())
    system.wait()
    return Window(in_save, watch.seconds, tuple(steps), clock.wall, clock.cpu, moved, donated)


class Watch:
    """Notes when the save became durable, from a thread of its own.

    Between the steps one could only say during which of them it was.
    """

    def __init__(self, system: System, clock: Clock):
        self._system, self._clock = system, clock
        self._thread = threading.Thread(target=self._watch, name="watch")

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._thread.join()

    def _watch(self) -> None:
        while not self._system.durable() and not self._system.idle():
            time.sleep(POLL_SECONDS)
        self.seconds = self._clock.lap()
