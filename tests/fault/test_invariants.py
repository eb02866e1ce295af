"""The seven promises of the design, I1 to I7, each proved by the test of its name."""

import pathlib
import threading

import pytest

import ckptmgr
from ckptmgr.core import layout
from ckptmgr.testing import Fault, Hold
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


def test_I1_a_committed_step_never_changes_except_as_a_whole_by_an_asked_for_overwrite(tmp_path):
    store = faulty(tmp_path)
    with manager(tmp_path, store=store) as found:
        found.save(1, state(1)).result()
        found.save(2, state(20)).result()
        before = {step: contents(tmp_path / step) for step in ("1", "2")}
        found.save(3, state(3)).result()
        found.restore(step=2)
        with pytest.raises(ckptmgr.StepExists):
            found.save(2, state(21))
        store.arm(Fault("sync_tree"))
        with pytest.raises(ckptmgr.SaveFailed):
            found.save(2, state(21), overwrite=True).result()
        found.delete(3)
        swept(tmp_path).close()
        assert {step: contents(tmp_path / step) for step in ("1", "2")} == before

        hold = Hold("exchange")
        store.arm(hold)
        handle = found.save(2, state(21), overwrite=True)
        assert hold.reached.wait(LIMIT)
        assert contents(tmp_path / "2") == before["2"]  # to the last moment
        assert_state(reader(tmp_path).restore(step=2), 20)
        hold.release()
        handle.result(LIMIT)
        assert contents(tmp_path / "1") == before["1"]
        assert not set(contents(tmp_path / "2").values()) & {before["2"]["_CKPTMGR"]}
        assert_state(found.restore(step=2), 21)


@pytest.mark.parametrize("manifest", ["missing", "empty", "cut short", "of another step"])
def test_I2_a_step_without_a_valid_manifest_is_never_listed_counted_restored_or_overwritten_silently(
    manifest, tmp_path, caplog
):
    with manager(tmp_path) as found:
        for step in (1, 2, 3):
            found.save(step, state(step)).result()
    file = tmp_path / "3" / layout.MANIFEST
    if manifest == "missing":
        file.unlink()
    elif manifest == "empty":
        file.write_bytes(b"")
    elif manifest == "cut short":
        file.write_bytes(file.read_bytes()[:-40])
    else:
        file.write_bytes((tmp_path / "2" / layout.MANIFEST).read_bytes())
    damaged = contents(tmp_path / "3")
    with manager(tmp_path, retention=ckptmgr.KeepLast(2)) as found:
        assert numbers(found) == (1, 2)
        assert found.latest_step() == 2
        assert_state(found.restore(), 2)
        for call in (lambda: found.restore(step=3), lambda: found.info(3)):
            with pytest.raises(ckptmgr.CorruptCheckpoint, match=r"step 3 .*_CKPTMGR") as caught:
                call()
            assert caught.value.step == 3
        found.save(4, state(4)).result(LIMIT)
        found.wait()
        assert numbers(found) == (2, 4)  # the damaged one did not count
        assert contents(tmp_path / "3") == damaged
        caplog.clear()
        found.save(3, state(30)).result(LIMIT)
        assert_state(found.restore(step=3), 30)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and "step 3" in said[0] and "quarantine" in said[0]
    (aside,) = (tmp_path / layout.quarantine_name(3, "")).parent.glob("3-*")
    assert contents(aside) == damaged


def test_I3_a_key_is_written_once_by_one_process_in_one_attempt(tmp_path):
    store = faulty(tmp_path)
    with manager(tmp_path, store=store) as found:
        for save in range(4):
            store.arm()
            found.save(1, state(save), overwrite=True, metrics={"loss": 1.0}).result()
            found.wait()
            written = [op.path for op in store.operations if op.name == "write_file"]
            assert len(written) == len(set(written)) > 8
    assert leftovers(tmp_path) == []


def test_I3_two_attempts_at_one_step_share_no_path(tmp_path):
    stores = [faulty(tmp_path) for _ in range(2)]
    for store in stores:
        with manager(tmp_path, store=store) as found:
            store.arm(Fault("sync_tree"))
            with pytest.raises(ckptmgr.SaveFailed):
                found.save(1, state(1)).result()
    first, second = (
        {op.path for op in store.operations if op.name in ("write_file", "arrays")}
        for store in stores
    )
    assert len(first) > 8
    assert first & second == set()


