"""What a restore does to Python's collector, and how it lays small arrays beside each other."""

import gc
import itertools
import weakref

import numpy as np
import pytest

import ckptmgr
from ckptmgr.engine import memory, restore
from tests.support import trees


@pytest.fixture
def nothing_frozen():
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_is_made_while_the_collector_rests_is_not_looked_through_afterwards(
    nothing_frozen, monkeypatch
):
    monkeypatch.setattr(memory, "_spared", itertools.count(1))
    looked = []

    def callback(phase, info):
        if phase == "start":
            looked.append(len(gc.get_objects(generation=0)))

    with memory.no_collections():
        made = [[] for _ in range(60_000)]
    gc.callbacks.append(callback)
    try:
        more = [[] for _ in range(5_000)]
    finally:
        gc.callbacks.remove(callback)
    assert looked and max(looked) < 5_000, looked
    assert gc.isenabled() and len(made) + len(more) == 65_000


class Model:
    """Garbage that only the collector finds."""

    def __init__(self, state):
        self.state, self.me = state, self


def test_an_evaluator_that_restores_again_and_again_keeps_few_of_its_models():
    alive = []
    for _ in range(60):
        with memory.no_collections():
            state = [[] for _ in range(60_000)]
        model = Model(state)
        alive.append(weakref.ref(model))
    assert sum(ref() is not None for ref in alive) <= memory.TURNS + 1


def test_what_the_user_has_frozen_stays_frozen(nothing_frozen):
    gc.freeze()
    frozen = gc.get_freeze_count()
    with memory.no_collections():
        made = [[] for _ in range(60_000)]
    assert len(made) == 60_000
    assert frozen > memory.FROZEN_BY_PYTHON and gc.get_freeze_count() >= frozen


def test_a_collector_that_the_user_has_switched_off_stays_off():
    gc.disable()
    try:
        with memory.no_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_small_arrays_share_memory_and_never_the_same_bytes():
    rng = np.random.default_rng(0)
    room = restore._Room()
    dtypes = [np.dtype(name) for name in ("int8", "float16", "float32", "complex64")]
    found = []
    for number in range(400):
        shape = tuple(int(n) for n in rng.integers(0, 30, rng.integers(0, 4)))
        array = room.array(shape, dtypes[number % 4], shared=number % 5 > 0)
        assert array.shape == shape and array.flags.c_contiguous and array.flags.writeable
        assert array.__array_interface__["data"][0] % 64 == 0
        array[...] = number % 100
        found.append(array)
    for number, array in enumerate(found):
        assert (array == number % 100).all()
    bases = {id(array.base) for array in found}
    assert len(found) // 5 < len(bases) < len(found) // 2


def test_a_numpy_array_that_was_restored_keeps_no_other_alive(tmp_path):
    trees.save(tmp_path, {f"leaf{n}": np.full(10, n) for n in range(100)})
    found = ckptmgr.restore(tmp_path)
    assert len({id(array.base) for array in found.values()}) == 100
