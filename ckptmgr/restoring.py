"""What a manager does to restore: which step, the same on every process, and what to do where it
cannot be read.

Process 0 says which step is the latest. All read it, and hand it out only when all could: a process
that goes on while another has failed would wait for that one in its next collective.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckptmgr import reading
from ckptmgr.core.info import Restored, Skipped
from ckptmgr.engine.catalog import Catalog
from ckptmgr.engine.listing import Entry
from ckptmgr.engine.meeting import odd_ones, telling
from ckptmgr.engine.pipeline import Tools
from ckptmgr.errors import CorruptCheckpoint, PeerFailed, Problem, StepNotFound, StoreError

logger = logging.getLogger("ckptmgr")


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How reading a step went in one process; `bad` says why it cannot be used, "" that it can.

    Attributes:
      transient: whether that may be the storage's mood rather than damage.
      gone: whether it is not there: it was deleted meanwhile, or this process does not see it.
    """

    bad: str = ""
    transient: bool = False
    gone: bool = False

    def to_json(self) -> bytes:
        return json.dumps([self.bad, self.transient, self.gone]).encode()


def _worst(payloads: Sequence[bytes]) -> bytes:
    """What the outcomes of all processes come to."""
    found = [_Outcome(*json.loads(payload)) for payload in payloads]
    if found[0].gone:
        return _Outcome(gone=True).to_json()
    texts = [(rank, outcome.bad) for rank, outcome in enumerate(found) if outcome.bad]
    if len(found) > 1:
        bad = "; ".join(f"process {rank}: {text}" for rank, text in texts[:3])
    else:
        bad = "; ".join(text for _, text in texts)
    return _Outcome(bad, any(outcome.transient for outcome in found)).to_json()


