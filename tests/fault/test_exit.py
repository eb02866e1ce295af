"""How a process ends while a save is in flight, or after one that failed.

Every ending is the true end of an interpreter. They share one parent that has imported what they
need; each is forked from it before anything of it is used, and goes on to the end of the script.
"""

import json
import os
import pathlib
import signal
from dataclasses import dataclass

import pytest

from tests.fault.common import LIMIT, assert_state, numbers, reader, swept
from tests.support import run_python

PARENT = """
    import atexit, faulthandler, gc, json, os, pathlib, sys, threading
    import absl.app, jax, jax.numpy, numpy, ckptmgr
    from ckptmgr.testing import Fault, Hold
    from tests.fault import common

    base = pathlib.Path(sys.argv[1])
    # Its thread does not live in a forked child, whose end would wait for it: time is kept outside.
    faulthandler.cancel_dump_traceback_later()
    gc.freeze()  # a collection in a fork would copy every page: 0.1 s each
    names, ends, text = {}, {}, None

    def end_of_one():
        pid, status = os.wait()
        ends[names.pop(pid)] = os.waitstatus_to_exitcode(status)

    for name, found in json.loads((base / "scripts").read_text()).items():
        pid = os.fork()
        if pid == 0:
            text, root = found, str(base / name)
            for number, kind in ((1, "stdout"), (2, "stderr")):
                file = os.open(base / f"{name}.{kind}", os.O_CREAT | os.O_WRONLY)
                os.dup2(file, number)
                os.close(file)
            sys.argv = [name]
            break
        names[pid] = name
        if len(names) == 2:
            end_of_one()
    else:
        while names:
            end_of_one()
        (base / "ends").write_text(json.dumps(ends))
        os._exit(0)
    exec(compile(text, name, "exec"))
    """

# Step 1 is there. The save of step 2 waits until the main thread has left the user's code.
BEGIN = """
atexit.register(lambda: print("an exit handler of the user ran"))
store = common.faulty(root)
manager = common.manager(root, store=store)
manager.save(1, common.state(1)).result()

def when_the_main_thread_is_through():
    threading.main_thread().join()
    hold.release()

hold = Hold("arrays")
threading.Thread(target=when_the_main_thread_is_through, daemon=True).start()
print("text of the user, not flushed")
"""

HELD = BEGIN + "store.arm(hold)\nhandle = manager.save(2, common.state(2))\n"
LOST = BEGIN + ("store.arm(hold, Fault('sync_tree'))\nhandle = manager.save(2, common.state(2))\n")
FAILED = BEGIN + "store.arm(Fault('sync_tree'))\nhandle = manager.save(2, common.state(2))\n"
USER_THREAD = """
def work():
    threading.main_thread().join()
    manager.save(3, common.state(3))
threading.Thread(target=work).start()
"""
ENDINGS = {  # how the script ends -> its status
    "end of file": ("", 0),
    "exit 0": ("sys.exit(0)", 0),
    "exit 3": ("sys.exit(3)", 3),
    "exception": ("raise ValueError('train')", 1),
    "interrupt": ("raise KeyboardInterrupt", -signal.SIGINT),
    "absl": ("absl.app.run(lambda argv: None)", 0),
    "absl exit 3": ("absl.app.run(lambda argv: 3)", 3),
    "user thread": (USER_THREAD, 0),
    "dropped": ("del manager, handle", 0),
    "context": ("with manager: pass", 0),
    "closed at exit": ("atexit.register(manager.close)", 0),
}
TOLD = {
    "result": "try: handle.result()\nexcept ckptmgr.SaveFailed: print('told')\n",
    "staged": "handle.join()\ntry: handle.staged()\nexcept ckptmgr.SaveFailed: print('told')\n",
    "wait": "try: manager.wait()\nexcept ckptmgr.SaveFailed: print('told')\n",
    "check": "handle.join()\ntry: manager.check()\nexcept ckptmgr.SaveFailed: print('told')\n",
    "close": "try: manager.close()\nexcept ckptmgr.SaveFailed: print('told')\n",
    "save": "try: manager.save(3, {})\nexcept ckptmgr.SaveFailed: print('told')\n",
}
AGAIN = 12  # a thread that the end of the interpreter cuts short aborts the process now and then
OPEN_FILE = """
log = open(root + ".log", "w")
log.write("the last line of the user's log")
def uses_it():
    return log
"""
TWO_MANAGERS = """
other_store = common.faulty(root + " other")
other = common.manager(root + " other", store=other_store)
other_store.arm(Fault("sync_tree"))
other.save(7, common.state(7))
"""
NEVER = """
store = common.faulty(root)
manager = common.manager(root, store=store, coordination=ckptmgr.Coordination(deadline_seconds=0.5))
manager.save(1, common.state(1)).result()
store.arm(Hold("arrays"))
manager.save(2, common.state(2))
"""
# `context` waits inside the user's code, so its save must not wait for the end of that.
SCRIPTS = {
    **{f"held {name}": HELD + end for name, (end, _) in ENDINGS.items() if name != "context"},
    "held context": HELD + "hold.release()\n" + ENDINGS["context"][0],
    "held os._exit": HELD + "assert hold.reached.wait(common.LIMIT)\nos._exit(0)",
    **{
        f"lost {name}": LOST + end
        for name, (end, _) in ENDINGS.items()
        if name not in ("context", "closed at exit", "user thread")
    },
    "lost user thread": LOST + USER_THREAD.replace("manager.save(3, common.state(3))", "pass"),
    **{f"told {name}": FAILED + told for name, told in TOLD.items()},
    "told exit 3": FAILED + TOLD["result"] + "sys.exit(3)",
    "open file": LOST + OPEN_FILE,
    "two lost": LOST + TWO_MANAGERS,
    "never": NEVER,
    **{f"again {number}": HELD + "sys.exit(3)" for number in range(AGAIN)},
    "save at exit": "atexit.register(lambda: manager.save(3, common.state(3)))\n" + HELD,
}


