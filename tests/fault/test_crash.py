"""Processes that are killed, what they leave, and who may clean it up."""

import itertools
import json
import os
import pathlib
import shutil

import pytest

import ckptmgr
from ckptmgr.core import layout
from ckptmgr.testing import Fault, Hold
from tests.fault.common import (
    LIMIT,
    age,
    assert_state,
    bury_owners,
    faulty,
    join_sweep,
    leftovers,
    manager,
    numbers,
    reader,
    state,
    swept,
    write_dead_intent,
)
from tests.support import run_python

ATTEMPT = "0123456789abcdef"

KILL_AT_RANDOM = """
    import gc, os, random, signal, sys, time, traceback
    import jax, jax.numpy, numpy, ckptmgr  # imported once; every fork starts with them
    from tests.fault import common

    root, rounds, rng = sys.argv[1], int(sys.argv[2]), random.Random(int(sys.argv[3]))

    def live(ready):
        found = common.swept(root, retention=ckptmgr.KeepLast(2), heartbeat=None)
        assert common.leftovers(root) == [], common.leftovers(root)
        there = common.numbers(found)
        assert len([n for n in os.listdir(root) if n != "_ckptmgr"]) == len(there)
        last = found.restore_latest(None)
        number = 0
        if last is not None:
            assert last.skipped == () and last.step == there[-1], last
            common.assert_state(last.state, last.step)
            number = last.step + 1
        if there:  # the step that may have been cut off, once more
            found.save(number, common.state(number)).result()
            found.wait()  # what was to go when death came, goes with the next step
            assert common.numbers(found) == (*there, number)[-2:], there
            found.save(number, common.state(number), overwrite=True)
        os.write(ready, f"{number}\\n".encode())
        while True:
            number += 1
            found.save(number, common.state(number))
            if number % 3 == 0:
                found.save(number, common.state(number), overwrite=True)

    gc.freeze()  # a collection in a fork would copy every page: 0.1 s each
    for round in range(rounds):
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                live(theirs)
            except BaseException:
                traceback.print_exc()
            os._exit(9)
        os.close(theirs)
        said = os.read(ours, 100).decode().strip()
        time.sleep(rng.uniform(0, 0.4))  # the moment of death, not a wait
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        os.close(ours)
        assert os.WIFSIGNALED(status), (round, status)
        print(said, flush=True)
    """


def test_after_kills_at_random_moments_the_latest_step_is_bit_exact_and_bytes_stay_bounded(
    tmp_path,
):
    done = run_python(KILL_AT_RANDOM, tmp_path, 15, 7, timeout=100)
    begun = [int(line) for line in done.stdout.split()]
    assert len(begun) == 15
    assert begun == sorted(begun) and begun[-1] > begun[0]  # no start found less than the last
    with swept(tmp_path) as found:
        assert leftovers(tmp_path) == []
        last = found.restore_latest(None)
        assert last.skipped == ()
        assert_state(last.state, last.step)


def make_temporary(root, step=30, attempt=ATTEMPT, files=1):
    """The directory of an attempt that did not get far."""
    temporary = pathlib.Path(root, layout.tmp_name(step, attempt))
    (temporary / "default").mkdir(parents=True)
    for number in range(files):
        (temporary / "default" / f"file_{number}").touch()
    return temporary


def test_a_temporary_directory_is_never_taken_for_a_step(tmp_path):
    with manager(tmp_path) as found:
        found.save(3, state(3)).result()
    make_temporary(tmp_path, 30)
    shutil.copytree(tmp_path / "3", tmp_path / layout.tmp_name(4, ATTEMPT))
    with reader(tmp_path) as found:
        assert numbers(found) == (3,)
        assert found.latest_step() == 3
        assert found.restore_latest(None).skipped == ()
        with pytest.raises(ckptmgr.StepNotFound, match="no step 30"):
            found.restore(step=30)


def test_a_leftover_of_a_dead_process_does_not_block_its_step_and_is_removed(tmp_path):
    temporary = make_temporary(tmp_path, 30)
    write_dead_intent(tmp_path, 30, ATTEMPT)
    with manager(tmp_path) as found:
        found.save(30, state(30)).result(LIMIT)
        assert_state(found.restore(), 30)
        join_sweep()
    assert not temporary.exists()
    assert leftovers(tmp_path) == []


def test_a_leftover_that_cannot_be_removed_does_not_block_its_step(tmp_path):
    make_temporary(tmp_path, 30)
    write_dead_intent(tmp_path, 30, ATTEMPT)
    with manager(tmp_path, store=faulty(tmp_path, Fault("remove_tree", for_good=True))) as found:
        join_sweep()
        found._store.arm()  # the store works again; the leftover is still there
        assert leftovers(tmp_path) != []
        found.save(30, state(30)).result(LIMIT)
        assert_state(found.restore(), 30)


def test_a_temporary_directory_without_an_owner_is_left_alone_and_does_not_block(tmp_path):
    temporary = make_temporary(tmp_path, 30)
    with swept(tmp_path) as found:
        found.save(30, state(30)).result(LIMIT)
        assert numbers(found) == (30,)
    assert temporary.exists()


def test_the_live_temporary_directory_of_this_process_survives_another_manager(tmp_path):
    hold = Hold("sync_tree")
    with manager(tmp_path, store=faulty(tmp_path, hold)) as found:
        handle = found.save(5, state(5))
        assert hold.reached.wait(LIMIT)
        try:
            with swept(tmp_path) as other:
                assert numbers(other) == ()
        finally:
            hold.release()
        handle.result(LIMIT)
        assert_state(found.restore(), 5)


