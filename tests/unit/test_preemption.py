"""Preemption notices, by real signals in real processes."""

import itertools
import json
import os
import pathlib
import signal
import socket

import pytest

from ckptmgr.engine.preemption import _ASK_ALL, _to_ask
from tests.support import finish, run_python, start_python

KILLED = -signal.SIGTERM

# Scripts that need no service: each runs in a fork of one parent, which has imported all it needs.
PARENT = """
    import faulthandler, gc, json, os, pathlib, signal, sys, threading, warnings
    from ckptmgr.engine import preemption
    from ckptmgr.engine.preemption import PreemptionWatch
    from ckptmgr.errors import InvalidOption

    def term():
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGTERM)

    def handler():
        return signal.getsignal(signal.SIGTERM)

    def install(new):
        return signal.signal(signal.SIGTERM, new)

    calls = []

    def mine(number, frame):
        calls.append((number, type(frame).__name__))

    base = pathlib.Path(sys.argv[1])
    # Its thread does not live in a forked child; there the alarm ends what hangs.
    faulthandler.cancel_dump_traceback_later()
    ends = {}
    for name, text in json.loads((base / "scripts").read_text()).items():
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            for number, kind in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(base / f"{name}.{kind}", os.O_CREAT | os.O_WRONLY), number)
            try:
                exec(compile(text, name, "exec"), globals())
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            sys.stdout.flush()
            os._exit(0)
        ends[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    (base / "ends").write_text(json.dumps(ends))
    """

