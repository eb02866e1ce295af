"""What the durability tests record and try: scenarios, what they promise, and a manager's answer.

A child runs the scenarios under strace, saying as it goes what may be where. For each directory
that a crash of the machine may leave (`tests.support.crashes`), `violations` starts a new manager
on it and tells which promise it breaks.
"""

import collections
import contextlib
import functools
import os
import pathlib
import random
import shutil

import jax.numpy as jnp
import numpy as np

import ckptmgr
from ckptmgr.core import layout
from ckptmgr.engine.store import Store
from ckptmgr.testing import TornStager
from tests.fault import common
from tests.support.crashes import Disk, write_tree
from tests.support.syscalls import Mark
from tests.support.trees import assert_same_leaves

ATTEMPT = "0123456789abcdef"
HARMED = -1  # the value of a step that the scenario itself damaged
UNLIKE = 10  # the value of a step that holds something else than `state`
PER_CLASS = 2  # states that differ only in what nobody reads
MOST = 150  # states of one scenario; with --soak there is no limit


# -- what is recorded: run by the child, which says what may be where ---------------------------
#
#   start            crashes are tried from here on
#   may STEP VALUE   from here on the step may be VALUE too; "none": not there
#   is STEP VALUE    from here on it is exactly that: save() was durable, or deletion returned
#   after STEP S V   it may be missing only where step S has the value V
#   suspect STEP     from here on the step is on record as suspect


def state(number):
    """As in the other tests, with an array too large to lie in the nodes of the database."""
    return {**common.state(number), "wide": np.full((20, 20), number, np.float32)}


def opened(root, exchange=True, durable=True, stager=None, **options):
    store = Store(root, durable=durable, exchange=exchange)
    storage = ckptmgr.Storage(durable=durable)
    wanted = ckptmgr.Options(storage=storage, **options)
    copies = stager(wanted) if stager is not None else None
    return ckptmgr.CheckpointManager(root, wanted, store=store, stager=copies)


def save(found, say, step, number, **how):
    say(f"may {step} {number}")
    found.save(step, state(number), **how).result()
    say(f"is {step} {number}")


def settle(root):
    """What was prepared by hand is on disk for good."""
    for base, _, files in os.walk(os.path.dirname(root)):
        for path in [*(os.path.join(base, file) for file in files), base]:
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def copy(source, target):
    """With plain calls that the recording understands."""
    pathlib.Path(target).write_bytes(pathlib.Path(source).read_bytes())


def first_save(root, say, durable=True):
    say("start")
    with opened(root, durable=durable) as found:
        save(found, say, 1, 1)


def retention(root, say):
    with opened(root, retention=ckptmgr.KeepLast(1)) as found:
        save(found, say, 1, 1)
        say("start")
        say("may 1 none")
        say("after 1 2 2")
        save(found, say, 2, 2)
        found.wait()


def overwrite(root, say, exchange=True):
    with opened(root, exchange) as found:
        save(found, say, 1, 1)
        save(found, say, 2, 20)
        say("start")
        save(found, say, 2, 21, overwrite=True)


def delete(root, say):
    with opened(root) as found:
        save(found, say, 1, 1)
        save(found, say, 2, 2)
        say("start")
        say("may 2 none")
        found.delete(2)
        say("deleted 2")


def truncate_after(root, say):
    with opened(root) as found:
        for step in (1, 2, 3):
            save(found, say, step, step)
        say("start")
        say("may 2 none")
        say("may 3 none")
        found.truncate_after(1)
        say("deleted 2")
        say("deleted 3")
        save(found, say, 2, 22)
        say("is 3 none")  # the sync of the save that came after


def sweep(root, say):
    with opened(root) as found:
        save(found, say, 1, 1)
    os.makedirs(f"{root}/{layout.trash_dir()}/7-ab/default")
    for path in (f"{layout.tmp_name(30, ATTEMPT)}/default", f"{layout.trash_dir()}/7-ab"):
        os.makedirs(f"{root}/{path}", exist_ok=True)
        pathlib.Path(f"{root}/{path}/data").write_bytes(b"leftover")
    common.write_dead_intent(root, 30, ATTEMPT)
    settle(root)
    say("start")
    with opened(root) as found:
        common.join_sweep()
        save(found, say, 2, 2)


def cut_in_two(root, say, whole=False):
    """A replacement by two renames was cut between them; a manager finishes or undoes it."""
    with opened(root) as found:
        save(found, say, 1, 1)
        save(found, say, 2, 20)
    common.write_dead_intent(root, 2, ATTEMPT, replaces=True)
    os.makedirs(f"{root}/{layout.trash_dir()}")
    if whole:
        shutil.copytree(f"{root}/2", f"{root}/{layout.tmp_name(2, ATTEMPT)}", copy_function=copy)
    os.rename(f"{root}/2", f"{root}/{layout.trash_name(2, ATTEMPT)}")
    settle(root)
    say("start")
    opened(root).close()
    common.join_sweep()


