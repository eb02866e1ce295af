"""Odd things in the root, odd roots, and two writers of one step."""

import os
import shutil
import threading

import pytest

import ckptmgr
from ckptmgr.core import layout
from ckptmgr.testing import Fault
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

TWO_WRITERS = """
    import gc, os, sys
    import jax, jax.numpy, numpy, ckptmgr
    from tests.fault import common

    base, rounds, overwrite = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "overwrite"

    def write(number, ready, go, out):
        found = common.manager(root)
        common.join_sweep()
        common.state(number)["w"].block_until_ready()
        os.write(ready, b"r")
        os.read(go, 1)
        try:
            found.save(7, common.state(number), overwrite=overwrite).result()
            said = "won"
        except ckptmgr.StepExists:
            said = "exists"
        except ckptmgr.SaveFailed as exc:
            cause = exc.__cause__
            said = "exists" if isinstance(cause, ckptmgr.StepExists) else repr(exc)
        os.write(out, f"{number} {said}\\n".encode())

    gc.freeze()  # a collection in a fork would copy every page: 0.1 s each
    for round in range(rounds):
        root = os.path.join(base, str(round))
        (r0, w0), (r1, w1), (r2, w2) = os.pipe(), os.pipe(), os.pipe()
        pids = []
        for number in (100, 200):
            pid = os.fork()
            if pid == 0:
                try:
                    write(number, w0, r1, w2)
                finally:
                    os._exit(0)
            pids.append(pid)
        ready = b""
        while len(ready) < 2:
            ready += os.read(r0, 2)
        os.write(w1, b"go")
        for pid in pids:
            os.waitpid(pid, 0)
        os.close(w2)
        print(os.read(r2, 1000).decode().replace("\\n", ";"), flush=True)
        for end in (r0, w0, r1, w1, r2):
            os.close(end)
    """


@pytest.mark.parametrize("how", ["save", "overwrite"])
def test_of_two_processes_that_save_one_step_at_once_one_wins_whole(how, tmp_path):
    rounds = 12
    lines = run_python(TWO_WRITERS, tmp_path, rounds, how, timeout=100).stdout.splitlines()
    assert len(lines) == rounds
    for round, line in enumerate(lines):
        said = dict(part.split(" ", 1) for part in line.split(";") if part)
        wanted = ["exists", "won"] if how == "save" else ["won", "won"]
        assert sorted(said.values()) == wanted, line
        with swept(tmp_path / str(round)) as found:
            assert numbers(found) == (7,)
            got = found.restore()
            assert_state(got, got["n"])
            assert said[str(got["n"])] == "won"
            assert leftovers(tmp_path / str(round)) == []


