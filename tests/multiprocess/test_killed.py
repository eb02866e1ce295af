"""A process of a job is killed, or stopped and later continued, at every point of a save.

The others end their save in time and say whom they miss; what was saved before stays. Process 0
also has JAX's coordination service: when it dies, JAX itself may end the others.
"""

import json
import signal
import threading
import time

import pytest

from tests.fault.common import numbers, swept
from tests.multiprocess.common import SCRIPT, finish_all, holds, leftovers, wanted
from tests.support.processes import start_job

pytestmark = pytest.mark.timeout(240)

DEADLINE = 4.0
AND_SOME = 6.0  # seconds beyond the deadline, on a busy machine

POINTS = {
    "1-open": (1, "pipeline._claim"),
    "1-write": (1, "op.name == 'arrays'"),
    "1-written": (1, "op.name == 'sync_path' and 'receipt' in op.path"),
    "1-readback": (1, "pipeline.read_back"),
    "1-publish": (0, "op.name == 'rename'"),
    "0-open": (0, "op.name == 'put_file'"),
    "0-write": (0, "op.name == 'arrays' and 'process_0' in op.path"),
    "0-complete": (0, "op.name == 'sync_tree' and layout.parse_tmp(op.path)"),
    "0-readback": (0, "pipeline.read_back"),
    "0-publish": (0, "op.name == 'rename'"),
}
"""The victim and the phase -> the process that strikes when it comes to this operation of its store,
or to this function."""

KILLED = [point for point in POINTS if point != "1-written"]

TRAP = (
    SCRIPT
    + """
coord.TELL_SECONDS = 0.5
coord.GRACE_SECONDS = coord.ANSWER_SECONDS = 1.0
deadline = json.loads(arguments[0])
lines = []

class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())

logging.getLogger("ckptmgr").addHandler(Lines())

def strike(victim, number):
    with open(f"{root}/struck", "w") as file:
        file.write(repr(time.monotonic()))
    if victim == rank:
        signal.pthread_kill(threading.get_ident(), number)  # this thread does nothing more
    else:
        os.kill(pid_of(victim), number)

def lay(point, trap, number, found):
    '''Strikes the victim once, when this process comes to a point of its next save.'''
    victim = int(point[0])
    if "op." in trap:
        struck = []
        def where(op):
            if not struck and eval(trap, globals(), {"op": op}):
                struck.append(op)
                strike(victim, number)
            return False
        found._store.arm(Fault(where))
        return
    owner, name = trap.split(".")
    owner = globals()[owner]
    right = getattr(owner, name)
    def wrong(*args, **how):
        setattr(owner, name, right)
        strike(victim, number)
        return right(*args, **how)
    setattr(owner, name, wrong)

def make(where, point):
    beat = Heartbeat(every_saves=1) if point.endswith("readback") else None
    return manager(where, deadline=deadline, heartbeat=beat)

def timed(call):
    began = time.monotonic()
    return {"error": told(call), "seconds": time.monotonic() - began}
"""
)

KILL = (
    TRAP
    + """
point, (striker, trap) = arguments[1], json.loads(arguments[2])
found = make(f"{root}/run", point)
found.save(1, state(1)).result()
meet()
if rank == striker:
    lay(point, trap, signal.SIGKILL, found)
handle = found.save(2, state(2)) if point[2:] != "readback" else None
seen = timed(lambda: handle.result() if handle else found.save(2, state(2)))
report(**seen, lines=lines, steps=numbers(found))
"""
)

STOP = (
    TRAP
    + """
victim = json.loads(arguments[1])
for point, (striker, trap) in json.loads(arguments[2]).items():
    where = f"{root}/{point}"
    found = make(where, point)
    found.save(1, state(1)).result()
    meet()
    if rank == striker:
        lay(point, trap, signal.SIGSTOP, found)
    lines.clear()
    seen = timed(lambda: found.save(2, state(2)).result())
    seen["lines"] = list(lines)
    if rank != victim:
        seen["steps"] = numbers(found)
        if point.endswith("swept"):  # while the victim may write there yet
            found = make(where, point)
            seen["swept"] = common.leftovers(where)
        os.kill(pid_of(victim), signal.SIGCONT)
    elif point.endswith("swept"):
        found = make(where, point)
    meet()
    seen["then"] = numbers(found)
    seen["first"] = holds(found.restore(step=1), 1)
    seen["second"] = holds(found.restore(step=2), 2) if 2 in seen["then"] else None
    meet()
    seen["again"] = saving(found, 2, overwrite=2 in seen["then"])
    seen["restored"] = holds(found.restore(step=2), 2)
    seen["third"] = saving(found, 3)
    found.close()
    found = make(where, point)
    seen["leftovers"] = common.leftovers(where)
    report(**{point: seen})
    meet()

leave_in_order()
"""
)


class Running:
    """A job; its processes' reports, their status and the time at which each has ended."""

    def __init__(self, text, root, *args, timeout=90):
        self.root = root
        args = [json.dumps(DEADLINE), *args]
        self.job = start_job(text, root, *args, devices=1, timeout=timeout)
        self.ended = {}
        for rank in range(2):
            threading.Thread(target=self._wait, args=(rank,), daemon=True).start()

    def _wait(self, rank):
        self.job.children[rank].wait()
        self.ended[rank] = time.monotonic()

    def finish(self, check):
        self.facts = self.job.finish(check=check)
        self.status = [child.returncode for child in self.job.children]


def start_kill(root, point):
    return Running(KILL, root, point, json.dumps(POINTS[point]))


