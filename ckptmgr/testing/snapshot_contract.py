"""The snapshot contract, as checks that run on anybody's devices and file system.

Once `save()` has returned, the saved bytes are those of the call, whatever is then done to any
leaf; donation goes on working; nothing more is held than was said.

    for outcome in snapshot_contract.run("/mnt/checkpoints", mode="copy_on_write"):
        print(outcome)

In the modes that write in the background the writer is held until the leaves are gone, so that a
copy made too late is found whatever the timing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

import ckptmgr
from ckptmgr.testing import _memory, _trees
from ckptmgr.testing._bench import SAVE_LIMIT, Bench, Call, Trial
from ckptmgr.testing._trees import Kind, Leaves
from ckptmgr.testing.outcome import Broken, Outcome, outcome_of

MODES = ("sync", "copy_on_write", "double_buffer")
"""The modes that keep the contract: all of them."""

CHECK_LIMIT = 300.0
"""Seconds after which a check has hung, and so has failed."""

_MOMENT = 0.1  # seconds in which a save that ought to wait can show that it does not


Check = Callable[[Bench], None]
_checks: dict[str, Check] = {}

CHECKS: Mapping[str, Check] = MappingProxyType(_checks)
"""Each check by the sentence it proves; it raises `AssertionError`, or whatever `save` raises."""


def run(
    directory: str | os.PathLike[str],
    mode: str = "copy_on_write",
    devices: Sequence[Any] | None = None,
    *,
    only: Collection[str] | None = None,
    make_manager: Callable[..., Any] = ckptmgr.CheckpointManager,
) -> tuple[Outcome, ...]:
    """Runs the checks, one after the other; a check that fails is an outcome, not an exception.

    Args:
      directory: created if it is not there. What a check wrote is removed if it passed.
      mode: a mode of `ckptmgr.Snapshot`.
      devices: where arrays shall lie; None: all devices of this process.
      only: the checks to run, keys of `CHECKS`; None: all.
      make_manager: what is tested, called as `CheckpointManager` is.

    Raises:
      InvalidOption: no such mode or check.
    """
    ckptmgr.Snapshot(mode=mode)  # type: ignore[arg-type]
    if unknown := set(only or ()) - set(CHECKS):
        raise ckptmgr.InvalidOption(f"there is no check {sorted(unknown)[0]!r}")
    found = tuple(devices if devices is not None else jax.local_devices())
    root = os.path.abspath(directory)
    os.makedirs(root, exist_ok=True)
    return tuple(
        outcome_of(
            sentence,
            root,
            functools.partial(_on_bench, _checks[sentence], mode, found, make_manager),
            keep=True,
        )
        for sentence in CHECKS
        if only is None or sentence in only
    )


def _on_bench(
    check: Check, mode: str, devices: tuple[Any, ...], make_manager: Any, own: str
) -> None:
    """Runs a check on a thread of its own; one that takes too long has failed."""
    bench = Bench(own, mode, devices, make_manager)
    Call(lambda: check(bench)).result(CHECK_LIMIT)


def _proves(sentence: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        _checks[sentence] = check
        return check

    return add


# -- values are those of the call ---------------------------------------------------------------

Change = Callable[[Leaves, Sequence[Kind], int], Leaves]


def _train(
    bench: Bench,
    kinds: Sequence[Kind],
    saves: int,
    change: Change,
    *,
    with_host: bool = False,
    hold: bool = True,
    **snapshot: Any,
) -> None:
    """Saves in a row, each held until its leaves are gone; then every step is compared.

    Before the third save and the fifth it waits for what is compiled in the background, so that
    plain copies and compiled ones are met, into new memory and into that of earlier saves.
    """
    leaves, host = _trees.build(kinds, 0), _trees.Host(0)
    with bench.trial(held=range(saves if hold else 0), **snapshot) as trial:
        for number in range(saves):
            trial.release(number - trial.slots)
            if number in (2, 4):
                trial.settle(number - 1)
            trial.save(number, {"params": leaves} | ({"host": host.leaves} if with_host else {}))
            leaves = change(leaves, kinds, number + 1)
            host.set(number + 1)
        trial.expect_each(range(saves), kinds, with_host)


@_proves("donated arrays of every kind are saved as they were, and are really donated")
def _donated(bench: Bench) -> None:
    _train(bench, _trees.kinds(bench.devices), 6, _trees.donate)


@_proves("deleted arrays of every kind are saved as they were")
def _deleted(bench: Bench) -> None:
    _train(bench, _trees.kinds(bench.devices), 6, _trees.delete)


@_proves("each of 50 saves in a row holds the values of its own step, in every leaf")
def _fifty(bench: Bench) -> None:
    _train(bench, _trees.few(bench.devices), 50, _trees.donate, with_host=True)


@_proves("each of 5 saves of 600 small leaves holds the values of its own step")
def _many(bench: Bench) -> None:
    _train(bench, _trees.small(bench.devices, 600), 5, _trees.donate)


@_proves("with little host memory, donated arrays are saved as they were wave by wave")
def _little_memory(bench: Bench) -> None:
    kinds = _trees.kinds(bench.devices)
    how: dict[str, Any] = {"with_host": True, "hold": False, "host_bytes": 4 * 2**20}
    _train(bench, kinds, 5, _trees.donate, **how)


@_proves("leaves that change shape, dtype or place between saves are saved as they were")
def _changing(bench: Bench) -> None:
    turns = (0, 0, 0, 0, 0, 1, 1, 0, 2)
    with bench.trial(held=range(len(turns))) as trial:
        for number, turn in enumerate(turns):
            kinds = _trees.small(bench.devices, 64 + turn, turn)
            trial.release(number - trial.slots)
            if number in (2, 4):
                trial.settle(number - 1)
            leaves = _trees.build(kinds, number)
            trial.save(number, {"params": leaves})
            _trees.delete(leaves, kinds, number)
        trial.expect_steps(*range(len(turns)))
        for number, turn in enumerate(turns):
            trial.expect(number, number, _trees.small(bench.devices, 64 + turn, turn))


@_proves("NaN payloads, signalling NaNs and negative zeros are kept bit for bit")
def _bits(bench: Bench) -> None:
    floats = ("float32", "bfloat16", "float16", "complex64")
    kinds = [kind for kind in _trees.kinds(bench.devices) if kind.name in floats]
    for kind in kinds:
        values = _trees.values(kind, 3)
        parts = values.view(np.float32) if kind.dtype == "complex64" else values
        with np.errstate(invalid="ignore"):  # comparing a signalling NaN says so
            fit = np.isnan(parts).any() and (np.signbit(parts) & (parts == 0)).any()
        if not fit:
            raise Broken(f"the check itself is wrong: leaf {kind.name!r} has no such values")
    _train(bench, kinds, 6, _trees.delete, with_host=True)


@_proves("host arrays changed in place, views of them and bytes are saved as they were")
def _changed_in_place(bench: Bench) -> None:
    _train(bench, (), 6, _trees.delete, with_host=True)


@_proves("a jax array whose memory is a numpy array's may be changed when it is staged")
def _aliased(bench: Bench) -> None:
    saves = 3
    sources = {"small": _trees.aligned(2**10), "large": _trees.aligned(2**22)}
    with bench.trial() as trial:
        for number in range(saves):
            for source in sources.values():
                source.fill(number)
            leaves = jax.device_put(sources, bench.devices[-1])  # no copy where the backend can
            [leaf.block_until_ready() for leaf in leaves.values()]
            handle = trial.save(number, {"host": leaves})
            handle.staged(SAVE_LIMIT)
            for source in sources.values():
                source.fill(-1)
        trial.expect_steps(*range(saves))
        for number in range(saves):
            wanted = {name: np.full_like(source, number) for name, source in sources.items()}
            found = trial.manager.restore(step=number)["host"]
            if wrong := _trees.differences(found, wanted, lambda name, n: np.zeros(0)):
                raise Broken(f"step {number} should hold {number}: " + "; ".join(wrong))


@_proves("containers changed after the call are saved as they were")
def _containers(bench: Bench) -> None:
    kinds = _trees.few(bench.devices)
    for name in ("replaced", "removed"):
        with bench.trial(held=[0]) as trial:
            leaves, host = _trees.build(kinds, 0), _trees.Host(0).leaves
            trial.save(0, {"params": leaves, "host": host})
            for room in (leaves, host):
                for leaf in list(room):
                    room.pop(leaf)
                    if name == "replaced":
                        room[leaf] = np.zeros(1)
                room["added"] = np.ones(1)
            trial.expect_each([0], kinds, with_host=True)


@_proves("step, metrics and extra are those of the call")
def _metadata(bench: Bench) -> None:
    with bench.trial(held=[5, 6]) as trial:
        for number, step in ((5, np.array(5)), (6, jax.device_put(np.int32(6), bench.devices[-1]))):
            device, host = jax.device_put(np.float32(2.5), bench.devices[0]), np.array(1.5)
            vector = np.array([1, 2])
            metrics: dict[str, Any] = {"loss": device, "host": host, "deep": {"vector": vector}}
            extra: dict[str, Any] = {"notes": ["a"], "deep": {"n": 1}, "host": np.array(7)}
            trial.release(number - trial.slots)
            trial.save(step, {"host": {"x": np.zeros(3)}}, metrics=metrics, extra=extra)
            host[...], vector[...], extra["host"][...] = -1, -1, -1
            metrics["deep"]["added"] = metrics["added"] = 1
            extra["notes"].append("b")
            extra["deep"]["n"] = 2
            device.delete()
            if isinstance(step, jax.Array):
                step.delete()
            else:
                step[...] = 9
        trial.expect_steps(5, 6)
        for number in (5, 6):
            info = trial.manager.info(number)
            found = (dict(info.metrics), info.extra)
            vector = found[0].get("deep", {}).pop("vector", None)
            wanted = (
                {"loss": 2.5, "host": 1.5, "deep": {}},
                {"notes": ["a"], "deep": {"n": 1}, "host": 7},
            )
            if found != wanted or not np.array_equal(vector, [1, 2]):
                raise Broken(f"step {number}: expected {wanted}, found {found} and {vector}")


@_proves("an array lost before save() is SnapshotLost by its path, and nothing is written")
def _lost(bench: Bench) -> None:
    kinds = _trees.kinds(bench.devices)
    changes: list[tuple[Change, Sequence[Kind]]] = [
        (_trees.delete, kinds),
        (_trees.donate, kinds[::3]),
    ]
    with bench.trial() as trial:
        for step in range(3):
            trial.save(step, {"params": _trees.build(kinds, step)})
        trial.manager.wait()
        before = trial.files()
        leaves = _trees.build(kinds, 3)
        for change, victims in changes:
            for kind in victims:
                change(leaves, [kind], 3)
                _expect_lost(trial, leaves, f"params.{kind.name}")
                leaves |= _trees.build([kind], 3)
        if trial.files() != before:
            raise Broken(f"expected nothing new, found {set(trial.files()) ^ set(before)}")
        trial.save(3, {"params": leaves})
        trial.expect_each(range(4), kinds)


def _expect_lost(trial: Trial, leaves: Leaves, path: str) -> None:
    try:
        trial.save(3, {"params": leaves})
    except ckptmgr.SnapshotLost as exc:
        if exc.leaf != path or path not in str(exc):
            raise Broken(f"expected SnapshotLost of {path!r}, found {exc}") from exc
        if trial.manager.saves_in_flight:
            raise Broken(f"leaf {path!r}: expected no save in flight after SnapshotLost") from exc
        return
    raise Broken(f"leaf {path!r} was gone: expected SnapshotLost, found an accepted save")


@_proves("saves that fail spoil nothing of the saves after them")
def _after_failures(bench: Bench) -> None:
    kinds, saves, failing = _trees.few(bench.devices), 9, (2, 3, 4, 6)
    leaves = _trees.build(kinds, 0)
    with bench.trial(failing=failing) as trial:
        for number in range(saves):
            try:
                handle = trial.save(number, {"params": leaves})
                leaves = _trees.donate(leaves, kinds, number + 1)
                handle.result(SAVE_LIMIT)
            except ckptmgr.SaveFailed:
                if number not in failing:
                    raise
                if bench.mode == "sync":
                    leaves = _trees.donate(leaves, kinds, number + 1)
            else:
                if number in failing:
                    raise Broken(f"step {number}: expected SaveFailed, found it saved")
        trial.expect_each([number for number in range(saves) if number not in failing], kinds)


# -- nothing more is held than was said ---------------------------------------------------------


@_proves("no copy and no view is held once wait() has returned, beyond what double_buffer keeps")
def _nothing_held(bench: Bench) -> None:
    kinds = _trees.kinds(bench.devices)
    leaves, host = _trees.build(kinds, 0), _trees.Host(0)
    tree = {"params": leaves, "host": host.leaves}
    size = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(tree))
    copies = 2 if bench.mode == "double_buffer" else 0
    limit = copies * size + _memory.SLACK
    with _memory.traced(), bench.trial() as trial:
        before = _memory.held(bench.devices)
        for number in range(10):
            trial.save(number, tree)
            trial.settle(number)
            if number not in (0, 2, 9):
                continue
            now = _memory.held(bench.devices)
            if not copies and now[0] != before[0]:
                raise Broken(f"expected device buffers of {before[0]} bytes, found {now[0]}")
            if now[1] - before[1] > limit:
                raise Broken(
                    f"after {number + 1} saves: expected at most {limit} bytes more than before, "
                    f"which is {copies} copies, found {now[1] - before[1]}"
                )
            if number == 2:
                limit = now[1] - before[1] + _memory.SLACK
            for name, leaf in leaves.items():
                if any(getattr(a, "_npy_value", None) is not None for a in _memory.shards(leaf)):
                    raise Broken(f"leaf {name!r}: expected nothing kept on it, found its values")
        _trees.donate(leaves, kinds, 1)


# -- a save while others are in flight ----------------------------------------------------------


def _small_tree(bench: Bench, number: int) -> tuple[Leaves, Sequence[Kind]]:
    kinds = _trees.few(bench.devices)
    return _trees.build(kinds, number), kinds


def _fill(bench: Bench, trial: Trial) -> None:
    """As many saves as may be in flight."""
    for number in range(trial.slots):
        leaves, kinds = _small_tree(bench, number)
        save = functools.partial(trial.save, number, {"params": leaves})
        trial.start(save).result(SAVE_LIMIT)
        _trees.delete(leaves, kinds, number)
    busy = trial.manager.saves_in_flight
    if busy != (trial.slots if bench.can_hold else 0):
        raise Broken(f"expected {trial.slots} held saves in flight, found {busy}")


@_proves("with all slots busy, when_busy='wait' waits for the oldest save, and all are there")
def _waits(bench: Bench) -> None:
    with bench.trial(held=range(8), when_busy="wait") as trial:
        _fill(bench, trial)
        last = trial.slots
        leaves, kinds = _small_tree(bench, last)
        call = trial.start(lambda: trial.save(last, {"params": leaves}))
        if bench.can_hold and call.returned.wait(_MOMENT):
            call.result(SAVE_LIMIT)
            raise Broken(f"expected save() of step {last} to wait for step 0, found it returned")
        trial.release(0)
        call.result(SAVE_LIMIT)
        _trees.delete(leaves, kinds, last)
        trial.expect_each(range(last + 1), kinds)


@_proves("with all slots busy, when_busy='skip' says so and leaves no trace of the step")
def _skips(bench: Bench) -> None:
    with bench.trial(held=range(8), when_busy="skip") as trial:
        _fill(bench, trial)
        last = trial.slots
        leaves, kinds = _small_tree(bench, last)
        call = trial.start(lambda: trial.manager.save(last, {"params": leaves}))
        handle = call.result(SAVE_LIMIT)
        if bench.can_hold:
            if handle.accepted or not handle.reason:
                raise Broken(f"step {last}: expected a skip with a reason, found {handle!r}")
            if handle.result() is not None or not handle.done:
                raise Broken(f"step {last}: expected no result of a skip, found {handle!r}")
            trial.expect_steps(*range(last))
            trial.save(last, {"params": leaves})
        trial.expect_each(range(last + 1), kinds)


@_proves("never are more saves in flight than the slots allow, and as many as they allow can be")
def _bound(bench: Bench) -> None:
    for in_flight in (None, 3):
        with bench.trial(held=range(12), in_flight=in_flight) as trial:
            _fill(bench, trial)
            for number in range(trial.slots, 12):
                trial.release(number - trial.slots)
                leaves, kinds = _small_tree(bench, number)
                trial.save(number, {"params": leaves})
                _trees.delete(leaves, kinds, number)
            trial.expect_each(range(12), _trees.few(bench.devices))
