"""One bit, one byte, one file of a step is altered: an error, or the right values, never others.

A place where an alteration changes nothing is called harmless; `HARMLESS` lists, by kind of file,
what may be, and why.
"""

import itertools
import pathlib
import random
import shutil
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

import ckptmgr
from ckptmgr.core import layout
from ckptmgr.engine import arrays
from tests.fault.common import manager, reader
from tests.fault.damages import KINDS, edges, files_of, flipped, positions
from tests.fault.scenarios import Place

FORMATS = [(driver, zstd) for driver in ("zarr", "zarr3") for zstd in (None, "zstd")]
# A digest covers every other file, byte for byte.
HARMLESS = {
    "manifest.ocdbt of a process": "read by no restore: the merged database has its content",
    "d/ of a process": "tree nodes that only that manifest leads to, and the unused rest of a file",
}


def state(number):
    """Leaves that lie in tree nodes, in files of their own, in several chunks, and as text."""
    rng = np.random.default_rng(number)
    return {
        "tiny": jnp.arange(3, dtype=jnp.int32) + number,
        "zeros": np.zeros(40, np.float64),
        "some": rng.standard_normal((17, 9)).astype(np.float32),
        "large": rng.integers(0, 255, 6000).astype(np.uint8),
        "half": jnp.full((33,), number, jnp.bfloat16),
        "n": number,
        "name": f"run {number}",
        "none": None,
    }


def save(root, number, driver, zstd):
    storage = ckptmgr.Storage(driver=driver, compression=zstd, durable=False, chunk_bytes=2048)
    with manager(root, storage=storage, heartbeat=None) as found:
        items = ckptmgr.Items(model=state(number), data=Place(number))
        found.save(number, items, metrics={"loss": number / 4}, extra=["x", number]).result()


def outcome(root, number):
    """ "error", or "right"; what is neither fails."""
    try:
        with reader(root) as found:
            info = found.info(number)
            got = found.restore(step=number)
    except ckptmgr.CorruptCheckpoint:
        return "error"
    assert info.metrics == {"loss": number / 4} and info.extra == ["x", number]
    assert got["data"] == {"at": number}
    wanted = state(number)
    assert sorted(got["model"]) == sorted(wanted)
    for name, value in wanted.items():
        if value is None or isinstance(value, (str, int)):
            assert got["model"][name] == value, name
            continue
        found, right = np.asarray(got["model"][name]), np.asarray(value)
        assert found.dtype == right.dtype and found.shape == right.shape, name
        assert found.tobytes() == right.tobytes(), f"{name}: other values, and no error"
    return "right"


def raw_values(number):
    """The bytes of the leaves, to find them in files."""
    arrays = [v for v in state(number).values() if hasattr(v, "dtype")]
    return [np.asarray(value).tobytes()[:2048] for value in arrays]


def in_chunk(data, at, number):
    """Whether a byte belongs to a chunk too large to lie in a tree node."""
    for raw in raw_values(number):
        start = data.find(raw)
        if len(raw) > 1024 and start <= at < start + len(raw) and start >= 0:
            return True
    return False


def flip_everywhere(root, number, count, seed):
    """One flipped bit at a time; kind -> how many were errors and how many harmless."""
    step, bits = root / str(number), random.Random(seed)
    errors, harmless, wrong = Counter(), Counter(), []
    for name, kind in files_of(step).items():
        before = (step / name).read_bytes()
        marks = edges(before, raw_values(number))
        for at in positions(before, count, seed, marks):
            (step / name).write_bytes(flipped(before, at, bits.randrange(8)))
            try:
                found = outcome(root, number)
            except Exception as exc:
                wrong.append(f"{name} byte {at}: {type(exc).__name__} {exc}")
                continue
            (errors if found == "error" else harmless)[kind] += 1
            if found == "right" and in_chunk(before, at, number):
                wrong.append(f"{name} byte {at}: a chunk's byte, and no error")
        (step / name).write_bytes(before)
    return errors, harmless, wrong


def check_flips(root, driver, zstd, count, seed=3):
    save(root, 5, driver, zstd)
    errors, harmless, wrong = flip_everywhere(root, 5, count, seed)
    assert wrong == []
    assert outcome(root, 5) == "right"
    assert set(harmless) <= set(HARMLESS), harmless
    assert set(errors) | set(harmless) == set(KINDS)  # no kind was forgotten
    assert errors["d/ of a process"] > 0
    return errors, harmless


@pytest.mark.parametrize("driver,zstd", FORMATS, ids=str)
def test_one_flipped_bit_anywhere_is_an_error_or_changes_no_value(driver, zstd, tmp_path):
    check_flips(tmp_path, driver, zstd, count=250)


@pytest.mark.soak
@pytest.mark.parametrize("driver,zstd", FORMATS, ids=str)
def test_one_flipped_bit_in_any_byte_is_an_error_or_changes_no_value(driver, zstd, tmp_path):
    errors, harmless = check_flips(tmp_path, driver, zstd, count=10**9)
    print(driver, zstd, dict(errors), "harmless:", dict(harmless))


@pytest.mark.parametrize("seed", range(3))
def test_restore_latest_goes_back_to_the_step_before_whatever_file_was_altered(seed, tmp_path):
    save(tmp_path, 4, "zarr", None)
    save(tmp_path, 5, "zarr", None)
    rng = random.Random(seed)
    for name in files_of(tmp_path / "5"):
        file = tmp_path / "5" / name
        before = file.read_bytes()
        file.write_bytes(flipped(before, rng.randrange(len(before)), rng.randrange(8)))
        expected = 5 if outcome(tmp_path, 5) == "right" else 4
        with reader(tmp_path) as found:
            latest = found.restore_latest(None)
        assert latest.step == expected, name
        assert latest.state["data"] == {"at": expected}, name
        assert latest.state["model"]["n"] == expected, name
        file.write_bytes(before)


