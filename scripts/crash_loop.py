"""Kill a training process at random moments, again and again, and look what is left each time.

    python scripts/crash_loop.py --kills 1000 --seed 1

Each round starts a process that resumes from `restore_latest`, trains with jitted, donated steps,
and saves every step or two in the background; the modes of the copies, the drivers and syncing take
turns, heartbeats and replacements come now and then, old steps go by retention. The process tells
through a pipe of every save whose `result()` it has seen. It is killed by SIGKILL at a random
moment, of its start or of its work. Then another process looks at the directory:

  every step that was told of is there, unless retention had the right to drop it
  every step that is listed has exactly the values of that step, bit for bit
  the newest is at least the newest that was told of, and the next round resumes from it
  what the dead left is bounded, does not block, and is gone after a clean-up

A round is a fork of a process that has imported everything and has computed nothing. The exit
status is 0 only if nothing was lost, wrong or left.
"""

import argparse
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tree that this lies in

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import ckptmgr

SIZE = 4096
KEEP = 3
HEARTBEAT = 5
MODES = ("copy_on_write", "double_buffer", "sync")
LIMIT = 60.0  # seconds, for every wait that should be over soon
STARTS = 0.25  # share of the kills that hit the start of a process
SPAN = 0.4  # seconds after the first save in which the other kills fall
SWEEP_EVERY = 5  # rounds
BOUND = 16  # leftovers of the rounds between two clean-ups: two saves in flight each, and trash


# -- what is trained: whole numbers, so that every step's values can be told without JAX ----------


def advance(words: np.ndarray, step: int) -> np.ndarray:
    return words * np.uint32(1664525) + np.uint32(1013904223 + step)


def tree_of(words, xp, bfloat16):
    """Leaves of several types, all exact images of the words."""
    return {
        "words": words,
        "large": (words >> 9).astype(xp.float32),
        "small": (words[:256] >> 25).astype(bfloat16),
        "one": words[0],
    }


class Expected:
    """The values of every step from some step on, reckoned by numpy."""

    def __init__(self) -> None:
        self.words = {0: np.arange(SIZE, dtype=np.uint32)}

    def __call__(self, step: int) -> dict:
        for number in range(max(self.words) + 1, step + 1):
            self.words[number] = advance(self.words[number - 1], number)
        return tree_of(self.words[step], np, ml_dtypes.bfloat16)

    def go_on_from(self, oldest: int, newest: int) -> None:
        """Forgets what no step holds any more."""
        self(newest)
        self.words = {step: words for step, words in self.words.items() if step >= oldest}


