"""Full disks, permissions, clocks, and paths of every kind."""

import os
import pathlib
import subprocess
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

import ckptmgr
from ckptmgr.core import layout
from ckptmgr.engine.store import Store
from ckptmgr.testing import Fault, FaultyStore, Hold
from tests.fault.common import (
    LIMIT,
    assert_state,
    contents,
    faulty,
    join_sweep,
    leftovers,
    manager,
    numbers,
    reader,
    state,
    swept,
)
from tests.support import run_python

MIB = 2**20

# -- no room ----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 32 MiB."""
    where = tmp_path / "disk"
    where.mkdir()
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=32m", "ckptmgr-test", where],
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted: {done.stderr.strip()}")
    yield where
    join_sweep()
    subprocess.run(["umount", "-l", where], check=True)


def big(number, mib):
    return {"big": np.full(mib * MIB // 4, number, np.float32)}


def test_a_full_disk_fails_the_save_by_name_and_the_next_save_works(small_disk):
    with manager(small_disk / "run") as found:
        found.save(1, big(1, 8)).result()
        with pytest.raises(ckptmgr.SaveFailed) as caught:
            found.save(2, big(2, 48)).result()
        said = str(caught.value)
        assert "step 2" in said and str(small_disk) in said
        assert "no space" in said.lower()
        assert leftovers(small_disk / "run") == []
        assert numbers(found) == (1,)
        assert (found.restore()["big"] == 1).all()
        found.save(2, big(2, 12)).result()
        assert (found.restore()["big"] == 2).all()


def test_a_disk_that_fills_up_in_the_small_files_fails_the_save_by_name(small_disk):
    with manager(small_disk / "run") as found:
        found.save(1, state(1)).result()
        filler = small_disk / "filler"
        hold = Hold(lambda op: op.name == "write_file" and op.path.endswith("tree.json"))
        store = faulty(small_disk / "run", hold)
        with manager(small_disk / "run", store=store) as other:
            handle = other.save(2, state(2))
            assert hold.reached.wait(LIMIT)
            with pytest.raises(OSError), open(filler, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            hold.release()
            with pytest.raises(ckptmgr.SaveFailed, match="(?i)no space.*free some space"):
                handle.result(LIMIT)
            assert leftovers(small_disk / "run") == []
            filler.unlink()
            other.save(2, state(2)).result()
        assert_state(found.restore(step=2), 2)


LIMITED = """
    import resource, signal, sys
    import jax, numpy as np, ckptmgr
    from tests.fault import common

    root = sys.argv[1]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    found = common.manager(root)
    found.save(1, {"big": np.ones(2**21, np.float32)}).result()
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**24, hard))
    try:
        found.save(2, {"big": np.ones(2**23, np.float32)}).result()
    except ckptmgr.SaveFailed as exc:
        print("step 2" in str(exc), root in str(exc), "large" in str(exc), flush=True)
    print(common.leftovers(root), common.numbers(found), flush=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    found.save(2, {"big": np.full(2**23, 2, np.float32)}).result()
    print(bool((found.restore(step=2)["big"] == 2).all()), bool((found.restore(step=1)["big"] == 1).all()))
    found.close()
    """


def test_a_file_that_grows_beyond_the_limit_fails_the_save_and_the_next_one_works(tmp_path):
    lines = run_python(LIMITED, tmp_path).stdout.splitlines()
    assert lines == ["True True True", "[] (1,)", "True True"]


# -- passing faults ---------------------------------------------------------------------------


def test_an_error_that_lasts_is_told_each_time_and_nothing_is_listed(tmp_path):
    store = faulty(tmp_path)
    with manager(tmp_path, store=store) as found:
        found.save(1, state(1)).result()
        store.arm(Fault("arrays", for_good=True))
        for _ in range(3):
            with pytest.raises(ckptmgr.SaveFailed, match="step 2 .*Input/output error"):
                found.save(2, state(2)).result(LIMIT)
            assert numbers(found) == (1,)
        store.arm()
        found.save(2, state(2)).result(LIMIT)
        assert_state(found.restore(), 2)


class Unreadable(FaultyStore):
    """Manifests cannot be read while `failing`; nothing is wrong with them."""

    failing = False

    def read_file(self, name):
        if self.failing and name.endswith(layout.MANIFEST):
            raise ckptmgr.StoreError(f"cannot read {name}: Input/output error (by a test)")
        return super().read_file(name)


def test_a_manifest_that_cannot_be_read_for_a_while_is_not_taken_for_a_missing_one(tmp_path):
    store = Unreadable(Store(str(tmp_path), durable=False))
    with manager(tmp_path, store=store) as found:
        found.save(1, state(1)).result()
        store.failing = True
        with pytest.raises(ckptmgr.CheckpointError, match="Input/output error"):
            found.restore(step=1)
        store.failing = False
        assert_state(found.restore(step=1), 1)


def test_a_save_does_not_put_a_good_step_aside_because_its_manifest_cannot_be_read(tmp_path):
    store = Unreadable(Store(str(tmp_path), durable=False))
    with manager(tmp_path, store=store) as found:
        found.save(1, state(1)).result()
        store.failing = True
        with pytest.raises(ckptmgr.CheckpointError, match="Input/output error"):
            found.save(1, state(10)).result(LIMIT)
        store.failing = False
        assert_state(found.restore(step=1), 1)


# -- permissions ------------------------------------------------------------------------------


@pytest.fixture
def umask():
    """Sets the umask for one test."""
    before = os.umask(0o022)
    os.umask(before)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize("mask", [0o002, 0o022, 0o077])
def test_files_and_directories_obey_the_umask(mask, tmp_path, umask):
    umask(mask)
    with manager(tmp_path / "run") as found:
        found.save(1, state(1), metrics={"loss": 1.0}).result()
    modes = {}
    for path in [tmp_path / "run", *(tmp_path / "run").rglob("*")]:
        full = 0o777 if path.is_dir() else 0o666
        if path.stat().st_mode & 0o777 != full & ~mask:
            modes[str(path.relative_to(tmp_path))] = oct(path.stat().st_mode & 0o777)
    assert modes == {}


def test_a_setgid_directory_hands_its_group_down(tmp_path):
    os.chmod(tmp_path, 0o2775)
    with manager(tmp_path / "run") as found:
        found.save(1, state(1)).result()
    assert [p for p in tmp_path.rglob("*") if p.is_dir() and not p.stat().st_mode & 0o2000] == []
    assert {p.stat().st_gid for p in tmp_path.rglob("*")} == {tmp_path.stat().st_gid}


def _picture(root):
    return {str(p): (p.lstat().st_mtime_ns, p.lstat().st_mode) for p in [root, *root.rglob("*")]}


def test_a_read_only_manager_creates_changes_and_removes_nothing(tmp_path):
    with manager(tmp_path) as found:
        found.save(1, state(1)).result()
        found.save(2, state(2)).result()
    (tmp_path / "2" / layout.MANIFEST).unlink()
    trash = tmp_path / layout.trash_dir() / "7-ab"
    trash.mkdir(parents=True)
    before = _picture(tmp_path)
    with reader(tmp_path) as found:
        join_sweep()
        assert numbers(found) == (1,)
        assert found.info(1).step == 1
        assert_state(found.restore(), 1)
        assert_state(found.restore_latest(None).state, 1)
        for call in (
            lambda: found.save(3, state(3)),
            lambda: found.delete(1),
            lambda: found.truncate_after(0),
        ):
            with pytest.raises(ckptmgr.ReadOnly):
                call()
    assert _picture(tmp_path) == before


AS_NOBODY = """
    import os, shutil, sys, tempfile
    import jax, jax.numpy, numpy, ckptmgr
    from tests.fault import common

    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    base = tempfile.mkdtemp()
    root = os.path.join(base, "run")
    with common.manager(root) as found:
        for step in (1, 2, 3):
            found.save(step, common.state(step)).result()
    common.join_sweep()

    for folder, _, files in os.walk(os.path.join(root, "3")):  # a step made read-only
        for file in files:
            os.chmod(os.path.join(folder, file), 0o444)
        os.chmod(folder, 0o555)
    with common.manager(root) as found:
        common.assert_state(found.restore(step=3), 3)
        try:
            found.delete(3)
        except ckptmgr.StoreError as exc:
            print(exc)
            os.chmod(os.path.join(root, "3"), 0o755)
            found.delete(3)
        print(common.numbers(found), common.leftovers(root))

    os.chmod(root, 0o555)  # no right to write: a reader does without
    try:
        common.manager(root)
    except ckptmgr.StoreError as exc:
        print(root in str(exc), "permission" in str(exc))
    with common.reader(root) as found:
        common.assert_state(found.restore(), 2)
    os.chmod(root, 0o755)

    found = common.manager(root)
    os.chmod(root, 0o555)  # taken away while the manager lives
    try:
        found.save(4, common.state(4)).result()
    except ckptmgr.SaveFailed as exc:
        print("step 4" in str(exc), root in str(exc), "ermission" in str(exc))
    os.chmod(root, 0o755)
    found.save(4, common.state(4)).result()
    print(common.numbers(found))
    found.close()

    os.chmod(base, 0o555)
    try:
        common.manager(os.path.join(base, "other"))
    except ckptmgr.StoreError as exc:
        print("other" in str(exc), "permission" in str(exc))
    os.chmod(base, 0o755)
    shutil.rmtree(base)
    """


def test_without_permission_each_refusal_names_the_path_and_a_reader_needs_none():
    lines = run_python(AS_NOBODY, cwd="/").stdout.splitlines()
    assert lines == [
        "(1, 2) []",
        "True True",
        "True True True",
        "(1, 2, 4)",
        "True True",
    ]


# -- clocks -----------------------------------------------------------------------------------


class OddClock:
    """A clock that stands still, or goes backwards."""

    def __init__(self, pace):
        self.now, self.pace = 1e9, pace

    def time(self):
        self.now += self.pace
        return self.now

    monotonic = time


@pytest.mark.parametrize("pace", [0.0, -3.0], ids=["frozen", "backwards"])
@pytest.mark.parametrize(
    "tree",
    [{}, {"a": None}, {"a": np.zeros((0, 3), np.float32)}, {"a": jnp.ones(3)}],
    ids=["empty", "None", "no elements", "some"],
)
def test_no_clock_and_no_number_of_bytes_breaks_a_save_or_a_restore(pace, tree, tmp_path):
    events = []
    options = ckptmgr.Options(retention=ckptmgr.KeepLast(2))
    with ckptmgr.CheckpointManager(
        tmp_path, options, clock=OddClock(pace), events=[events.append]
    ) as found:
        for step in (1, 2, 3):
            info = found.save(step, tree, metrics={"loss": 1.0}).result(LIMIT)
            assert info.step == step
        found.wait()
        assert numbers(found) == (2, 3)
        got = found.restore()
        assert sorted(got) == sorted(tree)
    assert {event.error for event in events} == {None}
    assert min(event.seconds for event in events) >= 0


def test_order_comes_from_step_numbers_not_from_the_clock(tmp_path):
    options = ckptmgr.Options(retention=ckptmgr.KeepLast(2))
    with ckptmgr.CheckpointManager(tmp_path, options, clock=OddClock(-1000.0)) as found:
        for step in (1, 2, 3, 4):
            found.save(step, state(step)).result()
        found.wait()
        assert numbers(found) == (3, 4)
        assert found.latest_step() == 4


# -- paths ------------------------------------------------------------------------------------


def as_given(kind, tmp_path):
    return {
        "ckpt": "ckpt",
        "./ckpt": "./ckpt",
        "../x/ckpt": f"../{tmp_path.name}/ckpt",
        "~/ckpt": "~/ckpt",
        "trailing slash": "ckpt/",
        "Path": pathlib.Path("ckpt"),
        "epath": epath.Path("ckpt"),
        "bytes": b"ckpt",
        "file URL": f"file://{tmp_path}/ckpt",
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "ckpt",
        "./ckpt",
        "../x/ckpt",
        "~/ckpt",
        "trailing slash",
        "Path",
        "epath",
        "bytes",
        "file URL",
    ],
)
def test_a_path_of_any_kind_is_made_absolute_at_construction(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with manager(as_given(kind, tmp_path)) as found:
        assert found.directory == str(tmp_path / "ckpt")
        found.save(1, state(1)).result()
    assert (tmp_path / "ckpt" / "1" / layout.MANIFEST).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
    assert_state(ckptmgr.restore(as_given(kind, tmp_path)), 1)


@pytest.mark.parametrize("wrong", ["gs://bucket/x", "s3://bucket/x", "", "a\0b", None, 3])
def test_what_is_no_local_path_is_refused_at_construction(wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ckptmgr.InvalidOption):
        manager(wrong)
    assert list(tmp_path.iterdir()) == []


def test_a_change_of_directory_during_and_after_a_save_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    hold = Hold("arrays")
    with manager("ckpt", store=faulty(tmp_path / "ckpt", hold)) as found:
        handle = found.save(1, state(1))
        assert hold.reached.wait(LIMIT)
        monkeypatch.chdir(tmp_path / "elsewhere")
        hold.release()
        handle.result(LIMIT)
        found.save(2, state(2)).result()
    with manager("../ckpt2") as found:
        monkeypatch.chdir(tmp_path)
        found.save(3, state(3)).result()
    assert numbers(reader(tmp_path / "ckpt")) == (1, 2)
    assert numbers(reader(tmp_path / "ckpt2")) == (3,)
    assert list((tmp_path / "elsewhere").iterdir()) == []


ODD_NAMES = [
    "a b",
    "x[1]",
    "y{2}",
    "100%",
    "%41",
    "q?",
    "#h",
    "ü",
    "a:b",
    "*",
    "~",
    "$HOME",
    "new\nline",
    "'\"",
    "back\\slash",
    "l" * 250,
]


@pytest.mark.parametrize("name", ODD_NAMES, ids=lambda name: ascii(name)[1:12])
def test_odd_characters_in_a_path_work_in_every_call(name, tmp_path):
    root = tmp_path / name / "run"
    try:
        found = manager(root)
    except ckptmgr.InvalidOption as exc:
        assert name == "back\\slash" and "\\" in str(exc)
        return
    with found:
        for step in (1, 2):
            found.save(step, state(step)).result()
        assert numbers(found) == (1, 2)
        assert_state(found.restore(step=1), 1)
        assert_state(ckptmgr.restore(root), 2)
        found.save(2, state(20), overwrite=True).result()
        assert_state(found.restore(), 20)
        found.delete(2)
        assert found.latest_step() == 1
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_path_that_is_no_unicode_works_or_is_refused_at_construction(tmp_path):
    raw = os.fsencode(tmp_path) + b"/\xff"
    try:
        found = manager(raw)
    except ckptmgr.InvalidOption:
        assert list(tmp_path.iterdir()) == []
        return
    with found:
        found.save(1, state(1)).result()
        assert_state(found.restore(), 1)


def test_a_path_that_is_too_long_is_named_at_construction(tmp_path):
    with pytest.raises(ckptmgr.StoreError, match="(?i)name too long"):
        manager(tmp_path / ("l" * 300))


def test_a_root_that_is_a_symbolic_link_works(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with manager(tmp_path / "link") as found:
        found.save(1, state(1)).result()
        found.save(1, state(10), overwrite=True).result()
        assert_state(found.restore(), 10)
    assert_state(reader(tmp_path / "real").restore(), 10)


def test_a_root_through_a_dangling_link_is_an_error_that_names_it(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ckptmgr.StoreError, match="link"):
        manager(tmp_path / "link")


# -- the seam itself --------------------------------------------------------------------------


def test_a_faulty_store_counts_changes_and_hits_the_one_it_was_told(tmp_path):
    store = FaultyStore(Store(str(tmp_path)), [Fault(2), Fault("rename", effect="full")])
    store.make_dir("a")
    with pytest.raises(ckptmgr.StoreError, match="write_file .*a/b.*by a test"):
        store.write_file("a/b", b"1234")
    assert not (tmp_path / "a" / "b").exists()
    store.write_file("a/b", b"1234")
    assert store.read_file("a/b") == b"1234"
    with pytest.raises(ckptmgr.StoreError) as caught:
        store.rename("a", "c")
    assert caught.value.unknown and store.exists("c/b") and not store.exists("a")
    names = [operation.name for operation in store.operations]
    assert names == ["make_dir", "write_file", "write_file", "rename"]


def test_a_faulty_store_cuts_a_write_short_and_fails_for_good(tmp_path):
    store = FaultyStore(Store(str(tmp_path)))
    store.arm(Fault("write_file", effect="half", for_good=True))
    with pytest.raises(ckptmgr.StoreError):
        store.write_file("a", b"1234")
    assert (tmp_path / "a").read_bytes() == b"12"
    with pytest.raises(ckptmgr.StoreError):
        store.make_dir("b")
    store.arm()
    store.make_dir("b")
    assert store.is_dir("b")


def test_a_faulty_store_holds_an_operation_until_it_is_released(tmp_path):
    hold = Hold("make_dir")
    store = FaultyStore(Store(str(tmp_path)), [hold])
    thread = threading.Thread(target=store.make_dir, args=("a",))
    thread.start()
    assert hold.reached.wait(LIMIT)
    assert contents(tmp_path) == {} and not (tmp_path / "a").exists()
    hold.release()
    thread.join(LIMIT)
    assert (tmp_path / "a").is_dir()
    store.make_dir("b")  # held once only


def test_the_start_of_a_manager_changes_nothing_in_a_root_without_leftovers(tmp_path):
    with manager(tmp_path) as found:
        found.save(1, state(1)).result()
    join_sweep()
    before = contents(tmp_path)
    store = faulty(tmp_path)
    with manager(tmp_path, store=store):
        join_sweep()
    assert [operation for operation in store.operations] == []
    assert contents(tmp_path) == before
    swept(tmp_path).close()


# -- writing early ----------------------------------------------------------------------------


def test_a_hint_to_write_early_takes_each_file_once_and_never_fails(tmp_path):
    store = Store(str(tmp_path))
    begun = set()
    store.begin_sync("d", begun)  # which is not there
    assert begun == set()
    (tmp_path / "d" / "directory").mkdir(parents=True)
    (tmp_path / "d" / "a").write_bytes(b"a" * MIB)
    (tmp_path / "d" / "dangling").symlink_to("nowhere")
    store.begin_sync("d", begun)
    assert begun == {"a", "dangling", "directory"}
    (tmp_path / "d" / "b").touch()
    store.begin_sync("d", begun)
    assert begun == {"a", "b", "dangling", "directory"}
    Store(str(tmp_path), durable=False).begin_sync("d", untouched := set())
    assert untouched == set()


def test_every_file_of_arrays_is_begun_before_it_is_synced(tmp_path, monkeypatch):
    begun, seen = [], []
    begin, sync = Store.begin_sync, Store.sync_tree

    def begin_sync(self, name, names):
        begin(self, name, names)
        begun.append(set(names))

    def sync_tree(self, name, *rest):
        found = sync(self, name, *rest)
        seen.append({path.rpartition("/d/")[2] for path in found if "ocdbt.process_0/d/" in path})
        return found

    monkeypatch.setattr(Store, "begin_sync", begin_sync)
    monkeypatch.setattr(Store, "sync_tree", sync_tree)
    with manager(tmp_path, storage=ckptmgr.Storage()) as mine:
        mine.save(1, {f"x{i}": np.full(MIB, i, np.float32) for i in range(40)}, sync=True)
    assert len(begun) > 1
    (files,) = filter(None, seen)
    assert files and files <= begun[-1]
