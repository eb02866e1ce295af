"""Device to host: what `save()` does before it returns.

Contract, the same in every mode. When the last wave of a snapshot has been ordered,

1. donating, deleting, mutating or overwriting any leaf does not change what is saved;
2. no view of a device buffer is held (such a view makes JAX refuse donation without a word);
3. host arrays of the user have been copied.

How each mode keeps it:

- `copy_on_write`: the copies to host memory are *ordered* here, on the caller's thread; the runtime
  performs each before any later donated use of its buffer. Waiting for them and writing them is
  the background thread's work. Their memory is freed wave by wave as it is written.
- `double_buffer`: the same, into buffers that an earlier save has left. A compiled copy gets such
  a buffer as a donation, so that its memory is written over; the runtime performs it in the same
  order. Two saves in flight use two sets of buffers.
- `sync`: values that the host can read where they lie are not copied; the caller waits until
  everything is written. Those of an accelerator are transferred as above.
- `direct` (the audit's other side): nothing is copied ahead, each value is read by itself.

With a bound on host memory the copies are ordered wave by wave, each as soon as earlier ones have
been written; `rest` returns when the last is ordered.

Not guaranteed: anything about a thread other than the caller's that changes leaves during the call;
and an array that has no memory of its own. On a single CPU device JAX's `device_put` of a numpy
array may take over its memory, and whoever writes there changes the array itself: do so after
`SaveHandle.staged()`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ckptmgr.core.plan import SavePlan
from ckptmgr.engine import recipe, shardings
from ckptmgr.engine.leaves import Source
from ckptmgr.engine.memory import HostMemory, want_huge_pages
from ckptmgr.engine.programs import Gather, Programs, Spec
from ckptmgr.engine.recipe import Load, Recipe
from ckptmgr.engine.staged import Staged, Work
from ckptmgr.errors import InvalidOption, SaveFailed, SnapshotLost
from ckptmgr.options import Snapshot

logger = logging.getLogger("ckptmgr")

WAVE_BYTES = 64 * 2**20
"""Array bytes per OCDBT transaction; less where host memory is bounded."""

OVER_BYTES = 4 * 2**30
"""Array bytes that one program writes over. Its values arrive together, 85 ms a GiB; but where its
threads take all cores, the call that starts a second program waits for them."""

WAVES_PER_LIMIT = 4
"""One wave is filled while others are on their way to disk; all lie within the bound."""


class Stager:
    """Takes the snapshots of one manager.

    Args:
      options: mode and bounds.
    """

    ordering: type[Ordering]

    def __init__(self, options: Snapshot) -> None:
        self.memory = HostMemory(options.host_bytes)
        self._audit_memory = HostMemory(WAVES_PER_LIMIT * WAVE_BYTES)
        self.programs = Programs()
        self.places = shardings.PlacesCache()
        self._options = options
        limit = options.host_bytes
        self._wave_bytes = WAVE_BYTES
        if limit is not None:
            self._wave_bytes = max(1, min(WAVE_BYTES, limit // WAVES_PER_LIMIT))
        self._warned: set[str] = set()

    @property
    def held(self) -> int:
        """Bytes of host memory that snapshots hold, kept buffers included."""
        return self.memory.held + self._audit_memory.held

    def recipe(self, mode: str, plan: SavePlan, sources: Sequence[Source], rank: int) -> Recipe:
        """How to copy a tree of this structure.

        Raises InvalidOption where `Snapshot.strict` is set and the mode or the bound on host
        memory cannot be kept.
        """
        whole = None if self._options.host_bytes is None else self._wave_bytes
        made = recipe.make(mode, plan, sources, self.places, rank, self._wave_bytes, whole)
        self._check(made, mode)
        return made

    def _check(self, made: Recipe, mode: str) -> None:
        limit = self._options.host_bytes
        for wave, loads in zip(made.waves, made.loads, strict=True):
            if any(load.how == "now" for load in loads):
                self._no_pinned_host(mode)
            nbytes = sum(load.nbytes for load in loads)
            if limit is not None and nbytes > limit:
                leaf = made.plan.tree.leaves[wave[0].leaf].dotted
                self._warn(
                    f"leaf {leaf!r}: {nbytes} bytes of it have to be copied at once, more than "
                    f"Snapshot.host_bytes={limit}",
                    "they are copied alone",
                    "raise the budget or shard the leaf further",
                )

    def _no_pinned_host(self, mode: str) -> None:
        self._warn(
            f"this backend has no pinned_host memory, which mode {mode!r} needs",
            "save() copies everything before it returns",
            "Snapshot(mode='sync') does without",
        )

    def _warn(self, what: str, instead: str, remedy: str) -> None:
        """Says once what is done instead; raises InvalidOption where `strict`."""
        if self._options.strict:
            raise InvalidOption(f"{what}, and strict=True; {remedy}")
        if instead not in self._warned:
            self._warned.add(instead)
            logger.warning("%s; %s", what, instead)

    def order(self, step: int, works: Sequence[Work], audit: bool = False) -> Ordering:
        """A snapshot of the items; `first` and `rest` order its copies.

        One for an audit is digested and dropped as it arrives. Where it has no buffers to use
        again it goes in waves, for the first touch of fresh memory would be most of its cost.
        """
        bounded = self._options.host_bytes is not None
        if audit and not bounded and self._options.mode == "copy_on_write":
            return self.ordering(step, works, self._audit_memory, self.programs, True)
        return self.ordering(step, works, self.memory, self.programs, bounded)

    def learn(self) -> None:
        """Compiles in the background what the last snapshot would have liked to use."""
        self.programs.compile_wanted()

    def close(self) -> None:
        """Ends the background compilation and frees kept buffers."""
        self.programs.close()
        self.memory.keep_only(())


class Ordering:
    """One snapshot under way. The caller's thread orders its waves, the save's thread uses them.

    Attributes:
      staged: for each item its values.
      nbytes: host memory of all copies.
      waited: seconds spent waiting for host memory.
      started: monotonic time when the first copy was ordered.
    """

    def __init__(
        self,
        step: int,
        works: Sequence[Work],
        memory: HostMemory,
        programs: Programs,
        bounded: bool,
    ) -> None:
        self.nbytes = sum(work.recipe.nbytes for work in works)
        self.waited = 0.0
        self.started = time.monotonic()
        self._step = step
        self._memory = memory
        self._programs = programs
        self._bounded = bounded
        self._thread = threading.current_thread()
        self._changed = threading.Condition()
        self._ordered = 0
        self._fresh: list[jax.Array] = []
        self._starved = False
        self._closed = False
        self._failure: BaseException | None = None
        self._waves: list[tuple[Staged, tuple[Load, ...]]] = []
        staged = []
        for work in works:
            one = Staged(self, work, len(self._waves), memory)
            staged.append(one)
            self._waves += [(one, loads) for loads in work.recipe.loads]
        self.staged = tuple(staged)
        if any(work.recipe.mode == "double_buffer" for work in works):
            memory.keep_only(set().union(*(work.recipe.kinds for work in works)))

    def ask_for_pages(self) -> None:
        """Asks for huge pages under what is ordered and has not arrived. For the save's own thread:
        it waits for a lock that the copies hold."""
        while self._fresh:
            want_huge_pages(self._fresh.pop())

    @property
    def started_any(self) -> bool:
        return self._ordered > 0

    @property
    def all_ordered(self) -> bool:
        return self._ordered == len(self._waves)

    def first(self) -> None:
        """Orders everything, or, where host memory is bounded, the first wave."""
        if self._waves:
            self._order(1 if self._bounded else len(self._waves))

    def rest(self) -> None:
        """Orders what is left, waiting for memory; returns early if the save has failed."""
        while not self.all_ordered and not self._closed:
            self._order(self._ordered + 1)

    def arrive(self) -> bool:
        """Waits until every value is on the host; False where not all copies are ordered yet."""
        if not self.all_ordered:
            return False
        jax.block_until_ready([list(staged._values.values()) for staged in self.staged])
        return True

    def close(self) -> None:
        """Gives back all memory: the save has ended, well or not."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._memory.wake()
        self._fresh.clear()
        for staged in self.staged:
            staged._drop_all()

    def is_ready(self, wave: int) -> bool:
        return self._ordered > wave

    def wait(self, wave: int) -> None:
        """Waits until a wave is ordered; the caller has nothing to give back before it is."""
        if threading.current_thread() is self._thread:
            while self._ordered <= wave:
                self._starved = True
                self._order(self._ordered + 1)
            return
        with self._changed:
            if self._ordered <= wave:
                self._starved = True
                self._memory.wake()
            self._changed.wait_for(
                lambda: self._ordered > wave or self._closed or self._failure is not None
            )
            self._starved = False
        if self._failure is not None:
            raise self._failure
        if self._ordered <= wave:
            raise SaveFailed(self._step, "the snapshot was given up")

    def _order(self, until: int) -> None:
        """Orders the waves up to number `until`, all in one batch."""
        batch = [
            (staged, load) for staged, loads in self._waves[self._ordered : until] for load in loads
        ]
        try:
            buffers, waited = self._memory.reserve(
                [(load.kind, load.nbytes) for _, load in batch],
                lambda: self._starved or self._closed,
            )
            self.waited += waited
            try:
                if not self._closed:
                    self._copy(batch, buffers)
            finally:
                for staged, load in batch:
                    if not staged._holds(load):
                        self._memory.release(load.nbytes)
        except BaseException as exc:
            with self._changed:
                self._failure = exc
                self._changed.notify_all()
            raise
        with self._changed:
            self._ordered = until
            self._starved = False  # what the writer waited for is here; the next wave must fit
            self._changed.notify_all()
        if self.all_ordered:
            for staged in self.staged:
                staged._forget_sources()
        if self._closed:  # the save failed meanwhile
            for staged in self.staged:
                staged._drop_all()

    def _copy(self, batch: Sequence[tuple[Staged, Load]], buffers: Sequence[Any]) -> None:
        puts: list[_Put] = []
        over: list[tuple[_Put, Any]] = []
        for (staged, load), buffer in zip(batch, buffers, strict=True):
            if load.how == "host":
                staged._set(load, _copy_array(staged.source(load.leaf), buffer))
            elif load.how == "now":
                array = staged.source(load.leaf).addressable_data(load.position)
                staged._set(load, np.array(array, copy=True))
            elif load.how == "view":
                staged._set(load, staged.piece(load.leaf, load.position))
            elif load.gather is not None:
                puts += self._gather(staged, load, load.gather, buffer)
            elif load.copy is not None and buffer is not None:
                over.append((_Put(staged, load, staged.piece(load.leaf, load.position)), buffer))
            else:
                puts.append(_Put(staged, load, staged.piece(load.leaf, load.position)))
        for group in _groups(over):
            puts += self._write_over(group)
        self._put(puts)

    def _gather(self, staged: Staged, load: Load, spec: Gather, buffer: Any) -> list[_Put]:
        """Runs a gather; returns what is left to transfer: its members where it cannot run, or,
        where it stays on the device, what it made."""
        arrays = [staged.piece(member.leaf, member.position) for member in load.members]
        if spec.donated:
            made = self._run(spec, arrays, lambda: [spec.empty() if buffer is None else buffer])
        else:
            made = self._run(spec, arrays)
        if made is None:
            return [
                _Put(staged, load, array, (member.leaf, member.position))
                for member, array in zip(load.members, arrays, strict=True)
            ]
        if shardings.is_on_host(made):
            staged._set(load, made)
            return []
        return [_Put(staged, load, made)]

    def _write_over(self, group: Sequence[tuple[_Put, Any]]) -> list[_Put]:
        """Copies into kept buffers; returns what has to be transferred instead."""
        puts = [put for put, _ in group]
        arrays = [put.array for put in puts]
        spec = tuple(put.load.copy for put in puts if put.load.copy is not None)
        made = self._run(spec, [arrays], lambda: [[buffer for _, buffer in group]])
        if made is None:
            return puts
        for put, copy in zip(puts, made, strict=True):
            put.staged._set(put.load, copy)
        return []

    def _run(
        self, spec: Spec, arguments: list[Any], first: Callable[[], list[Any]] = list
    ) -> Any | None:
        """What a program makes of `first()` and `arguments`; None where there is none that fits."""
        program = self._programs.get(spec)
        if program is None:
            return None
        try:
            with jax.disable_jit(False):  # under which compiled programs refuse to be called
                return program(*first(), *arguments)
        except (ValueError, TypeError, RuntimeError) as exc:
            if not any(array.is_deleted() for array in jax.tree.leaves(arguments)):
                self._programs.drop(spec, exc)
            return None

    def _put(self, puts: Sequence[_Put]) -> None:
        """Plain transfers, all in one call."""
        if not puts:
            return
        arrays = [put.array for put in puts]
        targets = [
            put.load.out if put.member is None else shardings.pinned_host(put.array.sharding)
            for put in puts
        ]
        try:
            # may_alias=False: what lies in host memory already must be copied all the same
            copies = jax.device_put(arrays, targets, may_alias=False)
        except RuntimeError as exc:
            lost = next((put for put in puts if put.array.is_deleted()), None)
            if lost is None:
                raise
            leaf = lost.member[0] if lost.member is not None else lost.load.leaf
            raise SnapshotLost(lost.staged.plan.tree.leaves[leaf].dotted, self._step) from exc
        for put, copy in zip(puts, copies, strict=True):
            if not self._bounded and shardings.is_on_host(put.array):
                self._fresh.append(copy)  # other backends have host memory of their own
            if put.member is not None:
                put.staged._set_member(put.load, put.member, copy)
            else:
                put.staged._set(put.load, copy)


@dataclass(frozen=True, slots=True)
class _Put:
    """A transfer: an array for a load, or for one member of a gathered one."""

    staged: Staged
    load: Load
    array: Any
    member: tuple[int, int | None] | None = None


def _groups(over: Sequence[tuple[_Put, Any]]) -> Iterator[list[tuple[_Put, Any]]]:
    """Runs of one set of devices and up to OVER_BYTES; one program writes each."""
    group: list[tuple[_Put, Any]] = []
    nbytes = 0
    for put, buffer in over:
        other = (
            bool(group) and group[0][0].array.sharding.device_set != put.array.sharding.device_set
        )
        if group and (other or nbytes + put.load.nbytes > OVER_BYTES):
            yield group
            group, nbytes = [], 0
        group.append((put, buffer))
        nbytes += put.load.nbytes
    if group:
        yield group


Stager.ordering = Ordering


def _copy_array(source: np.ndarray, buffer: np.ndarray | None) -> np.ndarray:
    if buffer is None:
        return np.array(source, order="C", copy=True)
    np.copyto(buffer, source)
    return buffer
