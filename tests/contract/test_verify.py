"""`verify`: nothing wrong with what is right, and everything that is wrong is told, by name."""

import json
import pathlib
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ckptmgr
from ckptmgr.core import layout, manifest
from tests.support import goldens, run_python


class Iterator:
    """The least that counts as a data iterator."""

    def get_state(self):
        return {"position": 3}

    def set_state(self, state):
        pass


def options(**changes):
    storage = ckptmgr.Storage(durable=False, **changes.pop("storage", {}))
    return ckptmgr.Options(storage=storage, **changes)


def open_run(root, **changes):
    return ckptmgr.CheckpointManager(root, options(**changes))


def ramp(*shape, dtype=np.float32, start=0):
    return np.arange(start, start + np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


def odd():
    """Leaves of every kind, and dtypes that are stored in a way of their own."""
    kinds = [jnp.bfloat16, jnp.int4, jnp.uint4, jnp.float8_e4m3, np.complex64, np.bool_, np.uint64]
    return {
        **{np.dtype(kind).name: ramp(5, 3, dtype=kind) for kind in kinds},
        "scalar": 3,
        "huge": 2**70,
        "nan": np.array([np.nan, np.inf]),
        "nothing": np.zeros((0, 3)),
        "zeros": np.zeros((64, 3), np.int16),
        "key": jax.random.key(7),
        "bytes": b"\0\1\2",
        "text": "text",
        "none": None,
        "a.b": ramp(4),
        "a": {"b": ramp(4, start=9)},
    }


def big():
    """Many chunks, chunks cut at the array's edge, one beyond the size that is read by key."""
    return {
        "one": ramp(600, 500),
        "many": ramp(1000, 37, dtype=np.int32),
        "edge": ramp(101, 333, dtype=np.float64),
    }


def several():
    return ckptmgr.Items(first={**big(), "little": ramp(30)}, second=odd(), data=Iterator())


def distributed():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec("data", "model"))
    return {"w": jax.device_put(ramp(1024, 1024), sharding), "s": jax.device_put(ramp(8, 2))}


SHAPES = {
    "odd": odd,
    "big": big,
    "several items": several,
    "eight devices": distributed,
    "one leaf": lambda: ramp(7),
    "text only": lambda: {"text": "text"},
    "nothing": lambda: {},
    "an iterator only": lambda: ckptmgr.Items(data=Iterator()),
}
STORAGES = [
    {"driver": driver, "compression": compression, "chunk_bytes": 30_000}
    for driver in ("zarr", "zarr3")
    for compression in (None, "zstd")
]


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_nothing_is_wrong_with_good_steps_of_every_shape(storage, tmp_path):
    with open_run(tmp_path, storage=storage) as manager:
        for step, make in enumerate(SHAPES.values()):
            manager.save(step, make(), metrics={"loss": 0.5}, extra={"note": "x"})
        manager.wait()
        infos = manager.steps()
    for info, shape in zip(infos, SHAPES, strict=True):
        found = ckptmgr.verify(tmp_path, info.step)
        assert (found.problems, found.notes, found.unknown) == ((), (), ()), shape
        assert found.good and found.verified
        assert (found.step, found.kind, found.nbytes) == (info.step, "async", info.nbytes)
        assert found.path == str(tmp_path / str(info.step))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Step 3 with two trees and an iterator, twice: in `first` and, with other values, `second`."""
    root = tmp_path_factory.mktemp("made")
    for name, start in (("first", 0), ("second", 5)):
        items = ckptmgr.Items(
            model={
                "big": ramp(200, 600, start=start),
                "little": ramp(300, 2, start=start),
                "text": "x",
            },
            other={"w": ramp(500, 400, start=start + 50)},
            data=Iterator(),
        )
        with open_run(root / name, storage={"chunk_bytes": 100_000}) as manager:
            manager.save(3, items, metrics={"loss": 0.5}).result()
    return root


@pytest.fixture
def step(made, tmp_path):
    """A good step, to be harmed."""
    return pathlib.Path(shutil.copytree(made / "first", tmp_path / "run")) / "3"


def flip(file, at=None):
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    file.write_bytes(data)


def flip_value(step, item, values, at=0):
    """Flips a bit of the byte `at` of the run of `values` in one of the item's data files."""
    for file in step.glob(f"{item}/ocdbt.process_0/d/*"):
        start = file.read_bytes().find(values.tobytes())
        if start >= 0:
            flip(file, start + at)
            return
    raise AssertionError("no data file holds these bytes")