def heartbeat(root, say):
    with opened(root, heartbeat=ckptmgr.Heartbeat(every_saves=1)) as found:
        say("start")
        save(found, say, 1, 1)


def damaged(root, say):
    """A step is found damaged, put on record, and saved again."""
    with opened(root) as found:
        save(found, say, 1, 1)
        save(found, say, 2, 20)
        wanted = state(20)["wide"].tobytes()
        data = f"{root}/2/default/{layout.container(0)}/d"
        (file,) = (path for path in pathlib.Path(data).iterdir() if wanted in path.read_bytes())
        with open(file, "r+b") as raw:
            raw.seek(file.read_bytes().index(wanted))
            raw.write(b"?")
        settle(root)
        say(f"is 2 {HARMED}")
        say("start")
        say("may 2 none")
        assert found.restore_latest(None).step == 1
        save(found, say, 2, 21)


def suspect(root, say):
    """An audit finds torn copies: its step is not saved, and those before become suspect."""

    def torn(options):
        return TornStager(options.snapshot, "large")

    how = ckptmgr.Snapshot(mode="copy_on_write")
    beat = ckptmgr.Heartbeat(every_saves=2)
    large = {"large": jnp.ones((20, 20))}
    with opened(root, stager=torn, snapshot=how, heartbeat=beat) as found:
        say(f"may 1 {UNLIKE}")
        found.save(1, large).result()
        say(f"is 1 {UNLIKE}")
        say("start")
        with contextlib.suppress(ckptmgr.SaveFailed):
            found.save(2, large)
            raise AssertionError("the torn copy was not found")
        assert [info.status for info in found.steps()] == ["suspect"]
        say("suspect 1")


SCENARIOS = {
    "first save": first_save,
    "retention": retention,
    "overwrite by exchange": overwrite,
    "overwrite by two renames": functools.partial(overwrite, exchange=False),
    "delete": delete,
    "truncate_after": truncate_after,
    "sweep": sweep,
    "replacement cut in two": functools.partial(cut_in_two, whole=True),
    "replacement cut before": cut_in_two,
    "heartbeat": heartbeat,
    "damaged": damaged,
    "suspect": suspect,
    "not durable": functools.partial(first_save, durable=False),
}

CHILD = """
    import os, sys
    import jax, jax.numpy, numpy, ckptmgr
    from tests.fault.recorded import SCENARIOS
    from tests.support.syscalls import marker

    base, mark = sys.argv[1], marker(sys.argv[2])
    for name, scenario in SCENARIOS.items():
        os.mkdir(os.path.join(base, name))
        scenario(os.path.join(base, name, "run"), lambda text: mark(f"{name}|{text}"))
    """


# -- what must hold -----------------------------------------------------------------------------


class Promise:
    """What the marks up to some call allow."""

    def __init__(self, said, strict=False):
        self.allowed, self.after, self.suspects = {}, {}, set()
        self.strict = strict  # whether a deletion that returned stays one
        for text in said:
            self.hear(text)

    def hear(self, text):
        word, *args = text.split()
        step, *rest = [None if arg == "none" else int(arg) for arg in args] or [None]
        if word == "may":
            self.allowed.setdefault(step, {None}).add(rest[0])
        elif word == "is":
            self.allowed[step] = {rest[0]}
        elif word == "after":
            self.after[step] = tuple(rest)
        elif word == "suspect":
            self.suspects.add(step)
        elif word == "deleted" and self.strict:
            self.allowed[step] = {None}

    def key(self):
        allowed = frozenset((step, frozenset(values)) for step, values in self.allowed.items())
        return allowed, frozenset(self.after.items()), frozenset(self.suspects)

    def floor(self):
        """The newest step that must be there and good; -1 where there is none."""
        bad = {None, HARMED}
        sure = [s for s, v in self.allowed.items() if not v & bad and s not in self.after]
        return max((step for step in sure if step not in self.suspects), default=-1)


def content(tree, step):
    """The files of a step in a state."""
    prefix = f"run/{step}/"
    return frozenset(
        (path.removeprefix(prefix), data)
        for path, data in tree.items()
        if data is not None and path.startswith(prefix)
    )


def versions(recording, disk):
    """Content of a whole step -> its value."""
    found = {}
    for mark in recording.operations:
        if isinstance(mark, Mark) and mark.text.startswith("is "):
            step, value = mark.text.split()[1:]
            if value != "none":
                found[content(disk.everything(mark.end), step)] = int(value)
    return found


