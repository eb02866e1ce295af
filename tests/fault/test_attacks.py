"""Ways in which a stranger tried to lose steps or get wrong values, and did at first."""

import concurrent.futures
import threading

import jax
import numpy as np
import pytest

import ckptmgr
from ckptmgr.core import layout
from tests.fault.common import (
    LIMIT,
    assert_state,
    faulty,
    leftovers,
    manager,
    numbers,
    reader,
    state,
    target,
)
from tests.support import run_python


def test_values_of_64_bits_are_refused_rather_than_cut_where_jax_has_32(tmp_path):
    run_python(
        """
        import sys, jax, jax.numpy as jnp, ckptmgr
        mesh = jax.make_mesh((8,), ("x",))
        on = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        tree = {"n": jax.device_put(jnp.array([2**40 + 7, 5]), on), "f": jnp.array([0.1, 1e300])}
        with ckptmgr.CheckpointManager(sys.argv[1]) as manager:
            manager.save(1, {**tree, "i": 2**40})
        """,
        tmp_path,
        env={"JAX_ENABLE_X64": "1"},
    )
    mesh = jax.make_mesh((8,), ("x",))
    with pytest.raises(ckptmgr.TreeMismatch, match="jax_enable_x64") as caught:
        ckptmgr.restore(tmp_path, mesh=mesh)
    assert sorted(caught.value.differing) == ["f", "n"]
    wide = jax.ShapeDtypeStruct((2,), np.int64)
    like = {"n": wide, "f": np.zeros(2), "i": jax.ShapeDtypeStruct((), np.int64)}
    with pytest.raises(ckptmgr.TreeMismatch, match="jax_enable_x64") as caught:
        ckptmgr.restore(tmp_path, like)
    assert sorted(caught.value.differing) == ["i", "n"]
    back = ckptmgr.restore(tmp_path)
    assert back["n"].tolist() == [2**40 + 7, 5] and back["f"].tolist() == [0.1, 1e300]
    assert back["i"] == 2**40


def wide(number):
    """As `state`, with an array too large to lie in the tree nodes of the database."""
    return {**state(number), "wide": np.full((64, 64), number, np.float32)}


def wide_target():
    return {**target(), "wide": np.zeros((64, 64), np.float32)}


def damage(root, step):
    """Flips one bit in the largest data file of a step."""
    data = sorted((root / str(step) / "default" / layout.container(0) / "d").iterdir())
    largest = max(data, key=lambda path: path.stat().st_size)
    raw = bytearray(largest.read_bytes())
    wanted = wide(step)["wide"].tobytes()
    raw[raw.index(wanted)] ^= 1
    largest.write_bytes(raw)


def test_a_loop_that_comes_back_to_a_damaged_step_saves_it_again(tmp_path):
    with manager(tmp_path) as found:
        for step in (1, 2, 3):
            found.save(step, wide(step)).result()
    damage(tmp_path, 3)
    with manager(tmp_path) as found:
        latest = found.restore_latest(wide_target())
        assert latest.step == 2 and [skipped.step for skipped in latest.skipped] == [3]
        assert numbers(found) == (1, 2)  # put aside
        with pytest.raises(ckptmgr.CorruptCheckpoint, match=r"damaged/3\.json"):
            found.restore(step=3)
    with manager(tmp_path) as found:  # and a restart remembers
        assert found.restore_latest(wide_target()).step == 2
        found.save(3, wide(33)).result()
        assert numbers(found) == (1, 2, 3)
        assert (found.restore(step=3)["wide"] == 33).all()
    assert len(list((tmp_path / "_ckptmgr/quarantine").iterdir())) == 1


def test_a_damaged_step_does_not_count_for_retention(tmp_path):
    with manager(tmp_path) as found:
        for step in (1, 2):
            found.save(step, wide(step)).result()
    damage(tmp_path, 2)
    with manager(tmp_path, retention=ckptmgr.KeepLast(2)) as found:
        assert found.restore_latest(wide_target()).step == 1
        found.save(3, wide(3)).result()
        found.wait()
        assert numbers(found) == (1, 3)