SCRIPTS = {
    "notice": """
watch = PreemptionWatch()
print(watch.noticed(0), handler() is signal.SIG_DFL)
watch.start()
print(watch.noticed(1))
term()
print(watch.noticed(2), watch.noticed(3))
later = PreemptionWatch()
later.start()
print(later.noticed(1))
watch.stop()
print(watch.noticed(4))
""",
    "previous": """
install(mine)
watch = PreemptionWatch()
watch.start()
print(handler() is mine)
term()
print(watch.noticed(1), calls)
watch.stop()
print(handler() is mine)
term()
print(len(calls))
""",
    "ignored": """
install(signal.SIG_IGN)
watch = PreemptionWatch()
watch.start()
term()
print(watch.noticed(1))
watch.stop()
print(handler() is signal.SIG_IGN)
term()
print("goes on")
""",
    "default": """
watch = PreemptionWatch()
watch.start()
watch.stop()
print(handler() is signal.SIG_DFL)
term()
print("not reached")
""",
    "several": """
one, two = PreemptionWatch(), PreemptionWatch()
one.start()
ours = handler()
one.start()
two.start()
print(handler() is ours)
one.stop()
one.stop()
print(handler() is ours)
term()
print(two.noticed(1))
two.stop()
print(handler() is signal.SIG_DFL)
""",
    "on top": """
install(mine)
watch = PreemptionWatch()
watch.start()
ours, tops = handler(), []
def top(number, frame):
    tops.append(number)
    ours(number, frame)
install(top)
watch.stop()
print(handler() is top)
term()
print(watch.noticed(1), len(tops), len(calls))
watch.start()
term()
print(watch.noticed(1), len(tops), len(calls))
watch.stop()
print(handler() is top)
""",
    "on top, not calling ours": """
watch, other = PreemptionWatch(), PreemptionWatch()
watch.start()
install(mine)
other.start()
term()
print(watch.noticed(1), other.noticed(1), len(calls))
watch.stop()
other.stop()
print(handler() is mine)
""",
    "left behind": """
watch = PreemptionWatch()
watch.start()
ours = install(mine)
watch.stop()
install(ours)
term()
print("not reached")
""",
    "dropped": """
watch = PreemptionWatch()
watch.start()
del watch
gc.collect()
term()
print("not reached")
""",
    "started in a thread": """
watch = PreemptionWatch()
def start():
    try:
        watch.start()
    except InvalidOption as exc:
        print(exc)
thread = threading.Thread(target=start)
thread.start()
thread.join()
print(handler() is signal.SIG_DFL, watch.noticed(1))
other = PreemptionWatch()
other.start()
other.stop()
print(handler() is signal.SIG_DFL)
watch.start()
term()
print(watch.noticed(1))
""",
    "stopped in a thread": """
install(mine)
watch = PreemptionWatch()
watch.start()
thread = threading.Thread(target=watch.stop)
thread.start()
thread.join()
term()
print(watch.noticed(1), calls, handler() is mine)
""",
    "asked in a thread": """
watch = PreemptionWatch()
watch.start()
asked = threading.Thread(target=lambda: print(watch.noticed(1)))
term()
asked.start()
asked.join()
""",
    "a handler that comes back": """
watch = PreemptionWatch()
def closes(number, frame):
    print(watch.noticed(1))
    watch.stop()
install(closes)
watch.start()
with preemption._process.lock:  # as in the middle of a call
    term()
print(watch.noticed(2), handler() is closes)
""",
    "forked": """
watch = PreemptionWatch()
watch.start()
term()
print(watch.noticed(1))

def in_child():
    print(watch.noticed(2), handler() is signal.SIG_DFL)
    watch.stop()
    own = PreemptionWatch()
    own.start()
    print(own.noticed(2))
    term()
    print(own.noticed(3), watch.noticed(3))
    own.stop()
    term()

def fork():
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            in_child()
        finally:
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM)

fork()
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with two threads
thread = threading.Thread(target=fork)
thread.start()
thread.join()
print(watch.noticed(4))
""",
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """Every script, run once: its status and what it printed."""
    base = tmp_path_factory.mktemp("preemption")
    (base / "scripts").write_text(json.dumps(SCRIPTS))
    run_python(PARENT, base)
    statuses = json.loads((base / "ends").read_text())

    def end(name: str) -> tuple[int, list[str]]:
        errors = pathlib.Path(base / f"{name}.stderr").read_text()
        assert errors == "", errors
        return statuses[name], pathlib.Path(base / f"{name}.stdout").read_text().splitlines()

    return end


def test_a_signal_is_noticed_by_every_watch_and_stays_noticed(ends):
    assert ends("notice") == (0, ["False True", "False", "True True", "True", "True"])


def test_the_previous_handler_is_called_with_the_same_arguments_and_put_back(ends):
    assert ends("previous") == (0, ["False", "True [(15, 'frame')]", "True", "2"])


def test_a_signal_that_was_ignored_is_noticed_and_otherwise_still_ignored(ends):
    assert ends("ignored") == (0, ["True", "True", "goes on"])


def test_after_the_last_stop_a_signal_ends_the_process_as_before(ends):
    assert ends("default") == (KILLED, ["True"])


def test_watches_share_one_handler_and_the_last_gives_it_back(ends):
    assert ends("several") == (0, ["True", "True", "True", "True"])


def test_a_handler_installed_on_top_stays_and_ours_below_it_is_harmless(ends):
    assert ends("on top") == (0, ["True", "False 1 1", "True 2 2", "True"])


def test_a_watch_started_later_has_the_signal_whoever_took_it_meanwhile(ends):
    assert ends("on top, not calling ours") == (0, ["True True 1", "True"])


def test_a_handler_of_ours_that_somebody_puts_back_later_acts_as_the_one_before_it(ends):
    assert ends("left behind") == (KILLED, [])


def test_a_watch_that_was_dropped_swallows_no_signal(ends):
    assert ends("dropped") == (KILLED, [])


def test_a_watch_cannot_be_started_in_another_thread_and_says_what_to_do(ends):
    status, lines = ends("started in a thread")
    assert status == 0
    assert "main thread" in lines[0] and "make the manager there" in lines[0]
    assert lines[1:] == ["True False", "True", "True"]


def test_a_watch_stopped_in_another_thread_gives_the_handler_back_at_the_next_signal(ends):
    assert ends("stopped in a thread") == (0, ["False [(15, 'frame')] True"])


def test_a_notice_is_seen_in_every_thread(ends):
    assert ends("asked in a thread") == (0, ["True"])


def test_a_handler_of_the_user_may_ask_and_stop(ends):
    assert ends("a handler that comes back") == (0, ["True", "True True"])


def test_a_forked_child_inherits_no_notice_and_can_be_ended(ends):
    child = ["False True", "False", "True True", "True"]
    assert ends("forked") == (0, ["True", *child, *child, "True"])


def test_a_signal_from_another_process_is_noticed():
    child = start_python(
        """
        import itertools, os, threading
        from ckptmgr.engine.preemption import PreemptionWatch

        watch = PreemptionWatch()
        watch.start()
        print(os.getpid(), flush=True)
        pace = threading.Event()
        for step in itertools.count():  # under the watchdog
            if watch.noticed(step):
                break
            pace.wait(0.001)
        """
    )
    os.kill(int(child.stdout.readline()), signal.SIGTERM)
    finish(child)


# -- which steps JAX is asked for ---------------------------------------------------------------

# JAX takes a process that has not asked yet for one that is at step 0.
FORWARD = {
    "from 0": [0, 1, 2, 3, 4],
    "from 1": [1, 2, 3, 4],
    "resumed": [700, 701, 702, 703],
    "resumed late": [5_000_000, 5_000_001, 5_000_002],
    "strides": [0, 10, 20, 30, 40],
    "long strides": [10**6 * number for number in range(5)],
    "uneven": [3, 4, 900, 4 + 2 * _ASK_ALL, 5 + 2 * _ASK_ALL, 5 + 3 * _ASK_ALL, 9000],
}
BACK = {"rolled back": [7, 8, 9, 3, 4, 5], "two counts": [100, 0, 101, 1, 102, 2, 103, 3]}


class Job:
    """One process as JAX sees it: the last step it was asked for, and one that it answers yes."""

    def __init__(self, walk):
        self.walk = iter(enumerate(walk))
        self.last = 0

    def call(self, point=None):
        """The next step of the walk; whether JAX says yes."""
        index, step = next(self.walk)
        asked = list(_to_ask(self.last, step))
        assert asked[-1] == step and len(asked) <= _ASK_ALL
        self.last = step
        return index if point in asked else None


def told_at(walk, calls):
    """The index of the step at which a notice is due when the fastest has made so many calls."""
    return max(calls, 1) if walk[0] == 0 else calls


@pytest.mark.parametrize("walk", [*FORWARD.values(), *BACK.values()], ids=[*FORWARD, *BACK])
def test_a_notice_between_any_two_steps_is_told_at_the_second(walk):
    for before in range(len(walk)):
        job = Job(walk)
        for _ in range(before):
            job.call()
        point = job.last + 1
        told = [job.call(point) for _ in walk[before:]]
        assert next(index for index in told if index is not None) == told_at(walk, before)


@pytest.mark.parametrize("walk", FORWARD.values(), ids=FORWARD)
def test_processes_at_different_steps_are_told_at_the_same_one(walk):
    for one, two in itertools.product(range(len(walk)), repeat=2):
        jobs = [Job(walk), Job(walk)]
        for job, calls in zip(jobs, (one, two), strict=True):
            for _ in range(calls):
                job.call()
        point = max(job.last for job in jobs) + 1
        told = []
        for job, calls in zip(jobs, (one, two), strict=True):
            answers = [job.call(point) for _ in range(calls, len(walk))]
            told.append([index for index in answers if index is not None])
        assert told == [[told_at(walk, max(one, two))]] * 2


def test_steps_left_out_are_asked_for_too_since_others_may_have_asked_for_them():
    assert list(_to_ask(7, 8)) == [8]
    assert list(_to_ask(7, 11)) == [8, 9, 10, 11]
    assert len(list(_to_ask(7, 7 + _ASK_ALL))) == _ASK_ALL
    assert list(_to_ask(7, 8 + _ASK_ALL)) == [8, 8 + _ASK_ALL]


def test_the_same_step_again_asks_for_nothing_new():
    assert list(_to_ask(7, 7)) == [7]


# -- with JAX's own notice -----------------------------------------------------------------------

JAX = """
import itertools, os, signal, sys, threading
import jax
from ckptmgr.engine.preemption import PreemptionWatch

def initialize(rank=0, world=1):
    address = f"localhost:{sys.argv[1]}"
    jax.distributed.initialize(
        address, world, rank, coordinator_bind_address=address, shutdown_timeout_seconds=20
    )

def term():
    os.kill(os.getpid(), signal.SIGTERM)

def first(watch, steps, act=lambda step: None):
    '''The first step that is noticed; the watchdog ends a process where none is.'''
    pace = threading.Event()
    for step in steps:
        if watch.noticed(step):
            return step
        act(step)
        pace.wait(0.01)

def handler():
    return signal.getsignal(signal.SIGTERM)

watch = PreemptionWatch()
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


# Right after a signal JAX's own shutdown at exit may wait for its service for ever.
LEAVE = """
sys.stdout.flush()
os._exit(0)
"""


def run_with_jax(script: str) -> list[str]:
    return run_python(JAX + script + LEAVE, free_port()).stdout.splitlines()


def test_the_notice_of_jax_is_noticed_and_its_handler_left_alone():
    assert run_with_jax(
        """
initialize()
thread = threading.Thread(target=watch.start)
thread.start()
thread.join()
print(handler() is signal.SIG_DFL, watch.noticed(2**31 + 5000))
term()
steps = itertools.count(2**31 + 5010, 10)
print(first(watch, steps) is not None, watch.noticed(next(steps)))
watch.stop()
term()
print(handler() is signal.SIG_DFL, "JAX has the signal")
"""
    ) == ["True False", "True True", "True JAX has the signal"]


def test_with_the_service_of_jax_off_the_signal_is_noticed_as_without():
    assert run_with_jax(
        """
jax.config.update("jax_enable_preemption_service", False)
initialize()
watch.start()
print(watch.noticed(1))
term()
print(first(watch, itertools.count(2)) is not None)
watch.stop()
print(handler() is signal.SIG_DFL)
"""
    ) == ["False", "True", "True"]


def test_a_watch_older_than_the_service_hands_the_signal_over_to_it():
    assert run_with_jax(
        """
watch.start()
initialize()
print(watch.noticed(1))
term()
print(first(watch, itertools.count(2)) is not None)
watch.stop()
term()
print("JAX has the signal")
"""
    ) == ["False", "True", "JAX has the signal"]


def test_a_watch_stopped_right_after_the_service_began_leaves_it_the_signal():
    assert run_with_jax(
        """
watch.start()
initialize()
watch.stop()
term()
print("JAX has the signal")
"""
    ) == ["JAX has the signal"]


@pytest.mark.parametrize("begin", ["initialize(); watch.start()", "watch.start(); initialize()"])
def test_a_watch_takes_the_signal_over_when_the_service_is_shut_down(begin):
    assert run_with_jax(
        begin
        + """
print(watch.noticed(1))
jax.distributed.shutdown()
print(watch.noticed(2), handler() is signal.SIG_DFL)
term()
print(first(watch, itertools.count(3)) is not None)
watch.stop()
print(handler() is signal.SIG_DFL)
"""
    ) == ["False", "False False", "True", "True"]


def test_two_processes_notice_at_the_same_step_when_one_is_told():
    port = free_port()
    script = """
rank = int(sys.argv[2])
initialize(rank, 2)
watch.start()
act = lambda step: term() if (rank, step) == (1, 5050) else None
print(first(watch, itertools.count(5000, 10), act))
"""
    children = [start_python(JAX + script, port, rank) for rank in range(2)]
    told = [finish(child).stdout for child in children]
    assert told[0] == told[1] and int(told[0]) > 5050
