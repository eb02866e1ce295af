"""Each change that a save, an overwrite or a deletion makes goes wrong in turn."""

import contextlib
import shutil

import pytest

import ckptmgr
from ckptmgr.testing import Fault, Hold
from tests.fault.common import (
    LIMIT,
    age,
    assert_state,
    bury_owners,
    faulty,
    join_sweep,
    leftovers,
    manager,
    numbers,
    reader,
    remove,
    state,
    swept,
)
from tests.support import run_python

OLD, NEW, AGAIN = 20, 21, 22


class Scenario:
    """Step 1 lies there; something happens to step 2."""

    def __init__(self, exchange=True, before=False):
        self.exchange, self.before = exchange, before

    def prepare(self, root):
        with manager(root) as first:
            first.save(1, state(1)).result()
            if self.before:
                first.save(2, state(OLD)).result()

    allowed = ()  # what step 2 may be after a failure; None: not there

    def act(self, found):
        raise NotImplementedError


class Save(Scenario):
    allowed = (None, NEW)

    def act(self, found):
        found.save(2, state(NEW)).result(LIMIT)


class Overwrite(Scenario):
    allowed = (OLD, NEW)

    def act(self, found):
        found.save(2, state(NEW), overwrite=True).result(LIMIT)


class Delete(Scenario):
    allowed = (None, OLD)

    def act(self, found):
        found.delete(2)


SCENARIOS = {
    "save": Save(),
    "overwrite by exchange": Overwrite(before=True),
    "overwrite by two renames": Overwrite(exchange=False, before=True),
    "delete": Delete(before=True),
}

FAULTS = {
    "fails once": lambda k: Fault(k),
    "fails for good": lambda k: Fault(k, for_good=True),
    "takes effect and fails": lambda k: Fault(k, effect="full"),
    "is cut short": lambda k: Fault(k, effect="half"),
}


def operations_of(scenario, template, root):
    """What the scenario does when nothing goes wrong; `template` becomes what it starts from."""
    scenario.prepare(template)
    shutil.copytree(template, root)
    store = faulty(root, exchange=scenario.exchange)
    with manager(root, store=store) as found:
        store.arm()
        scenario.act(found)
    return list(store.operations)


def assert_whole(scenario, root, what):
    """Step 1 as it was, step 2 whole or not there, and nothing else listed."""
    seen = reader(root)
    assert_state(seen.restore(step=1), 1)
    if 2 not in numbers(seen):
        assert numbers(seen) == (1,)
        assert None in scenario.allowed, f"{what}: step 2 is gone"
        return None
    assert numbers(seen) == (1, 2)
    found = seen.restore(step=2)
    assert found["n"] in scenario.allowed, f"{what}: step 2 is {found['n']}"
    assert_state(found, found["n"])
    return found["n"]


def assert_usable(root):
    """A new manager saves the same step, and another one."""
    with swept(root) as found:
        found.save(2, state(AGAIN), overwrite=True).result(LIMIT)
        found.save(3, state(3)).result(LIMIT)
        assert numbers(found) == (1, 2, 3)
        for step, number in ((1, 1), (2, AGAIN), (3, 3)):
            assert_state(found.restore(step=step), number)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_whatever_operation_goes_wrong_every_listed_step_is_whole(name, fault, tmp_path):
    scenario = SCENARIOS[name]
    wrong = []
    template = tmp_path / "template"
    for operation in operations_of(scenario, template, tmp_path / "count"):
        what = f"{operation.number} {operation.name} {operation.path}"
        root = tmp_path / str(operation.number)
        shutil.copytree(template, root)
        store = faulty(root, exchange=scenario.exchange)
        found = manager(root, store=store)
        join_sweep()
        store.arm(FAULTS[fault](operation.number))
        raised = None
        try:
            scenario.act(found)
        except ckptmgr.CheckpointError as exc:
            raised = exc
        store.arm()
        try:
            if fault == "fails for good":  # what even undoing could not: the next start does
                bury_owners(root)
                swept(root).close()
            there = assert_whole(scenario, root, what)
            if raised is None:
                assert there == (None if name == "delete" else NEW), "it said it was done"
            # the same manager goes on
            found.save(2, state(AGAIN), overwrite=True).result(LIMIT)
            assert_state(found.restore(step=2), AGAIN)
            found.close()
            assert_usable(root)
        except AssertionError as exc:
            wrong.append(f"{what}: {exc}".splitlines()[0])
        except ckptmgr.CheckpointError as exc:
            wrong.append(f"{what}: {type(exc).__name__}: {exc}")
        finally:
            with contextlib.suppress(ckptmgr.CheckpointError):
                found.close()
        shutil.rmtree(root)
    assert wrong == []


def test_a_failed_save_is_not_listed_and_says_which_step_and_why(tmp_path):
    template = tmp_path / "template"
    operations = operations_of(Save(), template, tmp_path / "count")
    commit = next(op.number for op in operations if op.name == "rename")
    for operation in operations[:commit]:
        root = tmp_path / str(operation.number)
        shutil.copytree(template, root)
        store = faulty(root)
        with manager(root, store=store) as found:
            store.arm(Fault(operation.number))
            with pytest.raises(ckptmgr.SaveFailed, match=r"step 2 .*\(by a test\)") as caught:
                found.save(2, state(NEW)).result(LIMIT)
            assert caught.value.step == 2
            assert isinstance(caught.value.__cause__, ckptmgr.StoreError), operation
            assert numbers(found) == (1,)
            assert found.latest_step() == 1
            found.save(2, state(AGAIN)).result(LIMIT)
            assert_state(found.restore(), AGAIN)


