"""Each change of everything else that a manager does goes wrong in turn, see `scenarios`."""

import contextlib
import errno
import os
import shutil

import pytest

import ckptmgr
from ckptmgr.core import layout
from ckptmgr.testing import Fault
from tests.fault.common import LIMIT, age, bury_owners, faulty, join_sweep, leftovers, manager
from tests.fault.scenarios import (
    SCENARIOS,
    MarkDamaged,
    TornHeartbeat,
    assert_usable,
    number_of,
    tree,
    what_is_there,
)
from tests.support import run_python

FAULTS = {
    "fails once": lambda k: Fault(k),
    "fails for good": lambda k: Fault(k, for_good=True),
    "takes effect and fails": lambda k: Fault(k, effect="full"),
    "is cut short": lambda k: Fault(k, effect="half"),
}


def operations_of(scenario, template, root):
    """What the scenario does when nothing goes wrong."""
    shutil.copytree(template, root)
    store = faulty(root)
    found = scenario.open(root, store)
    store.arm()
    with contextlib.suppress(ckptmgr.SaveFailed):
        scenario.act(found)
    operations = list(store.operations)
    if found is not store:
        found.close()
    return operations


def check(scenario, root, raised):
    """What is there after something went wrong is what may be there."""
    there = what_is_there(root, scenario)
    for step, number in there.items():
        assert number in scenario.fates[step], f"step {step} is {number}"
    scenario.check(root, there)
    if raised is None:
        held = {step: there[step] for step in scenario.done}
        assert held == scenario.done, f"it said it was done: {held}"


def try_one(scenario, root, fault):
    """One fault; then the same manager goes on, and another one."""
    store = faulty(root)
    found = scenario.open(root, store)
    store.arm(fault)
    raised = None
    try:
        scenario.act(found)
    except ckptmgr.CheckpointError as exc:
        raised = exc
    store.arm()
    if not scenario.late:
        bury_owners(root)  # so that the next start may do what even undoing could not
    if fault.for_good or scenario.late:
        manager(root, heartbeat=None).close()
        join_sweep()
    check(scenario, root, raised)
    if found is not store:
        found.save(40, tree(40)).result(LIMIT)
        assert number_of(found.restore(step=40)) == 40
        with contextlib.suppress(ckptmgr.CheckpointError):
            found.close()
    assert_usable(root)


def first_line(exc):
    return f"{type(exc).__name__} {exc}".splitlines()[0]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_whatever_change_goes_wrong_nothing_else_is_lost_and_the_next_save_works(
    name, fault, tmp_path
):
    scenario = SCENARIOS[name]
    template = tmp_path / "template"
    scenario.prepare(template)
    operations = operations_of(scenario, template, tmp_path / "count")
    assert operations
    wrong = []
    for operation in operations:
        if fault == "is cut short" and operation.name != "write_file":
            continue  # the same as failing at once
        root = tmp_path / str(operation.number)
        shutil.copytree(template, root)
        try:
            try_one(scenario, root, FAULTS[fault](operation.number))
        except (AssertionError, ckptmgr.CheckpointError) as exc:
            what = f"{operation.number} {operation.name} {operation.path}"
            wrong.append(f"{what}: {first_line(exc)}")
        shutil.rmtree(root)
    assert wrong == []


KILL = """
    import gc, os, sys, pathlib, shutil, signal
    import jax, jax.numpy, numpy, ckptmgr  # imported once; every fork starts with them
    from ckptmgr.testing import Fault
    from tests.fault import common
    from tests.fault.scenarios import SCENARIOS
    from tests.fault.test_every_change import operations_of

    base, name, effect = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    scenario = SCENARIOS[name]
    template = base / "template"

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

    def count():
        scenario.prepare(template)
        operations = operations_of(scenario, template, base / "count")
        (base / "names").write_text("\\n".join(f"{o.name} {o.path}" for o in operations))

    def die(k):
        store = common.faulty(base / str(k))
        found = scenario.open(base / str(k), store)
        store.arm(Fault(k, effect=effect, then="die"))
        scenario.act(found)

    forked(count)
    for k, operation in enumerate((base / "names").read_text().splitlines(), 1):
        if effect == "half" and not operation.startswith("write_file"):
            continue
        shutil.copytree(template, base / str(k))
        status = forked(lambda: die(k))
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
        print(k, operation, flush=True)
    """