def test_of_two_managers_that_save_one_step_at_once_one_wins_whole(tmp_path):
    for round in range(20):
        root = tmp_path / str(round)
        both = [manager(root), manager(root)]
        start = threading.Barrier(2)
        said = {}

        def save(number, found, start=start, said=said):
            start.wait(LIMIT)
            try:
                found.save(7, state(number)).result(LIMIT)
                said[number] = "won"
            except ckptmgr.StepExists as exc:
                said[number] = exc.step
            except ckptmgr.SaveFailed as exc:
                said[number] = exc.__cause__.step

        threads = [threading.Thread(target=save, args=(n, m)) for n, m in enumerate(both)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert set(said.values()) == {"won", 7}, said
        winner = next(number for number, what in said.items() if what == "won")
        assert_state(both[0].restore(step=7), winner)
        for found in both:
            found.close()


ODDITIES = ("900", "901", "902", "903", "904.tmp", "best", "12_backup", "905", "906", "007", "-1")


def make_oddities(root):
    (root / "900").mkdir()
    (root / "901" / "default" / "d").mkdir(parents=True)
    for file in (root / "3" / "default" / "d").iterdir():
        shutil.copy(file, root / "901" / "default" / "d")
    shutil.copytree(root / "3", root / "902")
    (root / "902" / layout.MANIFEST).unlink()
    (root / "903").write_text("a file")
    for name in ("904.tmp", "best", "12_backup", "007", "-1"):
        (root / name).mkdir()
    (root / "905").symlink_to(root / "3")
    (root / "906").symlink_to(root / "nowhere")


def test_oddities_in_the_root_are_neither_believed_nor_deleted(tmp_path, caplog):
    with manager(tmp_path) as found:
        found.save(2, state(2)).result()
        found.save(3, state(3)).result()
    make_oddities(tmp_path)
    caplog.clear()
    with swept(tmp_path, retention=ckptmgr.KeepLast(2)) as found:
        assert numbers(found) == (2, 3)
        assert found.latest_step() == 3
        assert_state(found.restore(), 3)
        latest = found.restore_latest(None)
        assert latest.step == 3
        assert {skipped.step for skipped in latest.skipped} <= {900, 901, 902, 905}
        found.save(4, state(4)).result()
        found.wait()
        assert numbers(found) == (3, 4)
    for name in ODDITIES:
        assert os.path.lexists(tmp_path / name), name
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == len(set(warned)) <= len(ODDITIES)


@pytest.mark.parametrize("step", [900, 901, 902, 903, 905, 906])
def test_a_save_moves_an_oddity_that_bears_its_step_aside(step, tmp_path):
    with manager(tmp_path) as found:
        found.save(3, state(3)).result()
        make_oddities(tmp_path)
        found.save(step, state(step)).result(LIMIT)
        assert_state(found.restore(step=step), step)
        assert_state(found.restore(step=3), 3)
    if step != 900:  # an empty directory holds nothing to keep
        aside = list((tmp_path / "_ckptmgr" / "quarantine").iterdir())
        assert [path.name.split("-")[0] for path in aside] == [str(step)]


@pytest.mark.parametrize("step", [903, 905, 906])
def test_what_is_not_a_directory_cannot_be_deleted_as_a_step(step, tmp_path):
    with manager(tmp_path) as found:
        found.save(3, state(3)).result()
        make_oddities(tmp_path)
        with pytest.raises(ckptmgr.StepNotFound, match=str(step)):
            found.delete(step)
        assert os.path.lexists(tmp_path / str(step))
        assert_state(found.restore(step=3), 3)


def test_a_damaged_step_can_be_deleted(tmp_path):
    with manager(tmp_path) as found:
        for step in (1, 2):
            found.save(step, state(step)).result()
        (tmp_path / "2" / layout.MANIFEST).unlink()
        found.delete(2)
        assert not (tmp_path / "2").exists()
        assert numbers(found) == (1,)


# -- one level too deep or too high -----------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    """A run's directory with step 3, below a directory with nothing else."""
    root = tmp_path / "above" / "run"
    with manager(root) as found:
        found.save(3, state(3)).result()
    join_sweep()
    return root


def test_a_manager_refuses_the_directory_of_a_step_and_names_the_right_one(run):
    before = contents(run)
    for wrong in (run / "3", run / "3" / "default"):
        with pytest.raises(ckptmgr.InvalidOption) as caught:
            manager(wrong)
        assert str(wrong) in str(caught.value)
        assert str(run) in str(caught.value).replace(str(wrong), "")
    assert contents(run) == before


def test_a_manager_refuses_a_file(run):
    with pytest.raises(ckptmgr.StoreError, match=r"run/3/_CKPTMGR"):
        manager(run / "3" / layout.MANIFEST)


def test_restore_of_a_step_directory_works_and_of_other_levels_names_the_right_one(run):
    assert_state(ckptmgr.restore(run / "3"), 3)
    assert_state(ckptmgr.restore(run), 3)
    with pytest.raises(ckptmgr.StepNotFound, match=f"pass {run / '3'}"):
        ckptmgr.restore(run / "3" / "default")
    with pytest.raises(ckptmgr.StepNotFound, match=f"{run} has"):
        ckptmgr.restore(run.parent)
    with pytest.raises(ckptmgr.StepNotFound, match="is a file"):
        ckptmgr.restore(run / "3" / layout.MANIFEST)
    with pytest.raises(ckptmgr.StepNotFound, match="does not exist"):
        ckptmgr.restore(run / "nowhere")


def test_a_reader_of_a_missing_directory_creates_nothing_and_says_so(tmp_path):
    with reader(tmp_path / "no" / "where") as found:
        assert found.steps() == ()
        assert found.latest_step() is None
        assert found.restore_latest(None) is None
        with pytest.raises(ckptmgr.StepNotFound, match=str(tmp_path / "no" / "where")):
            found.restore()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_root_is_made_with_its_parents_before_retention_looks_into_it(tmp_path):
    root = tmp_path / "a" / "b" / "c"
    with manager(root, retention=ckptmgr.KeepLast(2)) as found:
        for step in (1, 2, 3):
            found.save(step, state(step)).result()
        found.wait()
        assert numbers(found) == (2, 3)


def test_a_root_that_was_removed_between_two_saves_is_made_again_or_named_in_an_error(tmp_path):
    root = tmp_path / "run"
    with manager(root, retention=ckptmgr.KeepLast(2), on_save_error="warn") as found:
        found.save(1, state(1)).result()
        found.wait()
        shutil.rmtree(root)
        assert found.steps() == ()
        try:
            found.save(2, state(2)).result()
        except ckptmgr.SaveFailed as exc:
            assert str(root) in str(exc)
        else:
            assert_state(found.restore(step=2), 2)


def test_a_step_that_somebody_else_removed_is_no_error_for_retention_or_deletion(tmp_path):
    with manager(tmp_path, retention=ckptmgr.KeepLast(1)) as found:
        found.save(1, state(1)).result()
        found.wait()
        shutil.rmtree(tmp_path / "1")
        found.save(2, state(2)).result()
        found.wait()
        assert numbers(found) == (2,)
        shutil.rmtree(tmp_path / "2")
        with pytest.raises(ckptmgr.StepNotFound, match="no step 2"):
            found.delete(2)


def test_a_failed_write_of_any_file_publishes_nothing_for_a_new_process(tmp_path):
    with manager(tmp_path) as found:
        found.save(1, state(1)).result()
    store = faulty(tmp_path)
    with manager(tmp_path, store=store) as found:
        store.arm()
        found.save(2, state(2), metrics={"loss": 1.0}, extra="x").result()
        found.delete(2)
        writes = [op.path.partition("/")[2] for op in store.operations if op.name == "write_file"]
        kinds = {name.rpartition("/")[2] for name in writes}
        wanted = {layout.MANIFEST, "_METADATA", "tree.json", "metrics", "receipt.process_0.json"}
        assert kinds >= wanted | {layout.CHECKPOINT_METADATA, layout.COMMIT_SUCCESS}
        arrays = [
            ("arrays", n) for n in range(1, sum(o.name == "arrays" for o in store.operations))
        ]
        for name, n in [*(("write_file", n) for n in range(1, len(writes) + 1)), *arrays]:
            seen = iter(range(1, 1000))
            store.arm(Fault(lambda op, a=name, n=n, s=seen: op.name == a and next(s) == n))
            with pytest.raises(ckptmgr.SaveFailed, match="step 2"):
                found.save(2, state(2), metrics={"loss": 1.0}, extra="x").result()
            other = reader(tmp_path)
            assert other.latest_step() == 1
            assert_state(other.restore(), 1)