def test_a_save_that_fails_once_leaves_nothing_behind(tmp_path):
    template = tmp_path / "template"
    operations = operations_of(Save(), template, tmp_path / "count")
    commit = next(op.number for op in operations if op.name == "rename")
    left = {}
    for operation in operations[:commit]:
        root = tmp_path / str(operation.number)
        shutil.copytree(template, root)
        store = faulty(root)
        with manager(root, store=store) as found:
            store.arm(Fault(operation.number))
            with pytest.raises(ckptmgr.SaveFailed):
                found.save(2, state(NEW)).result(LIMIT)
            if leftovers(root):
                left[f"{operation.number} {operation.name} {operation.path}"] = leftovers(root)
    assert left == {}


def test_a_save_whose_rename_landed_but_was_reported_failed_is_there_or_said_to_be_unknown(
    tmp_path,
):
    store = faulty(tmp_path, Fault("rename", effect="full"))
    with manager(tmp_path, store=store) as found:
        try:
            found.save(2, state(NEW)).result(LIMIT)
        except ckptmgr.SaveFailed as exc:
            assert "left no step behind" not in str(exc)
        assert_state(found.restore(step=2), NEW)


def test_a_temporary_directory_removed_under_a_save_never_becomes_a_step(tmp_path):
    template = tmp_path / "template"
    operations = operations_of(Save(), template, tmp_path / "count")
    commit = next(op.number for op in operations if op.name == "rename")
    wrong = []
    for operation in operations[:commit]:
        root = tmp_path / str(operation.number)
        shutil.copytree(template, root)
        store = faulty(root)
        with manager(root, store=store) as found:
            hold = Hold(operation.number)
            store.arm(hold)
            handle = found.save(2, state(NEW))
            assert hold.reached.wait(LIMIT)
            try:
                for temporary in root.glob("2.orbax*"):
                    remove(temporary)
            finally:
                hold.release()
            with contextlib.suppress(ckptmgr.SaveFailed):
                handle.result(LIMIT)
            try:
                assert_whole(Save(), root, "")
            except ckptmgr.CorruptCheckpoint as exc:
                wrong.append(f"{operation.number} {operation.name} {operation.path}: {exc}")
    assert wrong == []


CRASH = """
    import gc, os, sys, pathlib, shutil, signal
    import jax, jax.numpy, numpy, ckptmgr  # imported once; every fork starts with them
    from ckptmgr.testing import Fault
    from tests.fault import common
    from tests.fault.test_every_operation import SCENARIOS, operations_of

    base, effect = pathlib.Path(sys.argv[1]), sys.argv[2]

    gc.freeze()  # a collection in a fork would copy every page: 0.1 s each

    def forked(act):
        pid = os.fork()
        if pid == 0:
            try:
                act()
            finally:
                sys.stdout.flush()
                os._exit(9)
        return os.waitpid(pid, 0)[1]

    def count(scenario, root):
        operations = operations_of(scenario, root / "template", root / "count")
        (root / "names").write_text("\\n".join(f"{o.name} {o.path}" for o in operations))

    def crash(scenario, root, k):
        store = common.faulty(root, exchange=scenario.exchange)
        found = common.manager(root, store=store)
        common.join_sweep()
        store.arm(Fault(k, effect=effect, then="die"))
        scenario.act(found)

    for number, (name, scenario) in enumerate(SCENARIOS.items()):
        root = base / str(number)
        root.mkdir()
        forked(lambda: count(scenario, root))
        names = (root / "names").read_text().splitlines()
        for k, operation in enumerate(names, 1):
            if effect == "half" and not operation.startswith("write_file"):
                continue
            shutil.copytree(root / "template", root / str(k))
            status = forked(lambda: crash(scenario, root / str(k), k))
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
            print(number, k, operation, flush=True)
    """


@pytest.mark.parametrize("effect", ["none", "half"])
def test_whatever_operation_the_process_dies_at_every_listed_step_is_whole(effect, tmp_path):
    done = run_python(CRASH, tmp_path, effect, timeout=100)
    lines = done.stdout.split("\n")[:-1]
    assert len(lines) > (60 if effect == "none" else 20)
    wrong = []
    for line in lines:
        number, k = line.split()[:2]
        name, scenario = list(SCENARIOS.items())[int(number)]
        root = tmp_path / number / k
        what = f"{name}: {line}"
        try:
            assert numbers(reader(root))[0] == 1
            swept(root).close()
            if effect == "half" and leftovers(root):  # whose intent cannot be read is let live
                age(root)
                swept(root).close()
            assert leftovers(root) == []
            assert_whole(scenario, root, what)
            assert_usable(root)
        except AssertionError as exc:
            wrong.append(f"{what}: {exc}".splitlines()[0])
        except ckptmgr.CheckpointError as exc:
            wrong.append(f"{what}: {type(exc).__name__}: {exc}")
    assert wrong == []
