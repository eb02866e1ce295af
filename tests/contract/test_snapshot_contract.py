"""The shipped snapshot contract: every mode keeps it, and a manager that does not is found out."""

import dataclasses
import re
import threading

import jax
import numpy as np
import pytest

import ckptmgr
from ckptmgr.engine import snapshot
from ckptmgr.testing import snapshot_contract as contract
from tests.support import finish, start_python

CHECKS = list(contract.CHECKS)


def named(words):
    """The check whose sentence contains these words."""
    (sentence,) = [sentence for sentence in CHECKS if words in sentence]
    return sentence


def run(root, mode, words, **args):
    (outcome,) = contract.run(root, mode, only=[named(words)], **args)
    return outcome


@pytest.fixture(scope="module", autouse=True)
def alone():
    """The whole suite in a process with one device, while the tests here run."""
    child = start_python(
        """
        import sys, tempfile
        from ckptmgr.testing import snapshot_contract
        import jax

        assert len(jax.devices()) == 1 and "pytest" not in sys.modules
        with tempfile.TemporaryDirectory() as root:
            for mode in snapshot_contract.MODES:
                outcomes = snapshot_contract.run(root, mode)
                assert [o.check for o in outcomes] == list(snapshot_contract.CHECKS)
                for outcome in outcomes:
                    if not outcome.passed:
                        print(mode, outcome)
        """,
        env={"XLA_FLAGS": "--xla_force_host_platform_device_count=1"},
        timeout=100,
    )
    done = []

    def result():
        if not done:
            done.append(finish(child, timeout=100, check=False))
        return done[0]

    yield result
    result()


# -- the modes keep it ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", contract.MODES)
@pytest.mark.parametrize("check", CHECKS)
def test_on_eight_devices(check, mode, mesh8, tmp_path):
    (outcome,) = contract.run(tmp_path, mode, list(mesh8.devices.flat), only=[check])
    assert outcome.passed, outcome.detail
    assert outcome.check == check and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", contract.MODES)
def test_leaves_that_span_several_waves_are_saved_as_they_were(mode, mesh8, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "WAVE_BYTES", 2**19)
    outcome = run(tmp_path, mode, "donated arrays of every kind")
    assert outcome.passed, outcome.detail


def test_the_modes_are_those_of_the_options():
    for mode in contract.MODES:
        assert ckptmgr.Snapshot(mode=mode).mode == mode


# -- a manager that breaks it is found out ----------------------------------------------------


def device_leaves(state):
    """Those that numpy can read as they lie."""
    plain = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    return [leaf for leaf in plain if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)]


class KeepsViews(ckptmgr.CheckpointManager):
    def save(self, step, state, **args):
        self.views = [np.asarray(leaf.addressable_data(0)) for leaf in device_leaves(state)]
        return super().save(step, state, **args)


class CopiesLate(ckptmgr.CheckpointManager):
    """Looks at the state when somebody waits for it."""

    pending = None

    def save(self, step, state, **args):
        self.flush()
        self.pending = (step, state, args)
        return ckptmgr.SaveHandle(0)

    def flush(self):
        if self.pending is not None:
            (step, state, args), self.pending = self.pending, None
            super().save(step, state, **args).result()

    def wait(self):
        self.flush()
        super().wait()

    def close(self):
        self.flush()
        super().close()


class SavesTheOneBefore(ckptmgr.CheckpointManager):
    """From the third save on, as a stale plan of gathered leaves would."""

    before = ()

    def save(self, step, state, **args):
        copies = [
            jax.device_put(leaf, leaf.sharding, may_alias=False)
            if isinstance(leaf, jax.Array)
            else leaf
            for leaf in jax.tree.leaves(state)
        ]
        copied = jax.tree.unflatten(jax.tree.structure(state), copies)
        self.before = (*self.before, copied)
        return super().save(step, self.before[-1 - (len(self.before) > 2)], **args)


def with_plain(change):
    """Managers that alter one host leaf on the way."""

    class Alters(ckptmgr.CheckpointManager):
        def save(self, step, state, **args):
            host = {**state["host"], "plain": change(state["host"]["plain"])}
            return super().save(step, {**state, "host": host}, **args)

    return Alters


