"""What a manager does besides plain saves, each with what may be there after it went wrong.

Values are numpy's, so that a process that is forked to be killed need not start JAX.
"""

import itertools
import pathlib
import shutil

import numpy as np

import ckptmgr
from ckptmgr.core import layout
from ckptmgr.testing import Fault, TornStager
from tests.fault.common import (
    LIMIT,
    age,
    bury_owners,
    faulty,
    join_sweep,
    leftovers,
    manager,
    numbers,
    reader,
    write_dead_intent,
)

ATTEMPT = "0123456789abcdef"
OLD, NEW = 20, 21


def tree(number):
    """A state whose every leaf depends on `number`."""
    return {"w": np.arange(6, dtype=np.float32) + number, "n": number}


def number_of(found):
    """The number whose tree this is, bit for bit."""
    wanted = tree(found["n"])
    assert sorted(found) == sorted(wanted)
    assert found["w"].dtype == np.float32
    assert found["w"].tobytes() == wanted["w"].tobytes(), found
    return found["n"]


class Place:
    """The least that counts as a data iterator."""

    def __init__(self, at=0):
        self.at = at

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


class Scenario:
    """Steps 1 and 2 lie there, step s with tree(s); then something happens.

    Attributes:
      options: of the manager to which it happens.
      fates: step -> the numbers it may hold when something went wrong; None: not there.
      done: step -> the number it holds when nothing was said to be wrong.
      late: whether only the next start has to put things right.
      damaged: the step that was damaged before.
    """

    late = False
    damaged = None

    options = {"heartbeat": None}
    fates = {1: (1,), 2: (2,)}
    done = {1: 1, 2: 2}

    def prepare(self, root):
        with manager(root, heartbeat=None) as found:
            for step in (1, 2):
                found.save(step, tree(step)).result(LIMIT)

    def open(self, root, store):
        """The manager, ready, without its clean-up under way."""
        found = manager(root, store=store, **self.options)
        join_sweep()
        return found

    def act(self, found):
        raise NotImplementedError

    def check(self, root, there):
        """More that must hold of `there`, step -> number, whatever happened."""


class Heartbeat(Scenario):
    options = {"heartbeat": ckptmgr.Heartbeat(every_saves=1)}
    fates = {1: (1,), 2: (2,), 3: (None, NEW)}
    done = {1: 1, 2: 2, 3: NEW}

    def act(self, found):
        items = ckptmgr.Items(state=tree(NEW), data=Place(NEW))
        found.save(3, items, metrics={"loss": 0.5}, extra={"run": "a"}).result(LIMIT)


class HeartbeatReplaces(Scenario):
    options = {"heartbeat": ckptmgr.Heartbeat(every_saves=1)}
    fates = {1: (1,), 2: (2, NEW)}
    done = {1: 1, 2: NEW}

    def act(self, found):
        found.save(2, tree(NEW), force=True, overwrite=True).result(LIMIT)


class Truncate(Scenario):
    fates = {1: (1,), 2: (2, None), 3: (3, None)}
    done = {1: 1, 2: None, 3: None}

    def prepare(self, root):
        super().prepare(root)
        with manager(root, heartbeat=None) as found:
            found.save(3, tree(3)).result(LIMIT)

    def act(self, found):
        assert found.truncate_after(1) == (3, 2)

    def check(self, root, there):
        assert there[3] is None or there[2] == 2, "a step went before a newer one"


class Retention(Scenario):
    options = {"heartbeat": None, "retention": ckptmgr.KeepLast(1)}
    fates = {1: (1, None), 2: (2, None), 3: (3, None)}
    done = {3: 3}  # what could not go now goes after the next save

    def act(self, found):
        found.save(3, tree(3)).result(LIMIT)
        found.wait()

    def check(self, root, there):
        if there[3] is None:
            assert there == {1: 1, 2: 2, 3: None}, "a step went before its successor was there"


class Replaced(Scenario):
    """A save in whose way a damaged step lies."""

    fates = {1: (1,), 2: (None, NEW)}
    done = {1: 1, 2: NEW}

    def prepare(self, root):
        super().prepare(root)
        pathlib.Path(root, "2", layout.MANIFEST).unlink()

    def act(self, found):
        found.save(2, tree(NEW)).result(LIMIT)

    def check(self, root, there):
        aside = list(pathlib.Path(root, "_ckptmgr", "quarantine").glob("2-*"))
        if there[2] is None and not aside:
            assert pathlib.Path(root, "2", "default").is_dir(), "what lay there was not kept"