@dataclass
class End:
    status: int
    stdout: str
    stderr: str
    root: pathlib.Path

    @property
    def last_line(self):
        return self.stderr.rstrip("\n").rpartition("\n")[2]


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """Every script, run once, two at a time."""
    base = tmp_path_factory.mktemp("ends")
    (base / "scripts").write_text(json.dumps(SCRIPTS))
    run_python(PARENT, base, env={"PYTHONUNBUFFERED": None}, timeout=100)
    found = json.loads((base / "ends").read_text())
    return {
        name: End(
            status,
            (base / f"{name}.stdout").read_text(),
            (base / f"{name}.stderr").read_text(),
            base / name,
        )
        for name, status in found.items()
    }


@pytest.mark.parametrize("name", ENDINGS)
def test_a_save_in_flight_is_committed_however_the_process_ends(name, ends):
    end = ends[f"held {name}"]
    assert end.status == ENDINGS[name][1], end.stderr
    steps = (1, 2, 3) if name == "user thread" else (1, 2)
    with reader(end.root) as found:
        assert numbers(found) == steps
        for step in steps:
            assert_state(found.restore(step=step), step)
    assert "CHECKPOINT LOST" not in end.stderr
    tracebacks = {"exception": 1, "interrupt": 1}
    assert end.stderr.count("Traceback") == tracebacks.get(name, 0), end.stderr
    assert "an exit handler of the user ran" in end.stdout
    assert "text of the user, not flushed" in end.stdout


def test_a_process_that_ends_without_any_exit_handler_leaves_the_earlier_step(ends):
    end = ends["held os._exit"]
    assert end.status == 0
    with swept(end.root) as found:
        assert numbers(found) == (1,)
        assert_state(found.restore(), 1)
        found.save(2, {"a": 1}).result(LIMIT)


@pytest.mark.parametrize("name", [name[5:] for name in SCRIPTS if name.startswith("lost ")])
def test_a_failed_save_that_nobody_asked_about_is_the_last_line_and_not_success(name, ends):
    end = ends[f"lost {name}"]
    assert end.status not in (0, None), end.stderr
    assert end.last_line.startswith("ckptmgr: CHECKPOINT LOST: "), end.stderr
    assert "step 2" in end.last_line and "Input/output error" in end.last_line
    assert "an exit handler of the user ran" in end.stdout
    assert "text of the user, not flushed" in end.stdout
    if name == "exception":
        assert "ValueError: train" in end.stderr
    assert numbers(reader(end.root)) == (1,)


def test_the_end_of_the_interpreter_never_cuts_the_thread_of_a_save_short(ends):
    again = [ends[f"again {number}"] for number in range(AGAIN)]
    assert [end.status for end in again] == [3] * AGAIN, [end.stderr for end in again]
    assert {numbers(reader(end.root)) for end in again} == {(1, 2)}


@pytest.mark.parametrize("name", TOLD)
def test_a_failure_that_was_told_does_not_change_the_status(name, ends):
    end = ends[f"told {name}"]
    assert "told" in end.stdout.splitlines()
    assert end.status == 0, end.stderr
    assert "CHECKPOINT LOST" not in end.stderr