# -- more than a bit ----------------------------------------------------------------------------

HARMS = {
    "removed": lambda data, other: None,
    "emptied": lambda data, other: b"",
    "cut by one byte": lambda data, other: data[:-1],
    "cut in half": lambda data, other: data[: len(data) // 2],
    "longer by one byte": lambda data, other: data + b"\0",
    "longer by a page": lambda data, other: data + bytes(4096),
    "written twice": lambda data, other: data + data,
    "zeros of the same size": lambda data, other: bytes(len(data)),
    "zeros in its second half": lambda data, other: (
        data[: len(data) // 2] + bytes(len(data) - len(data) // 2)
    ),
    "another step's of that name or size": lambda data, other: other,
}


def twin_of(name, step, other):
    """The file of another step that stands where this one does: by name, else by kind and size."""
    if (other / name).exists():
        return (other / name).read_bytes()
    kind, size = files_of(step)[name], (step / name).stat().st_size
    alike = [(other / n).read_bytes() for n, k in files_of(other).items() if k == kind]
    return next((data for data in alike if len(data) == size), alike[0])


@pytest.mark.parametrize("harm", HARMS)
def test_a_file_that_is_lost_cut_or_exchanged_is_an_error_or_changes_no_value(harm, tmp_path):
    for number in (4, 5):
        save(tmp_path, number, "zarr", None)
    step, unnoticed = tmp_path / "5", Counter()
    for name, kind in files_of(step).items():
        before = (step / name).read_bytes()
        after = HARMS[harm](before, twin_of(name, step, tmp_path / "4"))
        if after is None:
            (step / name).unlink()
        else:
            (step / name).write_bytes(after)
        if outcome(tmp_path, 5) == "right" and after != before:
            unnoticed[kind] += 1
        (step / name).write_bytes(before)
    allowed = set(HARMLESS) if harm.startswith(("zeros", "another")) else set()
    if harm == "cut by one byte":
        allowed = {"manifest _CKPTMGR"}  # its line feed
    assert set(unnoticed) <= allowed, unnoticed


def test_a_file_that_became_a_directory_or_a_dangling_link_is_an_error(tmp_path):
    save(tmp_path, 5, "zarr", None)
    step = tmp_path / "5"
    for name in files_of(step):
        kept = tmp_path / "kept"
        for put in (lambda path: path.mkdir(), lambda path: path.symlink_to("nowhere")):
            (step / name).rename(kept)
            put(step / name)
            with pytest.raises(ckptmgr.CheckpointError):
                reader(tmp_path).restore(step=5)
            (step / name).rmdir() if (step / name).is_dir() else (step / name).unlink()
            kept.rename(step / name)
    assert outcome(tmp_path, 5) == "right"


# -- chunks -------------------------------------------------------------------------------------


def database(step):
    spec = arrays.database(str(pathlib.Path(step) / "model"))
    return ts.KvStore.open(spec, context=arrays.context()).result()


def chunk_keys(store):
    keys = [key.decode() for key in store.list().result()]
    return [key for key in keys if not key.endswith((".zarray", "zarr.json"))]


@pytest.mark.parametrize("driver,zstd", FORMATS, ids=str)
def test_a_chunk_that_was_removed_from_the_database_is_an_error(driver, zstd, tmp_path):
    save(tmp_path / "good", 5, driver, zstd)
    keys = chunk_keys(database(tmp_path / "good" / "5"))
    assert len(keys) >= 8
    for number, key in enumerate(keys):
        root = tmp_path / str(number)
        shutil.copytree(tmp_path / "good", root)
        database(root / "5").delete_range(ts.KvStore.KeyRange(key, key + "\0")).result()
        assert outcome(root, 5) == "error", key


@pytest.mark.parametrize("driver,zstd", FORMATS, ids=str)
def test_two_chunks_that_changed_places_are_an_error(driver, zstd, tmp_path):
    save(tmp_path / "good", 5, driver, zstd)
    store = database(tmp_path / "good" / "5")
    held = {key: store.read(key).result().value for key in chunk_keys(store)}
    pairs = [(a, b) for a, b in itertools.pairwise(sorted(held)) if held[a] != held[b]]
    assert len(pairs) >= 7
    for number, (a, b) in enumerate(pairs):
        root = tmp_path / str(number)
        shutil.copytree(tmp_path / "good", root)
        store = database(root / "5")
        store.write(a, held[b]).result()
        store.write(b, held[a]).result()
        assert outcome(root, 5) == "error", (a, b)


def chunks_in_one_piece(root):
    """(file, where, bytes) of the chunks of a leaf that lie in one piece."""
    save(root, 5, "zarr", None)
    raw = np.asarray(state(5)["large"]).tobytes()
    chunks = [raw[start : start + 2048] for start in range(0, len(raw), 2048)]
    found = []
    for file in (root / "5").glob(f"model/{layout.container(0)}/d/*"):
        data = file.read_bytes()
        found += [(file, data.find(chunk), chunk) for chunk in chunks if chunk in data]
    return found


def test_two_chunks_whose_bytes_changed_places_are_an_error(tmp_path):
    # where the storage library puts a chunk, and in how many pieces, is up to it
    roots = (tmp_path / str(attempt) for attempt in range(20))
    places = next((root, found) for root in roots if len(found := chunks_in_one_piece(root)) > 1)
    root, found = places
    (file_a, start_a, a), (file_b, start_b, b) = found[:2]
    assert a != b
    for file, start, chunk in ((file_a, start_a, b), (file_b, start_b, a)):
        with open(file, "r+b") as opened:
            opened.seek(start)
            opened.write(chunk)
    assert outcome(root, 5) == "error"
