"""Faults of processes and of storage, for scripts/reliability.py: kills, no room, other writers."""

import os
import random
import resource
import signal
import subprocess
import sys
import time

import crash_loop
from reliability_faults import Place, Tally
from reliability_systems import KEEP, same, state

LIMIT = 30.0  # seconds, for a process that should end at once
MIB = 2**20

# -- a process that is killed ---------------------------------------------------------------------


def train(place: Place, pipe: int) -> None:
    """Saves step after step in the background, telling which are durable, until killed."""
    manager = place.system.open(place.root, KEEP)
    steps = place.system.steps(place.root)
    step = max(steps, default=0)
    told = step
    while True:
        step += 1
        place.system.save(manager, step, state(step))
        if step % 3 == 0:  # the others are on their way when the next one is ordered
            place.system.wait(manager)
            told = step
            os.write(pipe, f"durable {told}\n".encode())


def look(place: Place) -> dict:
    """Every step that is listed, and what a resume gets."""
    wrong = []
    listed = place.system.steps(place.root)
    for step in listed:
        try:
            if not same(place.system.restore(place.root, step, state(step)), state(step)):
                wrong.append(step)
        except Exception as exc:
            wrong.append(f"{step}: {type(exc).__name__}")
    try:
        step, found = place.system.resume(place.root, state(1))
        resumed = step if same(found, state(step)) else -1
    except Exception:
        resumed = -1
    return {"listed": listed, "wrong": wrong, "resumed": resumed}


def kills(place: Place) -> Tally:
    """SIGKILL at a random moment of a process that saves; then another one looks."""
    tally, rng, durable = Tally(), random.Random(place.seed), 0
    for _ in range(10 * place.scale):
        ours, theirs = os.pipe()
        pid = crash_loop.fork(lambda end=theirs: train(place, end), close=ours)
        os.close(theirs)
        lines = crash_loop.Lines(ours)
        lines.wait_for("durable")
        time.sleep(rng.uniform(0, 0.3))  # the moment of death, not a wait
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        lines.rest()
        durable = max([durable, *(int(line.split()[1]) for line in lines.all)])
        seen = crash_loop.fork_and_ask(lambda: look(place))
        good = [s for s in seen["listed"] if s not in seen["wrong"]]
        tally.add(
            seen["resumed"] >= durable,
            lost=not any(step >= durable for step in good),
            wrong=sum(isinstance(step, int) for step in seen["wrong"]),
            undetected=sum(isinstance(step, int) for step in seen["wrong"]),
        )
    return tally


# -- no room --------------------------------------------------------------------------------------


def try_to_save(system, manager, step: int, words: int) -> bool:
    """Whether it went well, as far as the caller is told."""
    try:
        system.save(manager, step, state(step, words))
        system.wait(manager)
    except Exception:
        return False
    return True


def no_room(place: Place, small: int, large: int, limit, unlimit) -> dict:
    """A save that fits, one that does not, and one more when there is room again."""
    system, root = place.system, place.root
    manager = system.open(root)
    first = try_to_save(system, manager, 1, small)
    limit()
    told = not try_to_save(system, manager, 2, large)
    unlimit()
    after = try_to_save(system, manager, 3, small)
    try:
        kept = same(system.restore(root, 1, state(1, small)), state(1, small))
    except Exception:
        kept = False
    try:
        step, found = system.resume(root, state(3, small))
        resumed = step == 3 and same(found, state(3, small))
    except Exception:
        resumed = False
    return {"first": first, "told": told, "after": after, "kept": kept, "resumed": resumed}


def count_room(tally: Tally, seen: dict) -> None:
    note = ", ".join(name for name, good in seen.items() if not good)
    tally.add(
        all(seen.values()),
        lost=not seen["kept"],
        undetected=not seen["told"],
        note=note and f"not {note}",
    )


def disk_full(place: Place) -> Tally:
    """A file system of 32 MiB with a step of 4 MiB on it, and a save of 40 MiB."""
    tally = Tally()
    for _ in range(1 if place.scale == 1 else 3):
        os.makedirs(place.root, exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "reliability", place.root]
        done = subprocess.run(mount, capture_output=True, text=True)
        if done.returncode != 0:
            raise NotImplementedError(f"a small file system cannot be mounted: {done.stderr}")
        try:
            run = Place(place.system, f"{place.root}/run", place.scale)
            act = lambda run=run: no_room(run, MIB, 10 * MIB, lambda: None, lambda: None)  # noqa: E731
            count_room(tally, crash_loop.fork_and_ask(act))
        finally:
            subprocess.run(["umount", "-l", place.root], check=True)
    return tally


