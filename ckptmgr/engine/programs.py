"""Compiled copies from device to host memory: many small arrays in one, and into old buffers.

- `Gather`: the local pieces of many small arrays, end to end in one flat array. Ordering 3,000
  arrays on 8 devices takes 20 to 30 ms so, and 250 to 300 ms as 3,000 transfers. Values travel as
  unsigned words, so that no bit of them is interpreted.
- `Copies`: arrays into the buffers of an earlier save, which the program is given as donations.

Where the device's memory is the host's (CPU), programs write into `pinned_host` themselves. On an
accelerator a program that did would hold up the training step behind it until the last byte has
crossed the bus; so a gather stays on the device there and is transferred like any array, and
buffers are the runtime's to use again: it keeps pinned memory that it once allocated.

Compiling takes 0.5 s for a gather of 500 arrays. So it happens in the background, on a thread
that ends with its work or with the process; until then, and where a program cannot be compiled,
plain transfers do the same. A program concerns devices of this process only and has no
collectives.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ckptmgr.core.boxes import Shape

logger = logging.getLogger("ckptmgr")

MOST_PROGRAMS = 4096
"""Kept at a time; trees that change with every save would otherwise fill the process."""


@dataclass(frozen=True, slots=True)
class Gather:
    """Arrays on one mesh or device, and the flat array that they become.

    Attributes:
      members: (shape, dtype name, sharding) of each array.
      width: bytes of a word, which is the item size of every member.
      words: length of the flat array.
      out: its sharding; each device holds its own pieces.
      donated: whether the first argument is an old flat array to write over.
    """

    members: tuple[tuple[Shape, str, Sharding], ...]
    width: int
    words: int
    out: Sharding
    donated: bool

    def empty(self) -> jax.Array:
        """A flat array to write over."""
        return jax.device_put(np.zeros(self.words, f"uint{8 * self.width}"), self.out)


@dataclass(frozen=True, slots=True)
class Copy:
    """One array, and the same sharding in host memory."""

    shape: Shape
    dtype: str
    source: Sharding
    out: Sharding


Copies = tuple[Copy, ...]
"""Arguments of the program: old buffers, to write over, and arrays, a list of each."""

Spec = Gather | Copies


class Programs:
    """Compiled programs of one manager."""

    def __init__(self) -> None:
        self._compiled: dict[Spec, Any] = {}
        self._wanted: dict[Spec, None] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def get(self, spec: Spec) -> Any:
        """The compiled program, or None where there is none (yet); it is remembered as wanted."""
        found = self._compiled.get(spec)
        if found is None and spec not in self._compiled:
            self._wanted[spec] = None
        return found

    def drop(self, spec: Spec, why: BaseException) -> None:
        """The program does not fit what it was meant for; plain transfers from now on."""
        logger.debug("a compiled copy is not used any more: %s", why)
        self._compiled[spec] = None

    def compile_wanted(self) -> None:
        """Begins to compile what was asked for in vain, in the background."""
        with self._lock:
            if not self._wanted or self._closed or (self._thread and self._thread.is_alive()):
                return
            if len(self._compiled) > MOST_PROGRAMS:
                self._compiled.clear()
            # not a daemon: the interpreter waits for the one that is being compiled
            self._thread = threading.Thread(target=self._run, name="ckptmgr-compile", daemon=False)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter is going: no save will need them
                self._thread = None

    def wait(self) -> None:
        """Waits until nothing is being compiled."""
        with self._lock:  # one that is being made has started when it is let go
            thread = self._thread
        if thread is not None:
            thread.join()

    def close(self) -> None:
        """Ends the thread after the program it is at."""
        self._closed = True
        self.wait()

    def _run(self) -> None:
        while self._wanted and not self._closed and threading.main_thread().is_alive():
            spec = next(iter(self._wanted))
            try:
                with jax.disable_jit(False):
                    program = _compile(spec)
            except Exception as exc:
                logger.debug("no compiled copy for %s: %s", type(spec).__name__, exc)
                program = None
            self._compiled[spec] = program
            self._wanted.pop(spec, None)


def _compile(spec: Spec) -> Any:
    if isinstance(spec, Gather):
        return _compile_gather(spec)
    old = [jax.ShapeDtypeStruct(copy.shape, copy.dtype, sharding=copy.out) for copy in spec]
    new = [jax.ShapeDtypeStruct(copy.shape, copy.dtype, sharding=copy.source) for copy in spec]
    out = [copy.out for copy in spec]
    copies = jax.jit(ckptmgr_copy, donate_argnums=0, out_shardings=out, keep_unused=True)
    return copies.lower(old, new).compile()


def ckptmgr_copy(old: list[jax.Array], new: list[jax.Array]) -> list[jax.Array]:
    """`old` are donated, so the copies of `new` are made in their memory."""
    return new


def _compile_gather(spec: Gather) -> Any:
    def ckptmgr_gather(*arrays: jax.Array) -> jax.Array:
        return jnp.concatenate([_words(array, spec.width) for array in arrays])

    gather: Any = ckptmgr_gather
    if isinstance(spec.out, NamedSharding):
        shardings = [sharding for _, _, sharding in spec.members]
        gather = jax.shard_map(
            ckptmgr_gather,
            mesh=spec.out.mesh,
            in_specs=tuple(_spec(sharding) for sharding in shardings),
            out_specs=spec.out.spec,
        )
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for shape, dtype, sharding in spec.members
    ]
    if not spec.donated:
        return jax.jit(gather, out_shardings=spec.out).lower(*arguments).compile()
    old = jax.ShapeDtypeStruct((spec.words,), f"uint{8 * spec.width}", sharding=spec.out)

    def over(old: jax.Array, *arrays: jax.Array) -> jax.Array:
        return gather(*arrays)

    jitted = jax.jit(over, donate_argnums=0, out_shardings=spec.out, keep_unused=True)
    return jitted.lower(old, *arguments).compile()


def _spec(sharding: Sharding) -> PartitionSpec:
    assert isinstance(sharding, NamedSharding)
    return sharding.spec


def _words(array: jax.Array, width: int) -> jax.Array:
    word = jnp.dtype(f"uint{8 * width}")
    if array.dtype == jnp.bool_:
        return array.astype(word).reshape(-1)
    return jax.lax.bitcast_convert_type(array, word).reshape(-1)