@pytest.mark.parametrize("effect", ["none", "half", "full"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_whatever_change_the_process_dies_at_nothing_else_is_lost_and_the_next_save_works(
    name, effect, tmp_path
):
    if effect == "half" and name not in ("heartbeat", "retention"):
        pytest.skip("the same files as of those")
    scenario = SCENARIOS[name]
    lines = run_python(KILL, tmp_path, name, effect, timeout=100).stdout.splitlines()
    assert lines
    wrong = []
    for line in lines:
        root = tmp_path / line.split()[0]
        try:
            manager(root, heartbeat=None).close()
            join_sweep()
            if leftovers(root):  # whose intent cannot be read is let live for a while
                age(root)
                manager(root, heartbeat=None).close()
                join_sweep()
            check(scenario, root, "killed")
            assert_usable(root)
        except (AssertionError, ckptmgr.CheckpointError) as exc:
            wrong.append(f"{line}: {first_line(exc)}")
    assert wrong == []


# -- what is found must be told, whatever storage says ------------------------------------------


@pytest.mark.parametrize("fault", FAULTS)
def test_a_resume_passes_over_damage_although_it_cannot_be_put_on_record(fault, tmp_path):
    scenario, template = MarkDamaged(), tmp_path / "template"
    scenario.prepare(template)
    for operation in operations_of(scenario, template, tmp_path / "count"):
        root = tmp_path / str(operation.number)
        shutil.copytree(template, root)
        store = faulty(root)
        with scenario.open(root, store) as found:
            store.arm(FAULTS[fault](operation.number))
            scenario.act(found)  # step 1 is whole, and nothing keeps it from being read


@pytest.mark.parametrize("fault", FAULTS)
def test_a_heartbeat_that_found_torn_copies_says_so_although_it_cannot_mark_the_steps(
    fault, tmp_path
):
    scenario, template = TornHeartbeat(), tmp_path / "template"
    scenario.prepare(template)
    operations = operations_of(scenario, template, tmp_path / "count")
    marking = [op for op in operations if layout.suspect_name(1) in (op.path, op.target)]
    marking += [op for op in operations if op.path == os.path.dirname(layout.suspect_name(1))]
    assert marking
    told = {}
    for operation in marking:
        root = tmp_path / str(operation.number)
        shutil.copytree(template, root)
        store = faulty(root)
        with scenario.open(root, store) as found:
            assert found.restore(step=1)
            store.arm(FAULTS[fault](operation.number))
            with pytest.raises(ckptmgr.CheckpointError) as caught:
                scenario.act(found)
            told[f"{operation.number} {operation.name}"] = (
                f"{caught.value} {caught.value.__cause__}"
            )
        check(scenario, root, caught.value)
    assert [what for what, text in told.items() if "torn" not in text and "'w'" not in text] == []


@pytest.mark.parametrize(
    "error",
    ["EIO", "ENOSPC", "EDQUOT", "EACCES", "EROFS", "ESTALE", "ETIMEDOUT", "EMFILE", "ENOMEM"],
)
def test_whatever_errno_storage_answers_the_save_fails_with_it_and_the_next_works(error, tmp_path):
    code = getattr(errno, error)
    store = faulty(tmp_path)
    with manager(tmp_path, store=store, heartbeat=None) as found:
        found.save(1, tree(1)).result()
        for number, where in enumerate(("make_dir", "write_file", "arrays", "sync_tree", "rename")):
            store.arm(Fault(where, error=code))
            with pytest.raises(ckptmgr.SaveFailed) as caught:
                found.save(2 + number, tree(2)).result(LIMIT)
            assert os.strerror(code) in str(caught.value)
            assert caught.value.__cause__.errno == code
            assert found.latest_step() == 1 + number
            assert leftovers(tmp_path) == []
            found.save(2 + number, tree(2 + number)).result(LIMIT)
            assert number_of(found.restore()) == 2 + number