class Restores:
    """The restores of one manager, whose lock serialises the calls."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._catalog = tools.catalog
        self._coordinator = tools.coordinator
        self._options = tools.options
        self._begun = 0
        self._known: list[str] = []

    def _begin(self) -> str:
        """The name of a restore, the same in every process."""
        self._begun += 1
        self._known.append(f"restore.{self._begun}")
        return self._known[-1]

    def _met(self, name: str) -> None:
        """All processes have come to this restore: those before it are forgotten.

        Not earlier, for one that fails does not wait for the others, who may be a restore behind.
        """
        for old in self._known if self._coordinator.rank == 0 else ():
            if old != name:
                self._coordinator.forget(old)
        self._known = [name]

    # -- one step ---------------------------------------------------------------------------

    def restore(
        self, step: int | None, like: Any, item: str | None, cast: bool, partial: bool
    ) -> Any:
        """See `CheckpointManager.restore`."""
        while True:
            name = self._begin()
            with telling(self._coordinator, f"{name}/step", f"{name}/read", own=True):
                number = self._agree(f"{name}/step", step)
                self._met(name)
                if number is None:
                    raise StepNotFound(f"there is no committed step in {self._catalog.store.root}")
                try:
                    entry = found(self._catalog, number)
                    state = self._read(entry, like, item, cast, partial, f"{name}/ready")
                except StepNotFound:
                    alone = self._coordinator.world == 1
                    if alone and step is None and self._catalog.entry(number) is None:
                        continue  # it was deleted while it was read
                    raise
                self._coordinator.exchange(f"{name}/read", b"", self._tools.deadline)
            return state

    def _agree(self, phase: str, step: int | None) -> int | None:
        """The step that all restore: the one asked for, or what process 0 takes for the latest."""

        def answer(payloads: Sequence[bytes]) -> bytes:
            asked = [json.loads(payload) for payload in payloads]
            wrong = odd_ones(
                phase,
                [f"restores {'the latest step' if s is None else f'step {s}'}" for s in asked],
            )
            if wrong is not None:
                raise wrong
            if step is not None:
                return json.dumps(step).encode()
            entry = reading.newest(self._catalog)
            return json.dumps(None if entry is None else entry.step).encode()

        mine = json.dumps(step).encode()
        found = json.loads(self._coordinator.exchange(phase, mine, self._tools.deadline, answer))
        return None if found is None else int(found)

    def _read(
        self, entry: Entry, like: Any, item: str | None, cast: bool, partial: bool, phase: str
    ) -> Any:
        """`phase` begins the names of those in which all say that they have read their parts of an
        item, see `Restore.broadcast_replicas`; whoever fails tells those that wait there."""
        passed = 0

        def ready() -> None:
            nonlocal passed
            self._coordinator.exchange(f"{phase}.{passed}", b"", self._tools.deadline)
            passed += 1

        try:
            return self._read_here(entry, like, item, cast, partial, ready)
        except PeerFailed:
            raise
        except BaseException as exc:
            if self._options.restore.broadcast_replicas:
                self._coordinator.failed(f"{phase}.{passed}", exc)
            raise

    def _read_here(
        self,
        entry: Entry,
        like: Any,
        item: str | None,
        cast: bool,
        partial: bool,
        ready: Callable[[], None],
    ) -> Any:
        root = self._catalog.store.root
        with self._tools.emitter.span("restore", entry.step) as span:
            while True:
                try:
                    opened = reading.open_entry(root, entry)
                    if item is None and not partial:
                        span.note(nbytes=opened.info.nbytes or 0)
                    return reading.restore_step(
                        opened,
                        like,
                        item=item,
                        cast=cast,
                        partial=partial,
                        options=self._options,
                        ready=ready,
                    )
                except (CorruptCheckpoint, StoreError) as exc:
                    again = self._catalog.entry(entry.step)
                    if again is None:
                        raise StepNotFound(
                            f"step {entry.step} was deleted while it was read", entry.step
                        ) from exc
                    if again.problem is not None or again == entry:
                        raise
                    entry = again  # replaced by another writer while it was read

    # -- the newest that verifies -----------------------------------------------------------

    def restore_latest(self, like: Any) -> Restored | None:
        """See `CheckpointManager.restore_latest`."""
        name = self._begin()
        skipped: list[Skipped] = []
        problems: list[Problem] = []
        tried: set[int] = set()
        for turn in itertools.count():
            step, damaged = self._next(f"{name}/{turn}/step", tried, skipped, problems)
            if step is None:
                break
            tried.add(step)
            state, outcome = self._try(f"{name}/{turn}/read", step, like, problems)
            self._met(name)
            if not outcome.bad and not outcome.gone:
                return Restored(step, state, tuple(skipped))
            del state
            if outcome.bad:
                skipped.append(Skipped(step, outcome.bad))
                logger.warning("passed over: %s", outcome.bad)
                if not outcome.transient:
                    self._put_aside(step, outcome.bad)
        if damaged:
            raise CorruptCheckpoint(skipped[0].step, problems)
        return None

    def _next(
        self, phase: str, tried: set[int], skipped: list[Skipped], problems: list[Problem]
    ) -> tuple[int | None, bool]:
        """The newest step that was not tried yet, as process 0 sees it; those that it cannot use
        are passed over. None where none is left, and whether any of those tried was a step."""

        def choose() -> bytes:
            over: list[tuple[int, str]] = []
            for entry in self._catalog.entries():
                if entry.step in tried:
                    continue
                problem = entry.problem
                if problem is None and entry.suspect:
                    problem = Problem("", reading.why_suspect(entry), transient=True)
                if problem is None:
                    return json.dumps([entry.step, False, over]).encode()
                problems.append(problem)
                over.append((entry.step, str(CorruptCheckpoint(entry.step, [problem]))))
            passed = bool(skipped or over)
            real = (not reading.is_no_step(entry) for entry in self._catalog.entries())
            return json.dumps([None, passed and any(real), over]).encode()

        answer = self._coordinator.lead(phase, choose, self._tools.deadline, b"the latest")
        step, damaged, over = json.loads(answer)
        for number, reason in over:
            tried.add(number)
            skipped.append(Skipped(number, reason))
            logger.warning("passed over: %s", reason)
            if self._coordinator.rank:
                problems.append(Problem("", reason))
        return step, damaged

    def _try(
        self, phase: str, step: int, like: Any, problems: list[Problem]
    ) -> tuple[Any, _Outcome]:
        """Reads a step, and hears whether all processes could."""
        state = None
        with telling(self._coordinator, phase, own=True):
            try:
                entry = found(self._catalog, step)
                state = self._read(entry, like, None, False, False, f"{phase}.ready")
                mine = _Outcome()
            except PeerFailed:
                mine = _Outcome()  # what went wrong elsewhere is told next
            except StepNotFound as exc:
                if self._catalog.entry(step) is not None:
                    raise
                mine = _Outcome(str(exc), transient=True, gone=True)
            except CorruptCheckpoint as exc:
                problems += exc.problems
                mine = _Outcome(str(exc), any(problem.transient for problem in exc.problems))
            answer = self._coordinator.exchange(phase, mine.to_json(), self._tools.deadline, _worst)
        outcome = _Outcome(*json.loads(answer))
        if outcome.bad and (mine.gone or not mine.bad):
            problems.append(Problem("", outcome.bad, transient=outcome.transient))
        return state, outcome

    def _put_aside(self, step: int, reason: str) -> None:
        """Records a step as damaged, so that it does not stand in the way of saving it again."""
        entry = self._catalog.entry(step)
        if entry is None or self._options.read_only or not self._tools.leads:
            return
        try:
            self._catalog.mark_damaged(entry, reason)
        except StoreError as exc:
            logger.warning("step %d: its damage is not on record: %s", step, exc)


def found(catalog: Catalog, step: int) -> Entry:
    """A committed step's entry. Raises StepNotFound or CorruptCheckpoint."""
    entry = catalog.entry(step)
    if entry is None:
        latest = next((other.step for other in catalog.committed()), None)
        raise StepNotFound(
            f"there is no step {step} in {catalog.store.root}; latest: {latest}", step
        )
    if entry.problem is not None:
        raise CorruptCheckpoint(step, [entry.problem])
    return entry