def file_limit(place: Place) -> Tally:
    """A limit on the size of files (EFBIG) that a save of 16 MiB exceeds."""
    tally = Tally()
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    for number, limit in enumerate([64 * 1024, MIB, 4 * MIB][: place.scale]):
        run = Place(place.system, f"{place.root}/{number}", place.scale)
        act = lambda run=run, limit=limit: no_room(  # noqa: E731
            run,
            MIB // 4,
            4 * MIB,
            lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard)),
            lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard)),
        )
        count_room(tally, crash_loop.fork_and_ask(act))
    return tally


# -- a background save that fails -----------------------------------------------------------------

ENDINGS = {
    "the next save": "system.save(manager, 3, state(3))",
    "waiting": "system.wait(manager)",
    "closing": "manager.close()",
    "the end of the process": "pass",
}

FAILING = """
import resource, sys, time
sys.path[:0] = {path!r}
from reliability_systems import SYSTEMS, state
system = SYSTEMS[{name!r}]
manager = system.open({root!r})
system.save(manager, 1, state(1))
system.wait(manager)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
system.save(manager, 2, state(2, 1 << 20))
{ending}
"""


def unasked_failures(place: Place) -> Tally:
    """A save fails in the background: does the process come to know, and not end with success?"""
    tally = Tally()
    for number, (ending, text) in enumerate(ENDINGS.items()):
        root = f"{place.root}/{number}"
        name = "ckptmgr" if place.system.name == "ckptmgr" else "orbax"
        script = FAILING.format(path=sys.path[:2], name=name, root=root, ending=text)
        command = [sys.executable, "-c", script]
        try:
            status = subprocess.run(command, capture_output=True, timeout=LIMIT).returncode
        except subprocess.TimeoutExpired:
            status = None
        kept = same(place.system.restore(root, 1, state(1)), state(1))
        note = f"the process ends with success, at {ending}" if status == 0 else ""
        if status is None:
            note = f"the process does not end within {LIMIT:.0f} s, at {ending}"
        tally.add(bool(status) and kept, lost=not kept, undetected=status == 0, note=note)
    return tally


# -- two writers ----------------------------------------------------------------------------------


def write_seven(place: Place, number: int, ready: int, go: int, out: int) -> None:
    manager = place.system.open(place.root)
    os.write(ready, b"r")
    os.read(go, 1)
    said = "won"
    try:
        if manager.latest_step() == 7:
            said = "told"
        else:
            place.system.save(manager, 7, state(number))
            place.system.wait(manager)
    except Exception:
        said = "told"
    os.write(out, f"{number} {said}\n".encode())


def two_writers(place: Place) -> Tally:
    """Two processes save one step with other values at the same moment."""
    tally = Tally()
    for number in range(4 * place.scale):
        run = Place(place.system, f"{place.root}/{number}", place.scale)
        os.makedirs(run.root)
        said = race(run)
        winners = [n for n, word in said.items() if word == "won"]
        seen = crash_loop.fork_and_ask(lambda run=run: {"is": whose(run)})
        there = seen["is"]
        lost = sum(n != there for n in winners)  # told that it is saved, and it is not there
        holds = {0: "cannot be restored", -1: "has values of neither"}.get(there, "is one's")
        note = f"{len(winners)} told that it is saved, the step {holds}" if lost else ""
        if not winners:
            note = f"nobody told that it is saved, the step {holds}"
        good = there in winners and not lost
        tally.add(good, lost=lost, wrong=there < 0, undetected=lost, note=note)
    return tally


def race(run: Place) -> dict[int, str]:
    (ready_r, ready_w), (go_r, go_w), (out_r, out_w) = os.pipe(), os.pipe(), os.pipe()
    pids = []
    for number in (100, 200):
        act = lambda n=number: write_seven(run, n, ready_w, go_r, out_w)  # noqa: E731
        pids.append(crash_loop.fork(act, close=go_w))
    arrived = b""
    while len(arrived) < 2:
        arrived += os.read(ready_r, 2)
    os.write(go_w, b"go")
    for pid in pids:
        os.waitpid(pid, 0)
    os.close(out_w)
    lines = crash_loop.Lines(out_r)
    lines.rest()
    for end in (ready_r, ready_w, go_r, go_w):
        os.close(end)
    return {int(line.split()[0]): line.split()[1] for line in lines.all}


def whose(run: Place) -> int:
    """Whose values step 7 has as a whole; 0 if it cannot be restored, -1 if they are a mixture."""
    try:
        found = run.system.restore(run.root, 7, state(100))
    except Exception:
        return 0
    return next((number for number in (100, 200) if same(found, state(number))), -1)


CATALOGUE = {
    "SIGKILL while saving": kills,
    "disk full (ENOSPC)": disk_full,
    "limit on file sizes (EFBIG)": file_limit,
    "a background save that fails": unasked_failures,
    "two processes save one step at once": two_writers,
}
