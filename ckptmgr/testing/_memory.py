"""How much memory is held: in the buffers of live jax arrays, and in numpy arrays."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SLACK = 2**16
"""Bytes of small numpy arrays that come and go."""


def shards(array: jax.Array) -> list[jax.Array]:
    """The array, or a key's data, and its shards."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = array._base_array  # type: ignore[attr-defined]
    return [array, *(shard.data for shard in array.addressable_shards)]


@contextmanager
def traced() -> Iterator[None]:
    """Counts the memory of numpy arrays."""
    if tracemalloc.is_tracing():
        yield
        return
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def held(devices: Sequence[Any]) -> tuple[int, int]:
    """Bytes in device buffers (jax's host memory is one); bytes of those and of numpy arrays.

    Several arrays may share a buffer: JAX makes one per shard when a shard is asked for.
    """
    gc.collect()
    buffers: dict[Any, int] = {}
    live: Any = jax.live_arrays
    for array in live(devices[0].platform):
        for shard in [] if array.is_deleted() else array.addressable_shards:
            try:
                where = shard.data.unsafe_buffer_pointer()
            except Exception:  # not every backend tells
                where = id(shard.data)
            buffers[shard.device, where] = shard.data.nbytes
    numpys = tracemalloc.take_snapshot().filter_traces(
        [tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)]
    )
    nbytes = sum(buffers.values())
    return nbytes, nbytes + sum(trace.size for trace in numpys.traces)