def kind_of(tree):
    """What makes a state another one for a reader: all but the bytes in nobody's directories."""
    paths = [path.split("/")[1:] for path in tree]
    intents = [data or b"" for path, data in tree.items() if layout.intents_dir() in path]
    tmp = [layout.parse_tmp(parts[0]) for parts in paths if len(parts) == 1]
    replaced = {str(found[0]) for found in tmp if found} - {p[0] for p in paths if len(p) == 1}
    if replaced and any(b'"replaces": true' in data for data in intents):
        return frozenset(tree.items())  # what is nobody's may become a step again
    seen = set()
    for path, data in tree.items():
        parts = path.split("/")[1:]
        aside = parts[:1] and layout.parse_tmp(parts[0])
        aside = aside or parts[1:2] in (["trash"], ["quarantine"])
        top = len(parts) <= (3 if parts[:1] == [layout.PRIVATE] else 1)
        if not aside or top or parts[-1] == layout.MANIFEST:
            seen.add((path, data))
    return frozenset(seen)


def states_to_try(recording, disk, soak=False, since="start", strict=False):
    """(state, promise) of each kind a few, in the order of the calls, from a mark on."""
    marks = [call for call in recording.operations if isinstance(call, Mark)]
    start = next(mark.end for mark in marks if mark.text.startswith(since))
    tried, count, kept = set(), collections.Counter(), []
    for found in disk.states(start, subsets=8 if soak else 2):
        said = tuple(mark.text for mark in marks if mark.end <= found.after.end)
        promise = Promise(said, strict)
        tree = frozenset(found.tree.items())
        kind = (kind_of(found.tree), promise.key())
        if (tree, promise.key()) in tried or (not soak and count[kind] >= PER_CLASS):
            continue
        tried.add((tree, promise.key()))
        count[kind] += 1
        kept.append((found, promise))
    if not soak and len(kept) > MOST:
        chosen = sorted(random.Random(0).sample(range(len(kept)), MOST))
        kept = [kept[index] for index in chosen]
    return kept


def wrong_with(found, promise, known, base):
    """What a new manager gets wrong on one state; "" where all promises hold."""
    base.mkdir()
    try:
        write_tree(found.tree, base)
        with common.swept(base / "run") as manager:
            look(manager, promise, known)
    except (AssertionError, ckptmgr.CheckpointError, OSError) as exc:
        said = f"{type(exc).__name__}: {exc}".splitlines()[0]
        return f"after {found.after!s:.160}: {found.how}: {said}"
    finally:
        shutil.rmtree(base)
    return ""


def look(manager, promise, known):
    """Raises unless the manager sees what was promised, and works."""
    there = {info.step: info.status for info in manager.steps()}
    values = {step: known.get(on_disk(manager, step)) for step in there}
    assert set(there) <= set(promise.allowed), f"steps {set(there)}"
    for step, allowed in promise.allowed.items():
        value = values.get(step)
        assert step not in there or value is not None, f"step {step} is listed and damaged"
        assert value in allowed, f"step {step} is {value}, not one of {allowed}"
        if value is None and step in promise.after:
            other, needed = promise.after[step]
            assert values.get(other) == needed, f"step {step} went before step {other} came"
    for step in promise.suspects:
        assert there[step] == "suspect", f"step {step} is suspect no more"
    if "suspect" not in there.values():
        latest(manager, promise, {s: v for s, v in values.items() if there[s] == "good"})
    goes_on(manager, {step: on_disk(manager, step) for step in there}, values)


def latest(manager, promise, values):
    """restore_latest gives the newest good step, and never values that were not saved."""
    found = manager.restore_latest(None)
    good = [step for step, value in values.items() if value != HARMED]
    assert (found.step if found else -1) == max(good, default=-1)
    assert found is None or found.step >= promise.floor()
    if found is not None:
        harmed = HARMED in set().union(*promise.allowed.values())
        assert harmed or found.skipped == (), f"passed over: {found.skipped}"
        if values[found.step] != UNLIKE:
            assert_same_leaves(found.state, state(values[found.step]))


def goes_on(manager, before, values):
    """The next saves work, of the newest step too, and change no other."""
    newest = max(before, default=1)
    manager.save(newest, state(70), overwrite=True).result(common.LIMIT)
    manager.save(90, state(90)).result(common.LIMIT)
    for step, number in ((newest, 70), (90, 90)):
        assert_same_leaves(manager.restore(step=step), state(number))
    left = {step: on_disk(manager, step) for step in before if step != newest}
    assert left == {step: before[step] for step in left}, "a save changed another step"


def on_disk(manager, step):
    return frozenset(common.contents(os.path.join(manager.directory, str(step))).items())


def violations(recording, base, *, first=False, **which):
    """(What goes wrong, how many states were tried); `first`: the first from the end is enough."""
    disk = Disk.of(recording)
    known = versions(recording, disk)
    wrong, tried = [], 0
    states = states_to_try(recording, disk, **which)
    for found, promise in reversed(states) if first else states:
        tried += 1
        if said := wrong_with(found, promise, known, base / str(tried)):
            wrong.append(said.replace(recording.base, ""))
            if first:
                break
    return wrong, tried
