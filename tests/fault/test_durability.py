"""Crashes of the machine: what every one that the recorded system calls allow leaves behind.

On each directory that a crash may leave, a new manager must keep the promises of the design: the
steps that were there are there bit for bit (I1, I7), or as an overwrite or a deletion that had
begun leaves them (I4, I5); nothing damaged is listed (I2) or read (I6); the next save works.
`docs/DURABILITY.md` says what each sync is for; the tests here drop each and see what breaks.
"""

import logging
import os

import pytest

import ckptmgr
from ckptmgr.core import layout
from tests.fault import common
from tests.fault.recorded import (
    CHILD,
    HARMED,
    SCENARIOS,
    state,
    states_to_try,
    versions,
    violations,
)
from tests.support import syscalls
from tests.support.crashes import Disk, without, write_tree
from tests.support.syscalls import MakeDir, Mark, Open, Rename, Sync, Write, paths_of
from tests.support.trees import assert_same_leaves

pytestmark = pytest.mark.timeout(300)

DURABLE = [name for name in SCENARIOS if name != "not durable"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Scenario -> what it did."""
    if syscalls.why_not():
        pytest.skip(syscalls.why_not())
    whole = syscalls.record(CHILD, tmp_path_factory.mktemp("recorded"))
    return {name: whole.below(name) for name in SCENARIOS}


@pytest.fixture(autouse=True)
def quiet():
    """Thousands of warnings about leftovers are no help in a report."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


# -- the promises -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DURABLE)
def test_whatever_a_crash_of_the_machine_leaves_every_promise_holds(name, recorded, tmp_path):
    wrong, tried = violations(recorded[name], tmp_path)
    assert wrong == [], f"{len(wrong)} of {tried} states"


@pytest.mark.soak
@pytest.mark.parametrize("name", DURABLE)
def test_in_every_state_of_the_model_every_promise_holds(name, recorded, tmp_path):
    wrong, tried = violations(recorded[name], tmp_path, soak=True)
    assert wrong == [], f"{len(wrong)} of {tried} states"


@pytest.mark.parametrize("name", ["delete", "truncate_after"])
def test_a_deletion_that_returned_is_not_undone_by_a_crash(name, recorded, tmp_path):
    wrong, tried = violations(recorded[name], tmp_path, since="deleted", strict=True)
    assert wrong == [], f"{len(wrong)} of {tried} states"


def put_aside_and_lost(recording):
    """The states that hold the files of the damaged step nowhere."""
    disk = Disk.of(recording)
    (harmed,) = (whole for whole, number in versions(recording, disk).items() if number == HARMED)
    files = {data for _, data in harmed}
    states = [found for found, _ in states_to_try(recording, disk)]
    return [f"{s.after}: {s.how}" for s in states if not files <= set(s.tree.values())]


def test_what_is_put_aside_is_never_lost(recorded):
    assert put_aside_and_lost(recorded["damaged"]) == []


def test_without_the_sync_of_the_root_what_is_put_aside_may_be_lost(recorded):
    order = Order(recorded["damaged"])
    aside = next(c for c in order.of(Rename) if "/quarantine/" in c.new)
    between = [c for c in order.of(Sync, order.root) if aside.end < c.begin < order.rename.begin]
    assert between, "there is no such sync"
    assert put_aside_and_lost(without(order.recording, between)) != []


# -- the order ----------------------------------------------------------------------------------


class Order:
    """Where the calls of one save lie in a recording."""

    def __init__(self, recording):
        self.recording, self.calls = recording, recording.operations
        self.root = os.path.join(recording.base, "run")
        onto = [c for c in self.of(Rename) if layout.parse_step(self.below(c.new)) is not None]
        self.rename = onto[-1]
        self.tmp = self.rename.old
        self.dirs = {c.path for c in self.calls if isinstance(c, MakeDir)} | {self.tmp}

    def below(self, path):
        return os.path.relpath(path, self.root)

    def of(self, kind, path=None):
        return [c for c in self.calls if isinstance(c, kind) and path in (None, *paths_of(c))]

    def synced(self, path):
        """The end of the last sync of a path before the rename."""
        return max(c.end for c in self.of(Sync, path) if c.end < self.rename.begin)

    def inside(self):
        """Every path in the temporary directory that is there at the rename."""
        tree = Disk.of(self.recording).everything(self.rename.begin - 1)
        paths = [os.path.join(self.recording.base, path) for path in tree]
        return [path for path in paths if syscalls.is_below(path, self.tmp)]


@pytest.mark.parametrize("name", ["first save", "heartbeat", "overwrite by exchange"])
def test_every_file_is_synced_after_its_last_write_and_before_the_rename(name, recorded):
    order = Order(recorded[name])
    files = [path for path in order.inside() if path not in order.dirs]
    assert len(files) > 10
    for path in files:
        writes = order.of(Write, path) + order.of(Rename, path)
        last = max((c.end for c in writes if c.end < order.rename.begin), default=0)
        assert last < order.synced(path) < order.rename.begin, path


@pytest.mark.parametrize("name", ["first save", "heartbeat", "overwrite by exchange"])
def test_directories_are_synced_bottom_up_and_the_manifest_comes_last(name, recorded):
    order = Order(recorded[name])
    manifest = os.path.join(order.tmp, layout.MANIFEST)
    for path in order.inside():
        if path != order.tmp:
            assert order.synced(path) < order.synced(os.path.dirname(path)), path
        if path not in (manifest, order.tmp):
            assert order.synced(path) < order.of(Open, manifest)[0].begin, path
    assert order.synced(manifest) < order.synced(order.tmp) < order.rename.begin


@pytest.mark.parametrize("name", ["first save", "heartbeat"])
def test_the_root_is_synced_after_the_rename_and_before_the_save_is_said_to_be_durable(
    name, recorded
):
    order = Order(recorded[name])
    said = next(c for c in order.of(Mark) if c.text.startswith("is "))
    syncs = [c for c in order.of(Sync, order.root) if c.begin > order.rename.end]
    assert syncs and syncs[0].end < said.begin


# -- without ------------------------------------------------------------------------------------


def test_not_durable_syncs_nothing(recorded):
    assert not any(isinstance(c, Sync) for c in recorded["not durable"].operations)
    assert any(isinstance(c, Rename) for c in recorded["not durable"].operations)


def test_not_durable_loses_nothing_in_a_crash_of_the_process(recorded, tmp_path):
    wrong, _ = violations(recorded["not durable"], tmp_path)
    assert [said for said in wrong if "everything is there" in said] == []


def test_not_durable_may_lose_or_damage_the_newest_step_but_never_gives_wrong_values(
    recorded, tmp_path
):
    recording = recorded["not durable"]
    done = max(c.end for c in recording.operations if isinstance(c, Mark))
    outcomes = set()
    for number, (found, _) in enumerate(states_to_try(recording, Disk.of(recording))):
        if found.after.end < done:
            continue
        base = tmp_path / str(number)
        base.mkdir()
        write_tree(found.tree, base)
        with common.swept(base / "run") as manager:
            try:
                assert_same_leaves(manager.restore(step=1), state(1))
                outcomes.add("whole")
            except ckptmgr.StepNotFound:
                outcomes.add("lost")
            except ckptmgr.CorruptCheckpoint:
                outcomes.add("damaged")
            manager.save(1, state(2), overwrite=True).result(common.LIMIT)
    assert outcomes == {"whole", "lost", "damaged"}


# -- each sync is needed ------------------------------------------------------------------------


def is_data(order, path):
    return "/ocdbt.process_0" in path and path not in order.dirs


def is_metadata(order, path):
    return "/default/" in path and not is_data(order, path) and path not in order.dirs


def last(order, path):
    """The syncs of a path that no other of it follows before the rename."""
    return [c for c in order.of(Sync, path) if c.end == order.synced(path)]


def first_after(order, path):
    """The first sync of a path after the rename."""
    return [c for c in order.of(Sync, path) if c.begin > order.rename.end][:1]


def all_of(matches):
    """The syncs from the start on whose path is such a one."""

    def find(order):
        start = next(c.end for c in order.of(Mark) if c.text == "start")
        return [c for c in order.of(Sync) if c.begin > start and matches(order, c.path)]

    return find


ONE, TWO = "overwrite by exchange", "overwrite by two renames"
NEEDED = {  # what is left out: scenario, the syncs
    "of data files": ("first save", all_of(is_data)),
    "of metadata files": ("first save", all_of(is_metadata)),
    "of directories": ("first save", all_of(lambda o, p: "/default" in p and p in o.dirs)),
    "of the manifest": ("first save", all_of(lambda o, p: p.endswith(layout.MANIFEST))),
    "of the step's directory": ("first save", lambda o: last(o, o.tmp)),
    "of the root after the rename": ("first save", all_of(lambda o, p: p == o.root)),
    "above the root": ("first save", all_of(lambda o, p: p == os.path.dirname(o.root))),
    "of the root after an exchange": (ONE, lambda o: first_after(o, o.root)),
    "of the intent": (TWO, all_of(lambda o, p: "/intents/" in p)),
    "of the intents": (TWO, all_of(lambda o, p: p.endswith("/intents"))),
    "above intents and trash": (TWO, all_of(lambda o, p: p.endswith(layout.PRIVATE))),
    "of the root after two renames": (TWO, lambda o: first_after(o, o.root)),
    "after a recovery": ("replacement cut in two", all_of(lambda o, p: p == o.root)),
    "of the root in a deletion": ("delete", all_of(lambda o, p: p == o.root)),
    "of a record": ("suspect", all_of(lambda o, p: "/suspect/" in p)),
    "of the records": ("suspect", all_of(lambda o, p: p.endswith("/suspect"))),
}


@pytest.mark.parametrize("what", NEEDED)
def test_without_the_sync_some_promise_breaks(what, recorded, tmp_path):
    name, find = NEEDED[what]
    recording = recorded[name]
    dropped = find(Order(recording))
    assert dropped, f"there is no sync {what}"
    wrong, _ = violations(without(recording, dropped), tmp_path, first=True)
    assert wrong, f"{len(dropped)} syncs {what} can be left out"


# -- the model itself ---------------------------------------------------------------------------

SMALL = """
    import os, sys
    base, where = sys.argv[1], os.path.join(sys.argv[1], sys.argv[3])
    os.mkdir(where)
    new, name = os.path.join(where, "new"), os.path.join(where, "name")
    def sync(path):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    def put(text, *synced):
        with open(new, "w") as file:
            file.write(text)
        if "file" in synced:
            sync(new)
        os.rename(new, name)
        if "directory" in synced:
            sync(where)
    sync(base)
    put("old", "file", "directory")
    put("NEW!", *sys.argv[4:])
    """


@pytest.mark.parametrize("synced", [(False, False), (False, True), (True, False), (True, True)])
def test_the_model_knows_what_a_file_replaced_by_a_rename_may_be(synced, tmp_path):
    if syscalls.why_not():
        pytest.skip(syscalls.why_not())
    words = [word for word, wanted in zip(("file", "directory"), synced, strict=True) if wanted]
    recording = syscalls.record(SMALL, tmp_path, "small", *words).below("small")
    disk = Disk.of(recording)
    last = max(c.end for c in recording.operations)
    found = {s.tree.get("name") for s in disk.states(last)}
    certain = {b"NEW!"} if synced[1] else {b"NEW!", b"old"}
    assert found == (certain if synced[0] else certain | {b"", b"NE", bytes(4)})
    assert disk.everything()["name"] == b"NEW!"