class Place:
    """A data iterator: where it stands is part of every step."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def get_state(self) -> dict:
        return {"at": self.at}

    def set_state(self, state: dict) -> None:
        self.at = state["at"]


def problem_of(found: ckptmgr.Items, step: int, expected: dict) -> str:
    """What differs from the values of a step, "" if nothing does."""
    if found["data"] != {"at": 3 * step}:
        return f"step {step}: the iterator stands at {found['data']}"
    if sorted(found["state"]) != sorted(expected):
        return f"step {step}: leaves {sorted(found['state'])}"
    for name, right in expected.items():
        got = np.asarray(found["state"][name])
        if got.dtype != right.dtype or got.tobytes() != right.tobytes():
            return f"step {step}: leaf {name} has other values"
    return ""


# -- the process that is killed -------------------------------------------------------------------


def options_of(round: int) -> ckptmgr.Options:
    """Modes, drivers, compression and syncing take turns at different paces."""
    return ckptmgr.Options(
        snapshot=ckptmgr.Snapshot(mode=MODES[round % 3]),
        storage=ckptmgr.Storage(
            driver=("zarr", "zarr3")[round // 2 % 2],
            compression=(None, "zstd")[round // 4 % 2],
            durable=round % 4 == 0,
        ),
        heartbeat=ckptmgr.Heartbeat(every_saves=HEARTBEAT),
        retention=ckptmgr.KeepLast(KEEP),
        coordination=ckptmgr.Coordination(deadline_seconds=LIMIT),
    )


def train(root: str, round: int, pipe: int) -> None:
    """Trains until killed."""

    def tell(*words) -> None:
        os.write(pipe, (" ".join(map(str, words)) + "\n").encode())

    jitted = jax.jit(
        lambda tree, step: tree_of(
            tree["words"] * jnp.uint32(1664525) + jnp.uint32(1013904223) + step,
            jnp,
            jnp.bfloat16,
        ),
        donate_argnums=0,
    )
    tell("alive")
    manager = ckptmgr.CheckpointManager(root, options_of(round))
    place = Place()
    start = jax.jit(lambda: tree_of(jnp.arange(SIZE, dtype=jnp.uint32), jnp, jnp.bfloat16))
    latest = manager.restore_latest(ckptmgr.Items(state=jax.eval_shape(start), data=place))
    step = latest.step if latest else 0
    tree = latest.state["state"] if latest else start()
    tell("resumed", step, place.at, len(latest.skipped) if latest else 0)
    every = 1 + round % 2
    pending = []
    if latest and round % 3 == 0:  # a replacement, of the step that others rely upon
        pending.append(
            manager.save(step, ckptmgr.Items(state=tree, data=place), force=True, overwrite=True)
        )
    while True:
        step += 1
        tree = jitted(tree, jnp.uint32(step))
        place.at += 3
        if step % every == 0:
            pending.append(manager.save(step, ckptmgr.Items(state=tree, data=place)))
        while pending and pending[0].done:
            info = pending.pop(0).result()
            tell("durable", info.step, info.kind)


# -- the process that looks -----------------------------------------------------------------------


def leftovers(root: str) -> list[str]:
    """Everything below the root that belongs to no step."""
    found = [name for name in os.listdir(root) if ".orbax-checkpoint-tmp-" in name]
    for private in ("intents", "trash", "quarantine", "damaged", "suspect"):
        folder = Path(root, "_ckptmgr", private)
        if folder.is_dir():
            found += [f"{private}/{name}" for name in os.listdir(folder)]
    return sorted(found)


def look(root: str, sweep: bool, expected: Expected) -> dict:
    """What is there: the steps with their kinds, what is wrong with them, what is left."""
    left = leftovers(root)
    if sweep:
        ckptmgr.CheckpointManager(root, ckptmgr.Options(heartbeat=None)).close()
        for thread in threading.enumerate():
            if thread.name == "ckptmgr-sweep":
                thread.join(LIMIT)
    steps, wrong = {}, []
    with ckptmgr.CheckpointManager(root, ckptmgr.Options(read_only=True)) as reader:
        for info in reader.steps():
            steps[info.step] = info.kind
            try:
                problem = problem_of(reader.restore(step=info.step), info.step, expected(info.step))
            except ckptmgr.CheckpointError as exc:
                problem = f"step {info.step}: {exc}"
            wrong += [problem] if problem else []
    named = {int(name) for name in os.listdir(root) if name.isdigit()}
    wrong += [f"{step} has a step's name and is none" for step in sorted(named - set(steps))]
    after = leftovers(root) if sweep else []
    return {"steps": steps, "wrong": wrong, "left": left, "after": after}


# -- the process that kills -----------------------------------------------------------------------


@dataclass
class Tally:
    """What came of all rounds."""

    kills: int = 0
    told: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    moments: Counter = field(default_factory=Counter)
    in_a_save: int = 0
    most_left: int = 0
    newest: int = 0

    @property
    def good(self) -> bool:
        return not (self.lost or self.wrong or self.left or self.failed)


class Loop:
    def __init__(self, root: str, seed: int) -> None:
        self.root = root
        self.rng = random.Random(seed)
        self.tally = Tally()
        self.durable: dict[int, str] = {}  # told of and not yet seen to be dropped
        self.left: set[str] = set()
        self.expected = Expected()

    def round(self, number: int) -> None:
        said, moment = self._live_and_die(number)
        self.tally.kills += 1
        self.tally.moments[moment] += 1
        self._hear(number, said)
        sweep = number % SWEEP_EVERY == SWEEP_EVERY - 1
        seen = fork_and_ask(lambda: look(self.root, sweep, self.expected))
        self._judge(number, seen, sweep)

    def _live_and_die(self, number: int) -> tuple[list[str], str]:
        """Starts a process and kills it; gives the lines that it wrote, and when it died."""
        ours, theirs = os.pipe()
        pid = fork(lambda: train(self.root, number, theirs), close=ours)
        os.close(theirs)
        lines = Lines(ours)
        if self.rng.random() < STARTS:
            moment, first, span = "start", "alive", SPAN / 2
        else:
            moment, first, span = "work", "durable", SPAN
        lines.wait_for(first)
        time.sleep(self.rng.uniform(0, span))  # the moment of death, not a wait
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        lines.rest()
        if not os.WIFSIGNALED(status):
            self.tally.failed.append(f"round {number}: the process ended with {status}")
        return lines.all, moment

    def _hear(self, number: int, said: list[str]) -> None:
        for words in map(str.split, said):
            if words[0] == "durable":
                self.durable[int(words[1])] = words[2]
                self.tally.told += 1
            elif words[0] == "resumed":
                step, at, skipped = map(int, words[1:])
                if step != self.tally.newest or at != 3 * step or skipped:
                    self.tally.lost.append(
                        f"round {number} resumed from {step} (iterator {at}, {skipped} passed "
                        f"over) instead of {self.tally.newest}"
                    )

    def _judge(self, number: int, seen: dict, sweep: bool) -> None:
        there = {int(step): kind for step, kind in seen["steps"].items()}
        for step, kind in list(self.durable.items()):
            if step in there:
                self.durable[step] = there[step]  # it may have been replaced
                continue
            newer = [s for s in there if s > step]
            heartbeats = [s for s in newer if there[s] == "heartbeat"]
            if len(newer) < KEEP or (kind == "heartbeat" and not heartbeats):
                self.tally.lost.append(f"round {number}: step {step} ({kind}), there: {there}")
            del self.durable[step]
        self.tally.wrong += [f"round {number}: {text}" for text in seen["wrong"]]
        self.tally.in_a_save += bool(set(seen["left"]) - self.left)
        self.left = set(seen["after"] if sweep else seen["left"])
        self.tally.most_left = max(self.tally.most_left, len(seen["left"]))
        if len(seen["left"]) > BOUND or seen["after"]:
            self.tally.left.append(f"round {number}: {seen['after'] or seen['left']}")
        self.tally.newest = max(there, default=0)
        self.expected.go_on_from(min(there, default=0), self.tally.newest)


class Lines:
    """The lines that come through a pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._text = b""

    @property
    def all(self) -> list[str]:
        """The whole lines so far; one that was cut off does not count."""
        return self._text.decode().split("\n")[:-1]

    def wait_for(self, first: str) -> None:
        """Until a line begins with this word, or the other end is gone."""
        while not any(line.startswith(first) for line in self.all):
            if not select.select([self._fd], [], [], LIMIT)[0] or not self._read():
                return

    def rest(self) -> None:
        while self._read():
            pass
        os.close(self._fd)

    def _read(self) -> bool:
        new = os.read(self._fd, 65536)
        self._text += new
        return bool(new)