def test_a_failure_that_was_told_leaves_the_status_of_the_user(ends):
    assert ends["told exit 3"].status == 3
    assert "CHECKPOINT LOST" not in ends["told exit 3"].stderr


def test_a_file_that_the_user_left_open_is_written_although_a_save_was_lost(ends):
    end = ends["open file"]
    assert end.status == 1 and "CHECKPOINT LOST" in end.last_line
    log = end.root.with_name(end.root.name + ".log").read_text()
    assert log == "the last line of the user's log"


def test_the_last_line_names_every_lost_save(ends):
    end = ends["two lost"]
    assert end.status == 1
    assert "step 2" in end.last_line and "step 7" in end.last_line


def test_a_save_that_never_ends_is_given_up_after_the_deadline(ends):
    end = ends["never"]
    assert end.status == 1
    assert end.last_line.startswith("ckptmgr: CHECKPOINT LOST: ")
    assert "step 2" in end.last_line and "0.5 s" in end.last_line
    assert numbers(reader(end.root)) == (1,)


def test_a_save_in_an_exit_handler_is_committed_or_told_to_be_lost(ends):
    end = ends["save at exit"]
    if 3 in numbers(reader(end.root)):
        assert_state(reader(end.root).restore(step=3), 3)
        assert end.status == 0
    else:
        assert "step 3" in end.stderr and end.status != 0


FORK = """
    import os, sys
    import jax, jax.numpy, numpy, ckptmgr
    from ckptmgr.engine import worker
    from ckptmgr.testing import Fault, Hold
    from tests.fault import common

    root = sys.argv[1]
    store = common.faulty(root)
    manager = common.manager(root, store=store)
    manager.save(1, common.state(1)).result()

    def forked(act):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            act()
            worker._at_exit()  # all of ours; JAX's own handlers crash in a forked child
            sys.stdout.flush()
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print("child ended with", status, flush=True)

    def in_child():
        for name, call in {
            "save": lambda: manager.save(3, {}),
            "wait": manager.wait,
            "check": manager.check,
            "restore": manager.restore,
            "delete": lambda: manager.delete(1),
        }.items():
            try:
                call()
            except ckptmgr.ManagerClosed as exc:
                print(name, str(os.getpid()) in str(exc))
        print("steps", common.numbers(manager))
        manager.close()
        with manager:
            pass

    hold = Hold("arrays")
    store.arm(hold)
    handle = manager.save(2, common.state(2))
    assert hold.reached.wait(common.LIMIT)
    forked(in_child)
    print("done", handle.done, common.numbers(manager))
    hold.release()
    handle.result(common.LIMIT)
    common.assert_state(manager.restore(step=2), 2)

    store.arm(Fault("sync_tree"))
    failed = manager.save(3, common.state(3))
    failed.join(common.LIMIT)
    forked(lambda: None)  # the failure is the parent's to tell
    try:
        manager.close()
    except ckptmgr.SaveFailed as exc:
        print("parent was told of step", exc.step)
    """


def test_a_forked_child_neither_saves_nor_closes_nor_tells_for_its_parent(tmp_path):
    done = run_python(FORK, tmp_path)
    assert done.stdout.splitlines() == [
        "save True",
        "wait True",
        "check True",
        "restore True",
        "delete True",
        "steps (1,)",
        "child ended with 0",
        "done False (1,)",
        "child ended with 0",
        "parent was told of step 3",
    ]
    assert "CHECKPOINT LOST" not in done.stderr
    assert sorted(name for name in os.listdir(tmp_path) if name != "_ckptmgr") == ["1", "2"]


WAIT_IN_CHILD = """
    import os, signal, sys
    import jax, jax.numpy, numpy, ckptmgr
    from ckptmgr.testing import Hold
    from tests.fault import common

    hold = Hold("arrays")
    manager = common.manager(sys.argv[1], store=common.faulty(sys.argv[1], hold))
    handle = manager.save(2, common.state(2))
    assert hold.reached.wait(common.LIMIT)
    pid = os.fork()
    if pid == 0:
        signal.alarm(5)  # the child must not wait for ever for a thread it does not have
        try:
            handle.result()
        except ckptmgr.ManagerClosed:
            os._exit(0)
        os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    hold.release()
    manager.close()
    """


def test_a_forked_child_does_not_wait_for_ever_for_a_save_of_its_parent(tmp_path):
    assert run_python(WAIT_IN_CHILD, tmp_path).stdout.split() == ["0"]