class Sweep(Scenario):
    """The start of a manager where dead processes left all that they can leave."""

    def prepare(self, root):
        super().prepare(root)
        cut_a_replacement_in_two(root, 2)
        bury_owners(root)
        for number, name in enumerate(("a" * 16, "b" * 16)):
            pathlib.Path(root, layout.tmp_name(30 + number, name), "default").mkdir(parents=True)
            write_dead_intent(root, 30 + number, name)
        unreadable = pathlib.Path(root, layout.intent_name("b" * 16))
        unreadable.write_text(unreadable.read_text()[:20])
        trash = pathlib.Path(root, layout.trash_dir(), f"7-{ATTEMPT}")
        shutil.copytree(pathlib.Path(root, "1"), trash)
        age(root)

    late = True
    fates = {1: (1,), 2: (OLD,)}
    done = {1: 1, 2: OLD}

    def open(self, root, store):
        return store

    def act(self, store):
        manager(store.root, store=store, **self.options).close()
        join_sweep()


class MarkDamaged(Scenario):
    """A restore that comes upon a damaged step, and puts it aside."""

    damaged = 2
    fates = {1: (1,), 2: (None,)}
    done = {1: 1, 2: None}

    def prepare(self, root):
        super().prepare(root)
        file = pathlib.Path(root, "2", layout.tree_file("default"))
        file.write_bytes(file.read_bytes() + b" ")

    def act(self, found):
        latest = found.restore_latest(tree(0))
        assert latest.step == 1 and number_of(latest.state) == 1


class DeleteSuspect(Scenario):
    """A deletion of a step that is marked: the mark goes, too."""

    fates = {1: (1,), 2: (None, 2)}
    done = {1: 1, 2: None}

    def prepare(self, root):
        super().prepare(root)
        with manager(root) as found:
            assert found._catalog.mark_suspects("by a test") == (1, 2)
        pathlib.Path(root, layout.suspect_name(1)).unlink()

    def act(self, found):
        found.delete(2)


class TornHeartbeat(Scenario):
    """A heartbeat that finds torn copies, and marks the steps that were made by them."""

    options = {"heartbeat": ckptmgr.Heartbeat(every_saves=1)}
    fates = {1: (1,), 2: (2,), 3: (None,)}
    done = fates

    def open(self, root, store):
        options = ckptmgr.Options(storage=ckptmgr.Storage(durable=False), **self.options)
        stager = TornStager(options.snapshot, "w")
        found = ckptmgr.CheckpointManager(root, options, store=store, stager=stager)
        found.torn = stager
        join_sweep()
        return found

    def act(self, found):
        found.save(3, tree(NEW))


SCENARIOS = {
    "heartbeat": Heartbeat(),
    "heartbeat that replaces": HeartbeatReplaces(),
    "rollback": Truncate(),
    "retention": Retention(),
    "save over a damaged step": Replaced(),
    "clean-up": Sweep(),
    "putting aside": MarkDamaged(),
    "deletion of a marked step": DeleteSuspect(),
}


def cut_a_replacement_in_two(root, step):
    """A step lies neither here nor there: the old one in the trash, OLD in its attempt."""
    seen = itertools.count(1)  # the first rename finds the step in its way, the second replaces it

    def second(operation):
        return operation.name == "rename" and operation.target == str(step) and next(seen) == 2

    store = faulty(root, Fault(second, for_good=True), exchange=False)
    with manager(root, store=store, heartbeat=None, on_save_error="warn") as found:
        assert found.save(step, tree(OLD), overwrite=True).join(LIMIT)
    assert step not in numbers(reader(root))


def what_is_there(root, scenario):
    """Step -> number, of every step that the scenario knows; fails for others and for damage."""
    seen = reader(root)
    listed = numbers(seen)
    assert set(listed) <= set(scenario.fates), listed
    there = {}
    for step in scenario.fates:
        there[step] = None
        if step in listed:
            try:
                found = seen.restore(step=step)
            except ckptmgr.CorruptCheckpoint:
                assert step == scenario.damaged, f"step {step} is damaged"
                continue
            if isinstance(found, ckptmgr.Items):
                assert found["data"] == {"at": found["state"]["n"]}
                found = found["state"]
            there[step] = number_of(found)
    return there


def assert_usable(root, newest=50):
    """A new manager cleans up, and the next save works."""
    with manager(root, heartbeat=None) as found:
        join_sweep()
        assert leftovers(root) == [], leftovers(root)
        found.save(newest, tree(newest)).result(LIMIT)
        assert found.latest_step() == newest
        assert number_of(found.restore()) == newest