def test_I4_deletion_removes_the_truth_first_the_bytes_later(tmp_path):
    with manager(tmp_path) as found:
        for step in (1, 2):
            found.save(step, state(step)).result()
    hold = Hold("remove_tree")
    store = faulty(tmp_path, hold, Fault("remove_tree"))
    with manager(tmp_path, store=store) as found:
        failed = []

        def delete():
            try:
                found.delete(2)
            except ckptmgr.StoreError as exc:
                failed.append(exc)

        thread = threading.Thread(target=delete)
        thread.start()
        assert hold.reached.wait(LIMIT)
        assert not (tmp_path / "2").exists()  # gone from view, in one rename
        assert numbers(reader(tmp_path)) == (1,)
        (trash,) = (tmp_path / layout.trash_dir()).iterdir()
        assert (trash / layout.MANIFEST).exists()  # while all the bytes are there
        hold.release()
        thread.join(LIMIT)
        assert len(failed) == 1
        assert numbers(found) == (1,)
    with swept(tmp_path) as found:
        assert leftovers(tmp_path) == []
        found.save(2, state(22)).result()
        assert_state(found.restore(step=2), 22)


def test_I5_only_committed_steps_count_and_after_a_failed_save_nothing_is_deleted(tmp_path):
    (tmp_path / "900").mkdir()
    store = faulty(tmp_path)
    with manager(tmp_path, store=store, retention=ckptmgr.KeepLast(2)) as found:
        for step in (1, 2):
            found.save(step, state(step)).result()
        found.wait()
        for step in (3, 4, 5):
            store.arm(Fault("sync_tree"))
            with pytest.raises(ckptmgr.SaveFailed):
                found.save(step, state(step)).result()
            assert numbers(found) == (1, 2)
            assert not any(op.path in ("1", "2") for op in store.operations)
        store.arm()
        found.save(6, state(6)).result()
        found.wait()
        assert numbers(found) == (2, 6)
    assert (tmp_path / "900").is_dir()


def _data_files(step):
    root = pathlib.Path(step)
    return [p for p in root.rglob("*") if p.is_file() and p.parent.name == "d"]


@pytest.mark.parametrize("harm", ["missing", "cut short", "altered", "zeros"])
def test_I6_a_missing_or_altered_chunk_is_an_error_never_data(harm, tmp_path):
    with manager(tmp_path) as found:
        found.save(1, state(1)).result()
        for file in _data_files(tmp_path / "1"):
            before = file.read_bytes()
            if harm == "missing":
                file.unlink()
            elif harm == "cut short":
                file.write_bytes(before[:-1])
            elif harm == "altered":
                file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
            else:
                file.write_bytes(bytes(len(before)))
            try:
                assert_state(found.restore(step=1), 1)
                assert harm in ("altered", "zeros")  # bytes that nothing points to
            except ckptmgr.CorruptCheckpoint as exc:
                assert exc.step == 1 and exc.problems
                if harm in ("missing", "cut short"):
                    assert str(file.relative_to(tmp_path / "1")) in str(exc)
            file.write_bytes(before)
        assert_state(found.restore(step=1), 1)


def test_I7_a_failed_save_changes_no_earlier_step_and_no_answer_of_the_manager(tmp_path):
    store = faulty(tmp_path)
    with manager(tmp_path, store=store, retention=ckptmgr.KeepLast(2)) as found:
        for step in (1, 2):
            found.save(step, state(step), metrics={"loss": float(step)}).result()
        found.wait()

        def answers():
            return found.steps(), found.latest_step(), found.info(2), found.should_save(3)

        before, bytes_before = answers(), contents(tmp_path)
        for where in ("make_dir", "arrays", "sync_tree", "sync_path", "rename"):
            store.arm(Fault(where))
            with pytest.raises(ckptmgr.SaveFailed) as caught:
                found.save(3, state(3)).result()
            assert caught.value.step == 3
            assert answers() == before
            assert contents(tmp_path) == bytes_before
            found.check()  # told once, by result()
        store.arm()
        found.save(3, state(3)).result()
        found.wait()
        assert numbers(found) == (2, 3)
    join_sweep()