def fork(act, close: int) -> int:
    """Runs `act` in a child; one that returns or raises ends with status 9."""
    pid = os.fork()
    if pid == 0:
        try:
            os.close(close)
            act()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(9)
    return pid


def fork_and_ask(act) -> dict:
    """The JSON that `act` returns in a child."""
    ours, theirs = os.pipe()

    def answer() -> None:
        os.write(theirs, (json.dumps(act()) + "\n").encode())

    pid = fork(answer, close=ours)
    os.close(theirs)
    lines = Lines(ours)
    lines.rest()
    os.waitpid(pid, 0)
    if not lines.all:
        raise SystemExit("the process that looks failed, see above")
    return json.loads(lines.all[0])


def run(root: str, kills: int, seed: int, progress: bool) -> Tally:
    loop = Loop(root, seed)
    for number in range(kills):
        loop.round(number)
        if not loop.tally.good:
            break  # what lies there shows what happened
        if progress and (number + 1) % 50 == 0:
            print(f"{number + 1} kills, newest step {loop.tally.newest}", flush=True)
    return loop.tally


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=40, help="default: 40")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", help="an empty or new directory; default: a temporary one")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args()
    root = args.dir or tempfile.mkdtemp(prefix="ckptmgr-crash-")
    os.makedirs(root, exist_ok=True)
    if os.listdir(root):
        parser.error(f"{root} is not empty")
    began = time.monotonic()
    tally = run(root, args.kills, args.seed, progress=not args.json)
    seconds = time.monotonic() - began
    if args.json:
        print(json.dumps(vars(tally) | {"seconds": seconds}))
    else:
        report(tally, seconds)
    if tally.good and not args.dir:
        shutil.rmtree(root)
    elif not tally.good:
        print(f"what is there is in {root}", file=sys.stderr)
    return 0 if tally.good else 1


def report(tally: Tally, seconds: float) -> None:
    print(
        f"{tally.kills} kills in {seconds:.0f} s, {tally.moments['start']} of them in the first "
        f"moments of a process, {tally.in_a_save} in the middle of a save or a deletion\n"
        f"{tally.told} saves were told of, the newest step is {tally.newest}\n"
        f"committed steps lost: {len(tally.lost)}\n"
        f"wrong values: {len(tally.wrong)}\n"
        f"leftovers that stayed: {len(tally.left)} (at most {tally.most_left} between clean-ups)\n"
        f"processes that failed by themselves: {len(tally.failed)}"
    )
    for text in (*tally.lost, *tally.wrong, *tally.left, *tally.failed):
        print(f"  {text}")


if __name__ == "__main__":
    sys.exit(main())