def test_a_read_only_manager_puts_nothing_aside(tmp_path):
    with manager(tmp_path) as found:
        for step in (1, 2):
            found.save(step, wide(step)).result()
    damage(tmp_path, 2)
    with reader(tmp_path) as found:
        assert found.restore_latest(wide_target()).step == 1
    assert not (tmp_path / layout.damaged_name(2)).exists()


def test_a_directory_that_is_no_step_is_never_deleted(tmp_path):
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024" / "thesis.txt").write_text("mine")
    with manager(tmp_path) as found:
        for step in (1, 5):
            found.save(step, state(step)).result()
        assert found.truncate_after(1) == (5,)
        with pytest.raises(ckptmgr.StepNotFound):
            found.delete(2024)
    assert (tmp_path / "2024" / "thesis.txt").read_text() == "mine"


def test_a_rollback_that_would_leave_nothing_is_refused(tmp_path):
    with manager(tmp_path) as found:
        for step in (200, 300):
            found.save(step, state(step)).result()
        with pytest.raises(ckptmgr.InvalidOption, match="200"):
            found.truncate_after(150)
        assert numbers(found) == (200, 300)


class Position:
    def __init__(self):
        self.at = 0

    def get_state(self):
        return self.at

    def set_state(self, at):
        self.at = at


def test_an_iterator_is_not_moved_by_a_restore_that_fails(tmp_path):
    with manager(tmp_path) as found:
        found.save(1, ckptmgr.Items(data=Position(), state=state(1))).result()
        here = Position()
        here.at = 7
        wrong = {**target(), "w": jax.ShapeDtypeStruct((9,), np.float32)}
        with pytest.raises(ckptmgr.TreeMismatch):
            found.restore(ckptmgr.Items(data=here, state=wrong))
        assert here.at == 7
        found.restore(ckptmgr.Items(data=here, state=target()))
        assert here.at == 0


@pytest.mark.parametrize("last", ["wait", "close"])
def test_a_hook_may_wait_for_another_thread_that_uses_the_manager(last, tmp_path):
    seen = []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:

        def evaluate(info):
            seen.append(pool.submit(lambda: found.restore(step=info.step)).result(LIMIT))

        found = manager(tmp_path, on_committed=evaluate)
        found.save(1, state(1))
        getattr(found, last)()
        assert_state(seen[0], 1)
        found.close()


def test_a_tree_too_deep_to_write_is_refused_by_the_call(tmp_path):
    tree = {"x": 1}
    for _ in range(500):
        tree = {"k": tree}
    with manager(tmp_path) as found:
        with pytest.raises(ckptmgr.UnsupportedLeaf, match="levels"):
            found.save(1, tree)


@pytest.mark.parametrize("step", ["1", -1, True, 1.0])
def test_the_functions_of_the_module_check_a_step_as_the_manager_does(step, tmp_path):
    with manager(tmp_path) as found:
        found.save(1, state(1)).result()
    with pytest.raises(ckptmgr.InvalidOption):
        ckptmgr.restore(tmp_path, step=step)


@pytest.mark.parametrize("exchange", [True, False])
def test_writers_that_replace_one_step_at_once_lose_nothing(exchange, tmp_path):
    with manager(tmp_path) as found:
        found.save(5, state(0)).result()
    failed = []

    def write(first):
        with manager(tmp_path, store=faulty(tmp_path, exchange=exchange)) as found:
            for number in range(first, first + 25):
                try:
                    found.save(5, state(number), overwrite=True).result(LIMIT)
                except ckptmgr.CheckpointError as exc:
                    failed.append(exc)

    threads = [threading.Thread(target=write, args=(first,)) for first in (100, 200, 300)]
    for thread in threads:
        thread.start()
    with reader(tmp_path) as found:
        while any(thread.is_alive() for thread in threads):
            try:
                value = found.restore(step=5)
            except ckptmgr.StepNotFound:
                assert not exchange  # between two renames it is not there
                continue
            assert_state(value, value["n"])
    for thread in threads:
        thread.join()
    assert failed == []
    assert not (tmp_path / "_ckptmgr/quarantine").exists()
    assert leftovers(tmp_path) == []
