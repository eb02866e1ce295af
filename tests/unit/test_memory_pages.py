"""Large blocks in host memory are asked for in huge pages; small ones are left as they are."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from ckptmgr.engine import memory


def flags_at(address):
    """The kernel's flags of the mapping that holds an address."""
    found = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, stop = (int(part, 16) for part in head.split("-"))
            found = start <= address < stop
        elif found and head == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("no mapping has this address")


def copy_of(mib):
    array = jax.device_put(jnp.ones((mib, 2**18), jnp.float32), jax.devices()[0])
    host = array.sharding.with_memory_kind("pinned_host")
    return jax.block_until_ready(jax.device_put(array, host, may_alias=False))


@pytest.mark.skipif(
    not pathlib.Path("/sys/kernel/mm/transparent_hugepage").is_dir(),
    reason="this kernel has no huge pages for anonymous memory",
)
def test_a_block_that_comes_fresh_from_the_system_is_advised_and_a_small_one_is_not():
    large, small = copy_of(40), copy_of(8)
    inside = [array.unsafe_buffer_pointer() + array.nbytes // 2 for array in (large, small)]
    before = flags_at(inside[1])  # numpy asks for them, too, and leaves them with what it frees
    memory.want_huge_pages(large)
    memory.want_huge_pages(small)
    assert "hg" in flags_at(inside[0])
    assert flags_at(inside[1]) == before
    assert large[3, 3] == small[3, 3] == 1