def without_payloads(values):
    return np.where(np.isnan(values), np.float32("nan"), values)


def without_minus_zero(values):
    bits = values.view(np.uint32)
    return np.where(bits == 0x80000000, np.uint32(0), bits).view(np.float32)


class HoardsDevice(ckptmgr.CheckpointManager):
    def save(self, step, state, **args):
        leaf = state["params"]["large_sharded"]
        self.kept = jax.device_put(leaf, leaf.sharding, may_alias=False)
        return super().save(step, state, **args)


class HoardsHost(ckptmgr.CheckpointManager):
    def save(self, step, state, **args):
        self.kept = np.empty(2**27, np.uint8)
        return super().save(step, state, **args)


class ReadsWhole(ckptmgr.CheckpointManager):
    def save(self, step, state, **args):
        np.asarray(state["params"]["columns"])
        return super().save(step, state, **args)


class SavesZerosForTheLost(ckptmgr.CheckpointManager):
    def save(self, step, state, **args):
        def kept(leaf):
            lost = isinstance(leaf, jax.Array) and leaf.is_deleted()
            return np.zeros(leaf.shape, np.float32) if lost else leaf

        return super().save(step, jax.tree.map(kept, state), **args)


class LeavesAFile(ckptmgr.CheckpointManager):
    def save(self, step, state, **args):
        try:
            return super().save(step, state, **args)
        except ckptmgr.SnapshotLost:
            with open(f"{self.directory}/left", "w"):
                raise


class NamesNoLeaf(ckptmgr.CheckpointManager):
    def save(self, step, state, **args):
        try:
            return super().save(step, state, **args)
        except ckptmgr.SnapshotLost as exc:
            raise ckptmgr.SnapshotLost("some leaf", step) from exc


class GivesUpAfterAFailure(ckptmgr.CheckpointManager):
    failed = False

    def save(self, step, state, **args):
        if self.failed:
            raise MemoryError("the buffers of a failed save were never given back")
        handle = super().save(step, state, **args)
        handle.join()
        self.failed = handle.failure() is not None
        return handle


def with_snapshot(**changes):
    """Managers that take other options than they are told."""

    def make(root, options, store):
        snapshot = dataclasses.replace(options.snapshot, **changes)
        options = dataclasses.replace(options, snapshot=snapshot)
        return ckptmgr.CheckpointManager(root, options, store=store)

    return make


def that_never_fails(root, options, store):
    store.arm()
    return ckptmgr.CheckpointManager(root, options, store=store)


FOUND_OUT = [
    (KeepsViews, "donated arrays of every", "leaf 'sharded': donation was refused"),
    (CopiesLate, "donated arrays of every", "SnapshotLost.*leaf 'params."),
    (CopiesLate, "deleted arrays of every", "SnapshotLost.*leaf 'params."),
    (CopiesLate, "each of 50 saves", "SnapshotLost.*leaf 'params."),
    (CopiesLate, "little host memory", "SnapshotLost.*leaf 'params."),
    (CopiesLate, "host arrays changed in place", r"step 0 .*leaf 'host.fortran': .*of number 1"),
    (CopiesLate, "a numpy array's", "is not on the host after"),
    (CopiesLate, "containers changed", "expected the leaves"),
    (CopiesLate, "step, metrics and extra", "Array has been deleted"),
    (CopiesLate, "600 small leaves", "SnapshotLost.*leaf 'params."),
    (SavesTheOneBefore, "change shape, dtype", "step 2 .*leaf 'params.leaf0'.*of number 1"),
    (with_plain(without_payloads), "NaN payloads", "host.plain.*expected 0x7f800001"),
    (with_plain(without_minus_zero), "NaN payloads", "expected 0x80000000, found 0x00000000"),
    (SavesZerosForTheLost, "lost before save", "leaf 'params.sharded' was gone: expected Snap"),
    (NamesNoLeaf, "lost before save", "expected SnapshotLost of 'params.sharded', found .*some"),
    (LeavesAFile, "lost before save", "expected nothing new, found .*/left"),
    (that_never_fails, "saves that fail", "step 2: expected SaveFailed, found it saved"),
    (GivesUpAfterAFailure, "saves that fail", "MemoryError: the buffers"),
    (HoardsDevice, "no copy and no view", "expected device buffers of .* found"),
    (HoardsHost, "no copy and no view", "expected at most .* 0 copies, found"),
    (ReadsWhole, "no copy and no view", "leaf 'columns': expected nothing kept on it"),
    (with_snapshot(in_flight=9), "when_busy='wait'", "to wait for step 0, found it returned"),
    (with_snapshot(when_busy="skip"), "when_busy='wait'", "found 'the save of step 0 is still"),
    (with_snapshot(in_flight=9), "when_busy='skip'", "step 1: expected a skip with a reason"),
    (with_snapshot(when_busy="wait"), "when_busy='skip'", "expected an end within 1 s"),
    (with_snapshot(in_flight=9), "never are more saves", "expected at most 1 saves in flight"),
    (with_snapshot(in_flight=1), "never are more saves", "expected an end within 1 s"),
]