def flip_big(step):
    flip_value(step, "model", ramp(10, 600), 100)


def flip_other(step):
    flip_value(step, "other", ramp(20, 400, start=50), 100)


def data_file(step, item="model"):
    return max(step.glob(f"{item}/ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size)


def lengthen(file):
    with open(file, "ab") as opened:
        opened.write(b"x")


def rewrite(step, **changes):
    """Puts another manifest in place whose own digest is right."""
    file = step / layout.MANIFEST
    document = json.loads(file.read_text())["body"] | changes
    body = json.dumps(document, separators=(",", ":"))
    file.write_text(f'{{"digest":"{manifest.digest(body.encode())}","body":{body}}}\n')


def named(found):
    return {(problem.file, problem.leaf) for problem in found.problems}


def told(found):
    return "\n".join(map(str, found.problems))


METADATA = [
    layout.tree_file("model"),
    layout.receipt_file("other", 0),
    layout.pytree_metadata("model"),
    layout.sharding_file("other"),
    layout.array_metadatas("model", 0),
    layout.state_file("data", 0),
    layout.json_item_file("data"),
    layout.CHECKPOINT_METADATA,
    layout.COMMIT_SUCCESS,
    layout.metrics_file(),
    "model/" + layout.OCDBT_MANIFEST,
]
HARMS = {
    "missing": (lambda file: file.unlink(), "missing"),
    "cut short": (lambda file: file.write_bytes(file.read_bytes()[:-1]), "bytes instead of"),
    "longer": (lengthen, "bytes instead of"),
    "altered": (flip, "has other bytes than were written"),
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", METADATA)
def test_a_harmed_metadata_file_is_named_once(name, harm, step):
    HARMS[harm][0](step / name)
    found = ckptmgr.verify(step)
    ours = [problem for problem in found.problems if problem.file == name]
    assert [HARMS[harm][1] in problem.message for problem in ours] == [True]
    assert not found.good and not found.verified
    if name != "model/" + layout.OCDBT_MANIFEST:  # then no array of the item can be read either
        assert named(found) == {(name, "")}


@pytest.mark.parametrize("harm", ["missing", "cut short", "longer"])
def test_a_harmed_data_file_is_named_and_with_it_the_leaves_that_are_lost(harm, step):
    file = data_file(step)
    HARMS[harm][0](file)
    found = ckptmgr.verify(step)
    assert (str(file.relative_to(step)), "") in named(found)
    assert HARMS[harm][1] in told(found)
    lost = {leaf for _, leaf in named(found)} - {""}
    assert lost >= {"big", "little"} if harm == "missing" else not lost  # the end is a tree node


def test_a_flipped_byte_names_item_leaf_and_box(step):
    flip_big(step)
    found = ckptmgr.verify(step)
    (problem,) = found.problems
    assert (problem.file, problem.leaf, problem.transient) == ("model", "big", False)
    assert "has other bytes than were saved" in problem.message


def test_everything_that_is_wrong_is_told_at_once(step):
    flip(step / layout.pytree_metadata("model"))
    (step / layout.metrics_file()).unlink()
    flip_big(step)
    flip_other(step)
    flip(step / layout.state_file("data", 0))
    lengthen(data_file(step, "other"))
    (step / "core.1234").write_bytes(b"?")
    found = ckptmgr.verify(step)
    assert named(found) == {
        (layout.pytree_metadata("model"), ""),
        (layout.metrics_file(), ""),
        ("model", "big"),
        ("other", "w"),
        (layout.state_file("data", 0), ""),
        (str(data_file(step, "other").relative_to(step)), ""),
    }
    assert found.unknown == ("core.1234",)


def test_an_item_whose_tree_is_damaged_is_not_compared_and_others_are(step):
    flip(step / layout.tree_file("model"))
    flip_big(step)
    flip_other(step)
    found = ckptmgr.verify(step)
    assert named(found) == {(layout.tree_file("model"), ""), ("other", "w")}
    assert found.notes == ("model: not compared, since its own metadata is damaged",)


def test_chunks_of_a_damaged_receipt_are_still_read(step):
    flip(step / layout.receipt_file("other", 0))
    found = ckptmgr.verify(step)
    assert named(found) == {(layout.receipt_file("other", 0), "")}
    document = json.loads((step / layout.MANIFEST).read_text())["body"]
    assert found.nbytes == document["nbytes"]
    assert found.notes == ("other: chunks of a damaged receipt were read and not compared",)
    (step / "other" / layout.OCDBT_MANIFEST).unlink()
    assert ("other", "w") in named(ckptmgr.verify(step))


def test_files_that_nothing_names_are_told_and_are_no_problem(step):
    (step / "model" / ".nfs0001").write_bytes(b"")
    (step / "model" / "ocdbt.process_0" / "d" / "stray").write_bytes(b"x")
    (step / "notes").mkdir()
    (step / "notes" / "a").write_text("x")
    found = ckptmgr.verify(step)
    assert found.good and found.verified
    assert found.unknown == ("model/.nfs0001", "model/ocdbt.process_0/d/stray", "notes/")


def test_a_manifest_of_a_newer_format_says_so_and_nothing_else(step):
    file = step / layout.MANIFEST
    file.write_text(file.read_text().replace('"format":1', '"format":3'))
    flip_big(step)
    found = ckptmgr.verify(step)
    assert [problem.file for problem in found.problems] == [layout.MANIFEST]
    assert "written by format 3, this reads up to 1" in told(found)
    assert found.notes == ("nothing but its manifest was looked at",)


def test_a_manifest_that_is_another_saves_is_named_as_that(step, made):
    shutil.copy(made / "second" / "3" / layout.MANIFEST, step / layout.MANIFEST)
    found = ckptmgr.verify(step)
    assert f"{layout.MANIFEST}: does not fit the step: it is another save's" in told(found)
    assert (layout.receipt_file("model", 0), "") in named(found)


def test_a_manifest_that_says_another_size_of_the_arrays_is_named(step):
    rewrite(step, nbytes=5)
    found = ckptmgr.verify(step)
    assert named(found) == {(layout.MANIFEST, "")}
    assert "says 5 bytes of arrays, the trees say" in told(found)


def test_a_manifest_that_does_not_list_an_items_tree_is_named(step):
    files = json.loads((step / layout.MANIFEST).read_text())["body"]["files"]
    del files[layout.tree_file("other")]
    rewrite(step, files=files)
    flip_big(step)
    found = ckptmgr.verify(step)
    assert named(found) == {("other", ""), ("model", "big")}
    assert "not in the manifest's list of files" in told(found)


def test_a_step_under_another_number_is_named_and_compared_all_the_same(step):
    moved = step.rename(step.with_name("8"))
    flip_big(moved)
    found = ckptmgr.verify(moved)
    assert named(found) == {(layout.MANIFEST, ""), ("model", "big")}
    assert "it is the manifest of step 3; rename the directory" in told(found)


def test_a_step_in_a_directory_of_any_name_is_verified_by_its_manifest(step):
    moved = step.rename(step.with_name("best"))
    found = ckptmgr.verify(moved)
    assert (found.step, found.good, found.verified) == (3, True, True)
    flip_big(moved)
    assert named(ckptmgr.verify(moved)) == {("model", "big")}


def test_a_step_copied_without_names_that_begin_with_an_underscore_is_named_as_that(step):
    for file in [path for path in step.rglob("_*") if path.is_file()]:
        file.unlink()
    flip_big(step)
    found = ckptmgr.verify(step)
    assert named(found) == {(layout.MANIFEST, ""), ("model", "big")}
    assert "every other file whose name begins with '_'" in told(found)


@pytest.mark.parametrize("harm", [lambda file: file.unlink(), flip])
def test_without_its_manifest_the_arrays_of_a_step_are_still_compared(harm, step):
    harm(step / layout.MANIFEST)
    found = ckptmgr.verify(step)
    assert named(found) == {(layout.MANIFEST, "")}
    assert found.nbytes > 10**6
    assert "no metadata file could be compared" in found.notes[0]
    flip_big(step)
    flip_other(step)
    assert named(ckptmgr.verify(step)) == {(layout.MANIFEST, ""), ("model", "big"), ("other", "w")}


@pytest.mark.parametrize("name", [layout.tree_file("model"), layout.receipt_file("model", 0)])
def test_nothing_that_unproven_metadata_says_ends_the_verification(name, step):
    (step / layout.MANIFEST).unlink()
    file = step / name
    before = file.read_bytes()
    for at in range(0, len(before), 7):
        flip(file, at)
        found = ckptmgr.verify(step)
        assert (layout.MANIFEST, "") in named(found)
        file.write_bytes(before)
    file.unlink()
    assert (name, "") in named(ckptmgr.verify(step))


def test_a_step_copied_in_part_is_named_as_that_and_every_missing_file_too(step):
    shutil.rmtree(step / "other")
    found = ckptmgr.verify(step)
    assert "files are missing or cut short: was the step copied only in part?" in told(found)
    files = json.loads((step / layout.MANIFEST).read_text())["body"]["files"]
    lost = {(name, "") for name in files if name.startswith("other/")}
    assert named(found) == lost | {("", "")}


def test_a_step_without_a_single_file_of_anyone_is_told(tmp_path):
    with open_run(tmp_path / "run") as manager:
        manager.save(1, {"w": ramp(3)})
    (tmp_path / "run" / "2").mkdir()
    assert "no manifest of ckptmgr" in told(ckptmgr.verify(tmp_path / "run", 2))
    assert ckptmgr.verify(tmp_path / "run").step == 1  # never was a step


def test_what_is_not_there_is_not_found(step, tmp_path):
    for path, number in ((step.parent, 4), (step.parent / "gone", None), (tmp_path, None)):
        with pytest.raises(ckptmgr.StepNotFound):
            ckptmgr.verify(path, number)
    with pytest.raises(ckptmgr.InvalidOption):
        ckptmgr.verify(step.parent, -1)


def test_the_newest_step_of_a_run_is_verified_although_it_is_damaged(step):
    shutil.copytree(step, step.with_name("2"))
    (step / layout.MANIFEST).unlink()
    found = ckptmgr.verify(step.parent)
    assert (found.step, found.good) == (3, False)


@pytest.mark.parametrize("damaged", [False, True])
def test_progress_begins_at_nothing_and_ends_at_all_damaged_or_not(damaged, step):
    if damaged:
        flip_big(step)
        (step / "other" / layout.OCDBT_MANIFEST).write_bytes(b"nonsense")
    seen = []
    found = ckptmgr.verify(step, progress=lambda done, total: seen.append((done, total)))
    (total,) = {total for _, total in seen}
    assert seen[0] == (0, total) and seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) > 5
    assert found.good != damaged and (found.nbytes == total) != damaged


def test_a_progress_that_raises_ends_it(step):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ckptmgr.verify(step, progress=stop)


def test_from_storage_says_where_the_bytes_came_from(step):
    assert ckptmgr.verify(step).source == "page cache"
    found = ckptmgr.verify(step, from_storage=True)
    assert found.good
    assert found.source in ("storage", "page cache")
    assert bool(found.notes) == (found.source == "page cache")


def test_verifying_needs_no_device_and_changes_nothing(step):
    def state():
        return {
            str(path): (path.lstat().st_mtime_ns, path.lstat().st_size)
            for path in [step.parent, *step.parent.rglob("*")]
        }

    before = state()
    done = run_python(
        """
        import sys
        import jax
        jax.config.update("jax_platforms", "no_such_platform")
        import ckptmgr
        for storage in (False, True):
            found = ckptmgr.verify(sys.argv[1], from_storage=storage)
            assert found.verified, found
        assert ckptmgr.verify(sys.argv[2]).step == 3
        try:
            jax.devices()
        except RuntimeError as exc:
            print("no_such_platform" in str(exc))
        """,
        step,
        step.parent,
        env={"JAX_PLATFORMS": None},
    )
    assert done.stdout == "True\n"
    assert state() == before


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_memory_is_bounded_whatever_the_size_of_the_step(compression, tmp_path):
    leaf = np.random.default_rng(0).random((8, 1024, 1024), np.float32)  # 32 MiB
    with open_run(tmp_path, storage={"compression": compression}) as manager:
        manager.save(1, {"w": leaf[0, :8]})
        manager.save(2, {f"w{i}": leaf for i in range(16)})
    done = run_python(
        """
        import resource, sys
        import ckptmgr
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        assert ckptmgr.verify(sys.argv[1], 1).verified
        before = peak()
        assert ckptmgr.verify(sys.argv[1], 2).nbytes == 512 * 2**20
        print(peak() - before)
        """,
        tmp_path,
    )
    assert float(done.stdout) < 400  # MiB; the step has 512


# -- of a manager -----------------------------------------------------------------------------


def verified(manager):
    """Steps that `steps` and `info` call verified."""
    found = [info.step for info in manager.steps() if info.verified]
    assert found == [info.step for info in manager.steps() if manager.info(info.step).verified]
    return found


def test_a_verified_step_is_on_record_across_restarts(tmp_path):
    with open_run(tmp_path) as manager:
        for number in (1, 2):
            manager.save(number, {"w": ramp(9, start=number)})
        manager.wait()
        assert verified(manager) == []
        assert manager.verify(1) == ()
        assert verified(manager) == [1]
    record = json.loads((tmp_path / "_ckptmgr/verified/1.json").read_text())
    assert sorted(record) == ["attempt", "time"]
    with open_run(tmp_path) as manager:
        assert verified(manager) == [1]
        assert manager.verify() == ()
        assert verified(manager) == [1, 2]
        assert ckptmgr.describe(tmp_path, 2).info.verified


def test_the_record_is_void_when_the_step_is_overwritten_and_goes_with_it(tmp_path):
    with open_run(tmp_path) as manager:
        manager.save(1, {"w": ramp(9)}).result()
        assert manager.verify(1) == ()
        manager.save(1, {"w": ramp(9)}, overwrite=True).result()
        assert verified(manager) == []
        assert manager.verify(1) == ()
        assert verified(manager) == [1]
        manager.delete(1)
        assert list((tmp_path / "_ckptmgr/verified").iterdir()) == []


def test_a_record_that_is_no_record_proves_nothing(tmp_path):
    with open_run(tmp_path) as manager:
        manager.save(1, {"w": ramp(9)}).result()
        assert manager.verify(1) == ()
        for text in ("", "{", "[]", "{}", '{"attempt": "x", "time": 1}'):
            (tmp_path / "_ckptmgr/verified/1.json").write_text(text)
            assert verified(manager) == []


def test_damage_takes_the_record_back_and_puts_nothing_aside(tmp_path):
    with open_run(tmp_path) as manager:
        for number in (1, 2):
            manager.save(number, {"w": ramp(9000, start=number)}).result()
            assert manager.verify() == ()
        flip_value(tmp_path / "2", "default", ramp(9000, start=2))
        (problem,) = manager.verify(2)
        assert (problem.file, problem.leaf) == ("default", "w")
        assert verified(manager) == [1]
        assert manager.latest_step() == 2
        with pytest.raises(ckptmgr.CorruptCheckpoint):
            manager.restore(step=2)
        assert manager.restore_latest({"w": ramp(9000)}).step == 1
        assert manager.latest_step() == 1


def test_a_verified_step_that_is_damaged_later_is_still_an_error_when_restored(tmp_path):
    with open_run(tmp_path) as manager:
        manager.save(1, {"w": ramp(9000)}).result()
        assert manager.verify(1) == ()
        flip_value(tmp_path / "1", "default", ramp(9000))
        assert verified(manager) == [1]
        with pytest.raises(ckptmgr.CorruptCheckpoint, match="leaf w"):
            manager.restore()


def test_a_step_on_record_as_damaged_is_verified_and_the_record_is_named(tmp_path):
    with open_run(tmp_path) as manager:
        manager.save(1, {"w": ramp(9000)}).result()
        manager.save(2, {"w": ramp(9000, start=2)}).result()
        flip_value(tmp_path / "2", "default", ramp(9000, start=2))
        assert manager.restore_latest({"w": ramp(9000)}).step == 1
        problems = manager.verify()
        assert [problem.file for problem in problems] == [layout.damaged_name(2), "default"]
        assert not (tmp_path / layout.verified_name(2)).exists()


def test_a_read_only_manager_verifies_and_records_nothing(tmp_path):
    with open_run(tmp_path) as manager:
        manager.save(1, {"w": ramp(9)}).result()
    with open_run(tmp_path, read_only=True) as manager:
        assert manager.verify(1) == ()
        assert verified(manager) == []
    assert not (tmp_path / "_ckptmgr/verified").exists()


def test_a_heartbeat_is_verified_from_the_start(tmp_path):
    with open_run(tmp_path, heartbeat=ckptmgr.Heartbeat(every_saves=2)) as manager:
        infos = [manager.save(number, {"w": ramp(9)}).result() for number in range(4)]
        assert [info.verified for info in infos] == [info.kind == "heartbeat" for info in infos]
        assert verified(manager) == [info.step for info in infos if info.kind == "heartbeat"] != []


def test_a_step_that_is_not_there_is_not_found_and_a_closed_manager_refuses(tmp_path):
    with open_run(tmp_path) as manager:
        with pytest.raises(ckptmgr.StepNotFound):
            manager.verify()
        manager.save(1, {"w": ramp(9)})
        with pytest.raises(ckptmgr.StepNotFound):
            manager.verify(2)
        assert manager.verify(1) == ()  # which may still have been in flight
    with pytest.raises(ckptmgr.ManagerClosed):
        manager.verify(1)


def test_saves_go_on_while_a_step_is_verified(tmp_path):
    reached, go_on = threading.Event(), threading.Event()

    def pause(done, total):
        reached.set()
        assert go_on.wait(30)

    with open_run(tmp_path) as manager:
        manager.save(1, {"w": ramp(9)}).result()
        found = []
        thread = threading.Thread(target=lambda: found.append(manager.verify(1, progress=pause)))
        thread.start()
        assert reached.wait(30)
        manager.save(2, {"w": ramp(9)}).result(30)
        assert manager.restore(step=1)["w"].shape == (9,)
        go_on.set()
        thread.join(30)
        assert found == [()]


def test_a_step_that_is_replaced_while_it_is_verified_is_verified_anew(tmp_path):
    with open_run(tmp_path) as manager:
        manager.save(1, {"w": ramp(90_000)}).result()
        left = [1]

        def replace(done, total):
            if left:
                left.pop()
                manager.save(1, {"w": ramp(90_000, start=1)}, overwrite=True).result()

        found = ckptmgr.verify(tmp_path, 1, progress=replace)
        assert found.good and not left
        assert found.attempt == json.loads((tmp_path / "1/_CKPTMGR").read_text())["body"]["attempt"]
        with pytest.raises(ckptmgr.StepNotFound, match="deleted"):
            manager.verify(1, progress=lambda done, total: shutil.rmtree(tmp_path / "1", True))


def test_a_suspect_step_is_verified_and_said_to_be_suspect(tmp_path):
    with open_run(tmp_path) as manager:
        manager.save(1, {"w": ramp(9)}).result()
        attempt = json.loads((tmp_path / "1/_CKPTMGR").read_text())["body"]["attempt"]
        (tmp_path / "_ckptmgr/suspect").mkdir()
        record = {"attempt": attempt, "reason": "torn"}
        (tmp_path / "_ckptmgr/suspect/1.json").write_text(json.dumps(record))
        assert manager.info(1).status == "suspect"
        found = ckptmgr.verify(tmp_path, 1)
        assert found.good and found.notes == ("suspect: torn",)


# -- what Orbax wrote -------------------------------------------------------------------------

NO_DIGESTS = "not verified: written by Orbax, which records no digests"


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    root = tmp_path_factory.mktemp("golden")
    for name in goldens.NAMES:
        goldens.unpack(name, root)
    return root


def test_no_directory_that_orbax_finished_is_called_damaged(golden):
    count = 0
    for version in sorted(golden.iterdir()):
        for path in sorted(version.rglob("*")):
            if (
                not path.is_dir()
                or "uncommitted" in path.parts
                or "orbax-checkpoint" in str(path.relative_to(version))
            ):
                continue
            try:
                found = ckptmgr.verify(path)
            except ckptmgr.StepNotFound:  # neither a step nor an item
                continue
            assert found.problems == (), path
            assert found.kind == "foreign" and not found.verified
            assert found.notes[-1] == NO_DIGESTS
            count += 1
    assert count > 150


def test_an_array_of_orbax_that_cannot_be_read_is_named_and_others_are_read(golden, tmp_path):
    source = golden / "orbax-0.12.8" / "pytree_zarr_noocdbt"
    item = pathlib.Path(shutil.copytree(source, tmp_path / "item"))
    whole = ckptmgr.verify(item)
    assert whole.good and whole.nbytes > 0
    gone, short = item / "params.embed.embedding", item / "opt_state.1.0.mu.layer_0.bias"
    (gone / ".zarray").unlink()
    chunk = max(short.iterdir(), key=lambda path: path.name)
    chunk.write_bytes(b"?")
    found = ckptmgr.verify(item)
    assert {problem.leaf for problem in found.problems} == {gone.name, short.name}
    assert 0 < found.nbytes < whole.nbytes


def test_every_item_of_orbax_that_is_damaged_is_named(golden, tmp_path):
    source = golden / "orbax-0.12.8" / "manager_legacy_dict"
    run = pathlib.Path(shutil.copytree(source, tmp_path / "run"))
    with open_run(run) as manager:
        assert manager.verify(3) == ()
        assert verified(manager) == []
    (run / "3" / "state" / "_METADATA").write_text("{broken")
    (run / "3" / layout.metrics_file()).write_text("{broken")
    found = ckptmgr.verify(run, 3)
    assert named(found) == {("state/_METADATA", ""), (layout.metrics_file(), "")}
    assert ckptmgr.verify(run, 2).good