def start_stop(root, victim):
    points = {point: how for point, how in POINTS.items() if int(point[0]) == victim}
    if victim == 1:
        points["1-swept"] = POINTS["1-write"]
    return Running(STOP, root, victim, json.dumps(points), timeout=150)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """All of them: those with stopped processes, which mostly wait, beside the others."""
    stopped = {v: start_stop(tmp_path_factory.mktemp(f"stopped{v}"), v) for v in (0, 1)}
    killed = {}
    try:
        for start in range(0, len(KILLED), 2):
            batch = KILLED[start : start + 2]
            for point in batch:
                killed[point] = start_kill(tmp_path_factory.mktemp("killed"), point)
            finish_all([killed[point] for point in batch], check=False)
    finally:
        finish_all(stopped.values())
    return killed, stopped


# -- killed -------------------------------------------------------------------------------------


@pytest.fixture(params=KILLED)
def killed(request, jobs):
    return request.param, jobs[0][request.param]


def test_the_others_end_in_time_when_a_process_is_killed(killed):
    point, job = killed
    struck = float((job.root / "struck").read_text())
    victim = int(point[0])
    assert job.status[victim] == -signal.SIGKILL
    assert job.ended[1 - victim] - struck < DEADLINE + AND_SOME


@pytest.mark.parametrize("point", [p for p in KILLED if p[0] == "1" and p != "1-publish"])
def test_who_waits_for_a_killed_process_says_so_and_names_it_in_the_end(point, jobs):
    seen = jobs[0][point].facts[0]
    phase = f"save.2/{point[2:]}"
    assert [kind for kind, _ in seen["error"]["chain"]] == ["SaveFailed", "PeerFailed"]
    assert "failed and left no step behind" in seen["error"]["chain"][0][1]
    assert (seen["error"]["phase"], seen["error"]["silent"]) == (phase, [1])
    assert "no answer from process 1" in seen["error"]["words"]
    assert DEADLINE * 0.9 < seen["seconds"] < DEADLINE + AND_SOME
    assert any(line.startswith(f"{phase}: waiting for process 1 since") for line in seen["lines"])
    assert seen["steps"] == [1]


@pytest.mark.parametrize("point", [p for p in KILLED if p[0] == "0"])
def test_without_process_0_the_others_name_it_or_are_ended_by_jax(point, jobs):
    job = jobs[0][point]
    if job.facts[1] is None:
        assert "Terminating process because the JAX distributed service" in job.job.stderr[1]
    else:
        assert job.facts[1]["error"]["silent"] == [0]
        assert job.facts[1]["steps"] == [1]


def test_a_step_that_is_being_published_needs_no_other_process(jobs):
    seen = jobs[0]["1-publish"].facts[0]
    assert seen["error"] == {}
    assert seen["steps"] == [1, 2]


def test_a_new_job_has_the_last_good_step_and_saves_the_same_one_again(killed):
    point, job = killed
    there = (1, 2) if point == "1-publish" else (1,)
    with swept(job.root / "run") as found:
        assert leftovers(job.root / "run") == []
        assert numbers(found) == there
        for step in there:
            assert holds(found.restore(step=step), 2, step)
        found.save(2, wanted(2, 2), overwrite=2 in there).result()
        assert holds(found.restore(), 2, 2)


# -- stopped ------------------------------------------------------------------------------------


@pytest.fixture(params=[*POINTS, "1-swept"])
def stopped(request, jobs):
    """The point, and what the one that stopped and the other reported of it."""
    victim = int(request.param[0])
    seen = [facts[request.param] for facts in jobs[1][victim].facts]
    return request.param, seen[victim], seen[1 - victim]


def test_the_others_name_a_process_that_has_stopped_within_the_deadline(stopped):
    point, _, other = stopped
    if point == "1-publish":
        assert other["error"] == {}, "nobody is needed any more"
        return
    assert other["error"]["silent"] == [int(point[0])]
    assert DEADLINE * 0.9 < other["seconds"] < DEADLINE + AND_SOME


def test_who_waits_for_a_stopped_process_says_so(stopped):
    point, _, other = stopped
    if point == "1-publish":
        return  # nobody waits for it
    said = f": waiting for process {point[0]} since"
    assert any(said in line for line in other["lines"])


def test_while_a_process_is_stopped_only_good_steps_are_there(stopped):
    point, _, other = stopped
    assert other["steps"] == ([1, 2] if point == "1-publish" else [1])


def test_a_process_that_goes_on_damages_nothing(stopped):
    _, *both = stopped
    for seen in both:
        assert seen["first"]
        assert seen["second"] in (True, None), "of step 2, where it is there"


def test_no_step_appears_of_which_any_process_was_told_that_there_is_none(stopped):
    _, *both = stopped
    for seen in both:
        if any("left no step behind" in text for _, text in seen["error"].get("chain", ())):
            assert all(each["then"] == [1] for each in both)
        if seen["error"] == {}:
            assert all(each["then"] == [1, 2] for each in both)


def test_a_stopped_process_other_than_0_takes_the_step_with_it(stopped):
    point, own, other = stopped
    if point[0] == "1" and point != "1-publish":
        assert own["error"]["words"] == other["error"]["words"]
        assert own["then"] == other["then"] == [1]


def test_after_a_process_has_gone_on_all_save_again(stopped):
    _, *both = stopped
    for seen in both:
        assert (seen["again"], seen["third"]) == ({}, {})
        assert seen["restored"]


def test_the_next_start_sweeps_what_was_left_to_a_stopped_process(stopped, jobs):
    point, own, other = stopped
    first = own if point[0] == "0" else other
    if point == "1-swept":
        assert first["swept"] == []
    else:
        assert first["leftovers"] == []
