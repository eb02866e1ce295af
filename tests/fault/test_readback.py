"""A step read back from storage: every byte compared, everything that is wrong named."""

import errno
import mmap
import os
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts

import ckptmgr
from ckptmgr.core import boxes, layout, manifest
from ckptmgr.engine import arrays, pagecache, readback
from ckptmgr.engine.reader import Reader
from ckptmgr.engine.steps import open_step

FORMATS = [
    {"driver": driver, "compression": compression}
    for driver in ("zarr", "zarr3")
    for compression in (None, "zstd")
]


def save(root, state, **storage):
    """Saves `state` as step 1 and gives its directory."""
    storage = ckptmgr.Storage(durable=storage.pop("durable", False), **storage)
    with ckptmgr.CheckpointManager(root, ckptmgr.Options(storage=storage)) as manager:
        manager.save(1, state).result()
    return pathlib.Path(root, "1")


def expected(step):
    """What `read_back` compares with: trees, digests and metadata files."""
    document = manifest.Manifest.from_json((step / layout.MANIFEST).read_bytes())
    opened = open_step(str(step), 1, document)
    items = {name: (item.tree, item.digests) for name, item in opened.items.items() if item.tree}
    return items, document.files


def read(step, known, **options):
    return readback.read_back(str(step), *known, **options)


def nbytes(known):
    return sum(leaf.nbytes for tree, _ in known[0].values() for leaf in tree.leaves)


def named(found):
    """(file, leaf) of every problem."""
    return {(problem.file, problem.leaf) for problem in found.problems}