LIVE_WRITER = """
    import os, sys
    import jax, jax.numpy, numpy, ckptmgr
    from ckptmgr.testing import Hold
    from tests.fault import common

    root = sys.argv[1]
    to_child, from_parent = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        hold = Hold("sync_tree")
        found = common.manager(root, store=common.faulty(root, hold))
        handle = found.save(5, common.state(5))
        assert hold.reached.wait(common.LIMIT)
        os.write(from_parent[1], b"held")
        os.read(to_child[0], 1)
        hold.release()
        handle.result(common.LIMIT)
        os._exit(0)
    assert os.read(from_parent[0], 4) == b"held"
    other = common.swept(root)
    print(*[name for name in os.listdir(root) if "tmp" in name])
    print(common.numbers(other), other.latest_step(), other.restore_latest(None))
    os.write(to_child[1], b"g")
    assert os.waitpid(pid, 0)[1] == 0
    common.assert_state(other.restore(), 5)
    print(common.numbers(other))
    """


def test_the_live_temporary_directory_of_another_process_survives_a_start(tmp_path):
    temporary, before, after = run_python(LIVE_WRITER, tmp_path).stdout.splitlines()
    assert layout.parse_tmp(temporary)[0] == 5
    assert before == "() None None"
    assert after == "(5,)"


def second_rename_to(step):
    """Of an overwrite without exchange: the first finds the step in its way, this replaces it."""
    seen = itertools.count(1)
    return lambda op: op.name == "rename" and op.target == str(step) and next(seen) == 2


def test_the_old_step_survives_the_start_of_another_manager_in_the_middle_of_an_overwrite(
    tmp_path,
):
    with manager(tmp_path) as found:
        found.save(2, state(20)).result()
    store = faulty(tmp_path, exchange=False)
    with manager(tmp_path, store=store) as found:
        hold = Hold(second_rename_to(2))
        store.arm(hold, Fault(second_rename_to(2)))
        handle = found.save(2, state(21), overwrite=True)
        assert hold.reached.wait(LIMIT)
        try:
            swept(tmp_path).close()
        finally:
            hold.release()
        with pytest.raises(ckptmgr.SaveFailed):
            handle.result(LIMIT)
        assert_state(found.restore(step=2), 20)


def cut_an_overwrite_in_two(root):
    """Step 2 lies neither here nor there: the old one in the trash, the new one temporary."""
    with manager(root) as found:
        found.save(2, state(20)).result()
    store = faulty(root, exchange=False)
    with manager(root, store=store, on_save_error="warn") as found:
        store.arm(Fault(second_rename_to(2), for_good=True))
        assert found.save(2, state(21), overwrite=True).join(LIMIT)
    assert numbers(reader(root)) == ()
    (intent,) = (root / layout.intents_dir()).iterdir()
    return intent


def test_an_overwrite_that_a_dead_process_began_is_finished_at_the_next_start(tmp_path):
    cut_an_overwrite_in_two(tmp_path)
    bury_owners(tmp_path)
    with manager(tmp_path) as found:
        assert_state(found.restore(step=2), 21)
        join_sweep()
    assert leftovers(tmp_path) == []


def test_an_overwrite_that_a_process_of_another_host_began_long_ago_is_not_swept_away(tmp_path):
    intent = cut_an_overwrite_in_two(tmp_path)
    intent.write_text(json.dumps({**json.loads(intent.read_text()), "host": "elsewhere"}))
    age(tmp_path)
    with swept(tmp_path):
        pass
    with swept(tmp_path) as found:
        assert numbers(found) == (2,)
        assert found.restore(step=2)["n"] in (20, 21)


def test_an_overwrite_that_a_process_of_another_host_is_in_the_middle_of_loses_nothing(tmp_path):
    intent = cut_an_overwrite_in_two(tmp_path)
    intent.write_text(json.dumps({**json.loads(intent.read_text()), "host": "elsewhere"}))
    swept(tmp_path).close()
    assert (tmp_path / layout.trash_name(2, intent.stem) / layout.MANIFEST).exists()
    assert (tmp_path / layout.tmp_name(2, intent.stem) / layout.MANIFEST).exists()


def test_an_intent_cut_short_does_not_keep_its_leftovers_for_ever(tmp_path):
    make_temporary(tmp_path, 30)
    write_dead_intent(tmp_path, 30, ATTEMPT)
    intent = tmp_path / layout.intent_name(ATTEMPT)
    intent.write_text(intent.read_text()[:20])
    age(tmp_path)
    swept(tmp_path).close()
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("kind", ["file", "link"])
def test_an_odd_thing_in_the_trash_does_not_stop_the_sweep(kind, tmp_path):
    trash = tmp_path / layout.trash_dir()
    trash.mkdir(parents=True)
    if kind == "file":
        (trash / "0-odd").write_text("?")
    else:
        (trash / "0-odd").symlink_to(tmp_path)
    make_temporary(tmp_path, 30)
    write_dead_intent(tmp_path, 30, ATTEMPT)
    swept(tmp_path).close()
    assert [name for name in leftovers(tmp_path) if "odd" not in name] == []


def test_a_leftover_of_20000_files_delays_neither_the_constructor_nor_a_restore(tmp_path):
    with manager(tmp_path) as found:
        found.save(1, state(1)).result()
    temporary = make_temporary(tmp_path, 30, files=20_000)
    write_dead_intent(tmp_path, 30, ATTEMPT)
    hold = Hold("remove_tree")
    with manager(tmp_path, store=faulty(tmp_path, hold)) as found:
        assert hold.reached.wait(LIMIT)  # the sweep waits; the constructor has returned
        assert_state(found.restore(), 1)
        found.save(2, state(2)).result(LIMIT)
        assert len(os.listdir(temporary / "default")) == 20_000
        hold.release()
        join_sweep()
    assert not temporary.exists()
