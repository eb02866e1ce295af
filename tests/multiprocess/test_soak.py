"""Hundreds of saves by two processes, none of which keeps step with the other."""

import collections

import pytest

import ckptmgr
from ckptmgr import Coordination, Options, Storage
from tests.multiprocess import test_saving

pytestmark = pytest.mark.timeout(150)

SAVES = 300
KEPT = 25
TRAINED = 100
TURNS = 20
NOTES = 30
"""More notes than this nobody needs at a time: of the save before, of this one, of a restore."""


def options(**rest):
    return Options(
        coordination=Coordination(deadline_seconds=30.0), storage=Storage(durable=False), **rest
    )


SOAK = """
import random
from jax._src import distributed
from jax.experimental import multihost_utils
from ckptmgr import KeepLast
from ckptmgr.engine.store import Store
from tests.multiprocess import test_soak as cases

places = NamedSharding(mesh(4), P("x"))
copies = NamedSharding(mesh(4), P())
random.seed(rank)

def state(number):
    return {
        "w": put(np.full(8, number, np.int32), places),
        "r": put(np.full((3, 5), number, np.int32), copies),
        "n": number,
    }

def numbers_in(found):
    return sorted({int(x) for name in "wr" for s in found[name].addressable_shards
                   for x in np.asarray(s.data).flat} | {found["n"]})

def notes(manager):
    "What the manager has left at the job's service."
    return distributed.global_state.client.key_value_dir_get(manager._coordinator._name + "/")

class Jittery(Store):
    def arrays(self, name):
        time.sleep(random.uniform(0, 0.005))
        return super().arrays(name)

# -- many saves

store = Jittery(f"{root}/saves", durable=False)
chosen = cases.options(retention=KeepLast(cases.KEPT))
with ckptmgr.CheckpointManager(f"{root}/saves", chosen, store=store) as manager:
    most = []
    for number in range(cases.SAVES):
        time.sleep(random.uniform(0, 0.005))
        manager.save(number, state(number))
        if number % 10 == 9:
            most.append(len(notes(manager)))
    manager.wait()
    multihost_utils.sync_global_devices("all is saved")
    kept = [info.step for info in manager.steps()]
    wrong = {
        step: found for step in kept
        if (found := numbers_in(manager.restore(state(0), step=step))) != [step]
    }
    report(kept=kept, wrong=wrong, most=max(most), after=len(notes(manager)))

# -- many calls of every kind, most of which fail

skip = cases.options(snapshot=Snapshot(when_busy="skip"))
with ckptmgr.CheckpointManager(f"{root}/calls", skip) as manager:
    manager.save(0, state(0), sync=True)
    manager.save(1, state(1), sync=True)
    most, refused = [], 0
    for turn in range(2, 2 + cases.TURNS):
        manager.save(turn, state(turn), sync=True)
        calls = (
            lambda: manager.save(0, state(0)),
            lambda: manager.save(turn + 1, {"w": object()}),
            lambda: manager.delete(turn),
            lambda: manager.delete(1000),
            lambda: manager.restore(state(0)),
            lambda: manager.restore({"v": 0}),
            lambda: manager.restore_latest(state(0)),
            lambda: manager.restore_latest({"v": 0}),
        )
        refused += sum(bool(outcome(call)) for call in calls)
        most.append(len(notes(manager)))
    report(calls=max(most), refused=refused)

# -- saves in the background, a collective in the foreground

@jax.jit
def train(w, r):
    step = jnp.max(w) - jnp.min(r) + 1  # of all devices
    return w + step, r + step

train = jax.jit(train, donate_argnums=(0, 1), out_shardings=(places, copies))
w, r = put(np.zeros((64, 256), np.int32), places), put(np.zeros(1000, np.int32), copies)
lived = 0
with ckptmgr.CheckpointManager(f"{root}/trained", cases.options()) as manager:
    for number in range(1, cases.TRAINED + 1):
        before = w, r
        w, r = train(w, r)
        lived += sum(not x.is_deleted() for x in before)
        manager.save(number, {"w": w, "r": r, "n": number})
    manager.wait()
    wrong = {
        number: found for number in range(1, cases.TRAINED + 1)
        if (found := numbers_in(manager.restore({"w": w, "r": r, "n": 0}, step=number))) != [number]
    }
    report(trained=wrong, lived=lived)
"""


@pytest.fixture(scope="module")
def soaked(tmp_path_factory):
    """(where, what two processes reported)."""
    root = tmp_path_factory.mktemp("soaked")
    return root, test_saving.run(SOAK, root, timeout=120)


def test_every_kept_step_of_hundreds_has_its_own_values(soaked):
    for facts in soaked[1]:
        assert facts["kept"] == list(range(SAVES - KEPT, SAVES))
        assert facts["wrong"] == {}


def test_every_step_that_was_saved_beside_a_collective_has_its_own_values(soaked):
    for facts in soaked[1]:
        assert facts["trained"] == {}
    found = collections.Counter(
        int(ckptmgr.restore(soaked[0] / "trained", step=n)["n"]) for n in range(1, TRAINED + 1)
    )
    assert found == dict.fromkeys(range(1, TRAINED + 1), 1)


def test_the_state_was_donated_while_it_was_saved(soaked):
    assert [facts["lived"] for facts in soaked[1]] == [0, 0]


def test_hundreds_of_saves_leave_no_pile_of_notes_at_the_service(soaked):
    for facts in soaked[1]:
        assert 0 < facts["most"] <= NOTES
        assert 0 < facts["after"] <= NOTES


def test_calls_that_fail_leave_no_pile_of_notes_at_the_service(soaked):
    for facts in soaked[1]:
        assert facts["refused"] == TURNS * 5
        assert 0 < facts["calls"] <= NOTES