def ramp(*shape, dtype=np.float32, start=0):
    return np.arange(start, start + np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


def odd_leaves():
    """Leaves of every kind, and every dtype that is stored in a way of its own."""
    kinds = [jnp.bfloat16, jnp.int4, jnp.uint4, jnp.float8_e4m3, np.complex64, np.bool_, np.uint64]
    return {
        **{np.dtype(kind).name: ramp(5, 3, dtype=kind) for kind in kinds},
        "scalar": 3,
        "zero_d": jnp.float32(-0.0),
        "nan": np.array([np.nan, -np.nan, np.inf]),
        "nothing": np.zeros((0, 3)),
        "nothing_either": np.zeros((3, 0, 4), np.int8),
        "zeros": np.zeros((64, 3), np.int16),
        "key": jax.random.key(7),
        "bytes": b"\0\1\2",
        "text": "text",
        "none": None,
        "a.b": ramp(4),
        "a": {"b": ramp(4, start=9)},
    }


def big_leaves():
    """One chunk beyond the size read by key, many chunks, and chunks cut at the array's edge."""
    return {
        "one": ramp(600, 500),
        "many": ramp(1000, 37, dtype=np.int32),
        "edge": ramp(101, 333, dtype=np.float64),
    }


@pytest.mark.parametrize("how", FORMATS, ids=str)
@pytest.mark.parametrize("make", [odd_leaves, big_leaves])
def test_a_good_step_has_no_problem_and_every_byte_is_counted(make, how, tmp_path):
    step = save(tmp_path, make(), chunk_bytes=30_000, **how)
    known = expected(step)
    found = read(step, known)
    assert found.problems == ()
    assert found.nbytes == nbytes(known) > 0


def test_a_tree_that_is_one_leaf_and_a_tree_without_arrays_are_good(tmp_path):
    for number, state in enumerate([ramp(7), {"text": "text"}, {}]):
        step = save(tmp_path / str(number), state)
        known = expected(step)
        assert read(step, known).problems == ()
        assert read(step, known).nbytes == nbytes(known)


def test_arrays_on_eight_devices_are_good(mesh42, tmp_path):
    spec = jax.sharding.PartitionSpec("data", "model")
    sharding = jax.sharding.NamedSharding(mesh42, spec)
    state = {
        "large": jax.device_put(ramp(1024, 1024), sharding),
        "small": jax.device_put(ramp(8, 2, dtype=ml_dtypes.bfloat16), sharding),
    }
    step = save(tmp_path, state)
    assert read(step, expected(step)).problems == ()
    assert read(step, expected(step)).nbytes == 4 * 1024**2 + 32


def test_a_directory_that_is_not_renamed_yet_can_be_read_back(tmp_path):
    step = save(tmp_path, big_leaves())
    known = expected(step)
    attempt = step.rename(tmp_path / layout.tmp_name(1, "0123456789abcdef"))
    found = read(attempt, known)
    assert (found.problems, found.nbytes) == ((), nbytes(known))


@pytest.fixture
def several(tmp_path):
    """A step of two trees and a state, and what it should hold."""

    class Iterator:
        def get_state(self):
            return {"position": 3}

        def set_state(self, state):
            pass

    first = {**big_leaves(), "little": -ramp(300, 2, start=7)}
    second = {"other": ramp(500, 400, start=5), "n": 3}
    items = ckptmgr.Items(first=first, second=second, data=Iterator())
    step = save(tmp_path, items, chunk_bytes=30_000)
    return step, expected(step)


def test_several_items_are_all_read(several):
    step, known = several
    found = read(step, known)
    assert sorted(known[0]) == ["first", "second"]
    assert (found.problems, found.nbytes) == ((), nbytes(known))


def leaf_of(known, item, name):
    """(number, leaf) by dotted name."""
    (found,) = [(i, leaf) for i, leaf in enumerate(known[0][item][0].leaves) if leaf.dotted == name]
    return found


def flip(step, item, data, at):
    """Flips a bit of the byte `at` of the run of `data` in one of the item's data files."""
    for file in step.glob(f"{item}/ocdbt.process_0/d/*"):
        content = bytearray(file.read_bytes())
        start = content.find(data)
        if start >= 0:
            content[start + at] ^= 1
            file.write_bytes(content)
            return
    raise AssertionError("no data file holds these bytes")


@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("name", ["one", "many", "little"])
def test_a_flipped_byte_names_leaf_and_box_and_the_rest_is_still_compared(name, where, several):
    step, known = several
    value = {**big_leaves(), "little": -ramp(300, 2, start=7)}[name]
    _, leaf = leaf_of(known, "first", name)
    last = list(boxes.tiles(boxes.whole(leaf.stored_shape), leaf.chunk))[-1]
    chunk = np.ascontiguousarray(value[last.slices]).tobytes()
    flip(
        step,
        "first",
        chunk,
        {"first": 0, "middle": len(chunk) // 2, "last": -1}[where] % len(chunk),
    )
    found = read(step, known)
    assert named(found) == {("first", name)}
    assert str(last) in found.problems[0].message
    assert not found.problems[0].transient
    assert found.nbytes == nbytes(known) - len(chunk)


def test_every_damaged_chunk_is_named_in_whatever_item_it_is(several):
    step, known = several
    _, leaf = leaf_of(known, "first", "many")
    tiles = list(boxes.tiles(boxes.whole(leaf.stored_shape), leaf.chunk))
    assert len(tiles) > 3
    for box in tiles[1:3]:
        flip(step, "first", big_leaves()["many"][box.slices].tobytes(), 100)
    flip(step, "first", (-ramp(300, 2, start=7)).tobytes(), 5)
    flip(step, "second", ramp(500, 400, start=5).tobytes()[:400], 0)
    found = read(step, known)
    assert named(found) == {("first", "many"), ("first", "little"), ("second", "other")}
    told = [problem.message for problem in found.problems if problem.leaf == "many"]
    assert len(told) == 2 and all(str(b) in t for b, t in zip(tiles[1:3], told, strict=True))


@pytest.mark.parametrize("how", FORMATS, ids=str)
@pytest.mark.parametrize("harm", ["missing", "empty", "cut short"])
def test_a_data_file_that_lost_bytes_names_the_leaves_that_were_in_it(harm, how, tmp_path):
    step = save(tmp_path, {**big_leaves(), "little": ramp(300, 2)}, **how)
    known = expected(step)
    whole = {leaf.dotted: leaf.nbytes for leaf in known[0]["default"][0].leaves}  # one chunk each
    ever = set()
    for file in step.glob("default/ocdbt.process_0/d/*"):
        content = file.read_bytes()
        if harm == "missing":
            file.unlink()
        else:
            file.write_bytes(content[: 0 if harm == "empty" else 10])
        found = read(step, known)
        lost = {problem.leaf for problem in found.problems}
        assert named(found) == {("default", name) for name in lost}
        assert found.nbytes == nbytes(known) - sum(whole[name] for name in lost)
        assert not any(problem.transient for problem in found.problems)
        file.write_bytes(content)
        ever |= lost
    assert ever == set(whole)


METADATA = [
    layout.tree_file("first"),
    layout.receipt_file("second", 0),
    layout.pytree_metadata("first"),
    layout.state_file("data", 0),
    layout.CHECKPOINT_METADATA,
    layout.COMMIT_SUCCESS,
]
HARMS = {
    "missing": lambda data: None,
    "empty": lambda data: b"",
    "cut short": lambda data: data[:-1],
    "longer": lambda data: data + b"x",
    "altered": lambda data: bytes([data[0] ^ 1]) + data[1:],
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_harmed_metadata_file_is_named_and_the_arrays_are_still_compared(harm, several):
    step, known = several
    for name in METADATA:
        file = step / name
        before = file.read_bytes()
        after = HARMS[harm](before)
        if after is None:
            file.unlink()
        else:
            file.write_bytes(after)
        found = read(step, known)
        assert named(found) == {(name, "")}
        assert found.nbytes == nbytes(known)
        file.write_bytes(before)
    assert read(step, known).problems == ()


@pytest.mark.parametrize("harm", HARMS)
def test_a_harmed_database_is_named_and_other_items_are_still_compared(harm, several):
    step, known = several
    for file in [step / "first" / layout.OCDBT_MANIFEST, *step.glob("first/d/*")]:
        before = file.read_bytes()
        after = HARMS[harm](before)
        if after is None:
            file.unlink()
        else:
            file.write_bytes(after)
        found = read(step, known)
        assert (str(file.relative_to(step)), "") in named(found)
        assert "second" not in {problem.file for problem in found.problems}
        assert found.nbytes >= nbytes(({"second": known[0]["second"]}, {}))
        file.write_bytes(before)


def test_every_file_that_is_wrong_is_named_at_once(several):
    step, known = several
    for name in METADATA:
        (step / name).unlink()
    assert named(read(step, known)) == {(name, "") for name in METADATA}


def database(step, item):
    spec = arrays.database(str(step / item))
    return ts.KvStore.open(spec, context=arrays.context()).result()


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
@pytest.mark.parametrize("name", ["one", "little"])
def test_a_chunk_that_is_not_in_the_database_names_leaf_and_box(name, driver, tmp_path):
    state = {"one": ramp(600, 500), "little": ramp(30, start=7), "rest": ramp(3)}
    step = save(tmp_path, state, driver=driver)
    known = expected(step)
    _, leaf = leaf_of(known, "default", name)
    index = (0,) * len(leaf.chunk)
    database(step, "default").delete_range(
        ts.KvStore.KeyRange(*[layout.chunk_key(driver, name, index) + end for end in ("", "\0")])
    ).result()
    found = read(step, (known[0], {}))
    assert named(found) == {("default", name)}
    assert str(boxes.whole(leaf.stored_shape)) in found.problems[0].message
    assert found.nbytes == nbytes(known) - leaf.nbytes


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
@pytest.mark.parametrize("name", ["one", "little", "nothing"])
def test_an_array_without_its_metadata_is_named_though_a_key_may_be_read_without(
    name, driver, tmp_path
):
    state = {"one": ramp(600, 500), "little": ramp(30), "nothing": np.zeros(0), "rest": ramp(3)}
    step = save(tmp_path, state, driver=driver)
    known = expected(step)
    key = layout.array_prefix(name) + {"zarr": ".zarray", "zarr3": "zarr.json"}[driver]
    database(step, "default").delete_range(ts.KvStore.KeyRange(key, key + "\0")).result()
    found = read(step, (known[0], {}))
    assert named(found) == {("default", name)}
    assert "cannot be opened" in found.problems[0].message


@pytest.mark.parametrize("name", ["one", "little"])
def test_an_array_that_says_another_shape_is_named(name, tmp_path):
    step = save(tmp_path, {"one": ramp(600, 500), "little": ramp(30), "rest": ramp(3)})
    known = expected(step)
    store = database(step, "default")
    key = layout.array_prefix(name) + ".zarray"
    text = store.read(key).result().value
    store.write(key, text.replace(b'"shape":[', b'"shape":[1')).result()
    found = read(step, (known[0], {}))
    assert named(found) == {("default", name)}
    assert "the tree says" in found.problems[0].message


def test_what_memory_held_is_compared_and_not_what_the_step_says_of_itself(tmp_path):
    ours, theirs = (
        save(tmp_path / "a", {"x": ramp(9)}),
        save(tmp_path / "b", {"x": ramp(9, start=1)}),
    )
    items, _ = expected(ours)
    _, files = expected(theirs)
    found = read(theirs, (items, files))
    assert named(found) == {("default", "x")}


def test_a_chunk_without_a_digest_and_a_digest_without_a_chunk_are_problems(several):
    step, (items, files) = several
    tree, digests = items["first"]
    number, leaf = leaf_of((items, files), "first", "many")
    altered = dict(digests)
    altered[number, (99, 0)] = altered.pop((number, (0, 0)))
    found = read(step, ({**items, "first": (tree, altered)}, files))
    assert named(found) == {("first", "many")}
    told = " ".join(problem.message for problem in found.problems)
    assert str(manifest.chunk_box(leaf, (0, 0))) in told and "[99, 0]" in told


def test_a_step_that_is_not_there_is_told_and_not_raised(several):
    step, known = several
    found = read(step.with_name("2"), known)
    assert found.nbytes == 0
    assert found.source == "page cache"
    assert {problem.message for problem in found.problems if not problem.leaf} == {"missing"}
    assert {problem.file for problem in found.problems} == {"first", "second", *known[1]}


@pytest.mark.parametrize("how", FORMATS, ids=str)
def test_the_chunks_under_way_stay_within_the_bound_and_there_are_several(
    how, tmp_path, monkeypatch
):
    step = save(tmp_path, {"x": ramp(2000, 1000), "y": ramp(2000, 500)}, chunk_bytes=10**6, **how)
    under_way, counts, held = [], [], []
    ask, settle = Reader.ask, Reader.settle

    def counting_ask(self, unit, opening, values):
        under_way.append(values.nbytes)
        counts.append(len(under_way))
        held.append(sum(under_way))
        return ask(self, unit, opening, values)

    def counting_settle(self, asked):
        under_way.remove(asked.values.nbytes)
        settle(self, asked)

    monkeypatch.setattr(Reader, "ask", counting_ask)
    monkeypatch.setattr(Reader, "settle", counting_settle)
    known = expected(step)
    bound = 10 * 2**20
    assert read(step, known, host_bytes=bound).problems == ()
    assert 3 * max(held) <= bound  # as read, between, and ours
    assert max(counts) > 1
    del counts[:]
    assert read(step, known, host_bytes=1).problems == ()
    assert max(counts) == 1
    assert len(counts) == len(known[0]["default"][1])


def kind_of_file_system(path):
    """Name of the type of the file system that `path` lies on, "" if not known."""
    device = os.stat(path).st_dev
    try:
        lines = pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2] == f"{os.major(device)}:{os.minor(device)}":
            return after.split()[0]
    return ""


@pytest.fixture
def on_disk(tmp_path):
    if kind_of_file_system(tmp_path) not in ("ext4", "ext3", "ext2", "xfs", "btrfs", "f2fs"):
        pytest.skip("the tests' directory is not on a disk's file system")
    return tmp_path


@pytest.mark.parametrize("durable", [True, False])
def test_a_step_on_disk_comes_from_storage_each_time(durable, on_disk):
    step = save(on_disk, big_leaves(), durable=durable)
    known = expected(step)
    for _ in range(2):  # the second time it is the first that has filled the cache
        found = read(step, known)
        assert (found.problems, found.source) == ((), "storage")


def test_a_step_in_memory_comes_from_the_page_cache():
    if not os.path.isdir("/dev/shm") or kind_of_file_system("/dev/shm") != "tmpfs":
        pytest.skip("there is no file system in memory")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        step = save(root, big_leaves())
        found = read(step, expected(step))
        assert (found.problems, found.source) == ((), "page cache")


def test_a_page_that_cannot_be_evicted_is_not_called_storage(on_disk):
    step = save(on_disk, big_leaves(), durable=True)
    known = expected(step)
    file = max(step.glob("default/ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size)
    with open(file, "rb") as opened:
        with mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as view:
            assert view[0] is not None  # mapped and in use, so the kernel keeps it
            assert read(step, known).source == "page cache"
    assert read(step, known).source == "storage"


def test_what_the_system_cannot_tell_is_not_called_storage(on_disk, monkeypatch):
    step = save(on_disk, big_leaves(), durable=True)
    known = expected(step)
    with monkeypatch.context() as patch:
        patch.delattr(os, "posix_fadvise")
        assert read(step, known).source == "page cache"
    with monkeypatch.context() as patch:
        patch.setattr(pagecache.ctypes, "CDLL", lambda name: object())
        assert read(step, known).source == "page cache"
    (step / "default").rename(on_disk / "elsewhere")
    (step / "default").symlink_to(on_disk / "elsewhere")  # its files were not seen
    found = read(step, known)
    assert (found.problems, found.source) == ((), "page cache")


def test_a_pipe_in_the_directory_does_not_stop_the_reading(several):
    step, known = several
    os.mkfifo(step / "first" / "pipe")
    assert read(step, known).problems == ()


def test_a_write_that_fails_late_is_a_problem(several, monkeypatch):
    step, known = several

    def failing(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(pagecache, "_may_be_cached", lambda fd: True)
    monkeypatch.setattr(os, "fsync", failing)
    found = read(step, known)
    assert found.source == "page cache"
    assert {problem.file for problem in found.problems} >= set(known[1])
    assert all("synced" in problem.message for problem in found.problems)
    assert found.nbytes == nbytes(known)