@pytest.mark.parametrize(
    "broken, check, found", FOUND_OUT, ids=lambda part: getattr(part, "__name__", str(part)[:30])
)
def test_a_broken_manager_fails_the_check_by_leaf(
    broken, check, found, mesh8, tmp_path, monkeypatch
):
    monkeypatch.setattr(contract, "SAVE_LIMIT", 1.0)
    outcome = run(tmp_path, "copy_on_write", check, make_manager=broken)
    assert not outcome.passed
    assert re.search(found, outcome.detail, re.DOTALL), outcome.detail


def test_every_check_has_been_seen_to_fail():
    assert {named(check) for _, check, _ in FOUND_OUT} == set(CHECKS)


def test_two_buffers_are_all_that_double_buffer_may_hold(mesh8, tmp_path):
    outcome = run(tmp_path, "double_buffer", "no copy and no view", make_manager=HoardsHost)
    assert not outcome.passed and "which is 2 copies" in outcome.detail


# -- running it -------------------------------------------------------------------------------


def test_a_failed_check_is_an_outcome_and_its_files_stay(tmp_path, monkeypatch):
    def fails(bench):
        with bench.trial() as trial:
            trial.save(1, {"host": {"n": 1}})
            trial.expect_steps(1, 2)

    monkeypatch.setitem(contract._checks, "it fails", fails)
    monkeypatch.setitem(contract._checks, "it is wrong", lambda bench: 1 / 0)
    failed, wrong = contract.run(tmp_path / "new", only=["it fails", "it is wrong"])
    assert (failed.check, failed.passed, wrong.passed) == ("it fails", False, False)
    assert failed.detail.startswith("expected the steps [1, 2], found [1] (what was written is in")
    assert failed.detail.split()[-1].rstrip(")") in map(str, (tmp_path / "new").iterdir())
    assert wrong.detail.startswith("ZeroDivisionError: division by zero")
    assert str(failed).startswith("FAILED") and failed.detail in str(failed)


def test_a_check_that_hangs_has_failed(tmp_path, monkeypatch):
    end = threading.Event()
    monkeypatch.setattr(contract, "CHECK_LIMIT", 0.05)
    monkeypatch.setitem(contract._checks, "it ends", lambda bench: end.wait())
    (outcome,) = contract.run(tmp_path, only=["it ends"])
    end.set()
    assert not outcome.passed and "expected an end within 0.05 s" in outcome.detail


def test_a_mode_or_a_check_that_is_none_is_refused(tmp_path):
    with pytest.raises(ckptmgr.InvalidOption, match="mode"):
        contract.run(tmp_path / "a", "fast")
    with pytest.raises(ckptmgr.InvalidOption, match="no check 'x'"):
        contract.run(tmp_path / "a", only=["x"])
    assert not (tmp_path / "a").exists()


@pytest.mark.timeout(150)
def test_on_one_device_every_mode_keeps_the_contract_too(alone):
    done = alone()
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
