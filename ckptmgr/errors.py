"""Every exception that ckptmgr raises on purpose, in one tree.

A message names the step, the leaf and the file it concerns and says what to do; text that comes
from the storage library stands at its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a step on disk.

    Attributes:
      file: path below the step directory, or "" when no single file is to blame.
      message: what is wrong, as a sentence.
      leaf: dotted name of the leaf concerned, or "".
      transient: whether it may be the storage's mood rather than damage.
    """

    file: str
    message: str
    leaf: str = ""
    transient: bool = False

    def __str__(self) -> str:
        where = ": ".join(part for part in (self.file, self.leaf and f"leaf {self.leaf}") if part)
        return f"{where}: {self.message}" if where else self.message


class CheckpointError(Exception):
    """Base of everything below."""


class InvalidOption(CheckpointError, ValueError):
    """An option or argument has a value that cannot be used."""


class ManagerClosed(CheckpointError):
    """The manager was closed, or belongs to another process (a forked child)."""


class NotAllowedHere(CheckpointError):
    """The call would wait for the very thread that makes it (a hook after commit)."""


class ReadOnly(CheckpointError):
    """A read-only manager was asked to write."""


class UnsupportedLeaf(CheckpointError, TypeError):
    """A leaf or container of a type that cannot be stored; nothing was written."""

    def __init__(self, leaf: str, reason: str) -> None:
        super().__init__(f"leaf {leaf!r}: {reason}")
        self.leaf = leaf


class SnapshotLost(CheckpointError):
    """A leaf was donated or deleted before its values could be copied."""

    def __init__(self, leaf: str, step: int) -> None:
        super().__init__(
            f"step {step}: leaf {leaf!r} was donated or deleted before save() was called; "
            "call save() with the arrays that the step function returned"
        )
        self.leaf = leaf
        self.step = step


class AuditFailed(CheckpointError):
    """A heartbeat found that the asynchronous staging path had other values than the arrays.

    Attributes:
      step: the heartbeat's step; it was not written.
      leaves: dotted names of the leaves that differ.
      suspects: steps saved asynchronously since the last heartbeat, marked `suspect` now.
    """

    def __init__(self, step: int, leaves: Sequence[str], suspects: Sequence[int]) -> None:
        shown = ", ".join(repr(leaf) for leaf in leaves[:20])
        if len(leaves) > 20:
            shown += f" and {len(leaves) - 20} more"
        marked = f"steps {list(suspects)} are" if suspects else "no step is"
        super().__init__(
            f"step {step}: asynchronous staging gave other values than the arrays hold for leaf "
            f"{shown}; {marked} marked suspect and passed over by restore_latest(). "
            "Snapshot(mode='sync') saves without that path"
        )
        self.step = step
        self.leaves = tuple(leaves)
        self.suspects = tuple(suspects)


class SaveFailed(CheckpointError):
    """A save did not become durable. The steps that were there before are untouched."""

    def __init__(self, step: int, cause: BaseException | str) -> None:
        text = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
        outcome = "failed and left no step behind"
        if isinstance(cause, StoreError) and cause.unknown:
            outcome = "is in doubt"
        super().__init__(f"the save of step {step} {outcome}: {text}")
        self.step = step


class StepExists(CheckpointError):
    """The step is already there and `overwrite=True` was not given."""

    def __init__(self, step: int, path: str) -> None:
        super().__init__(f"step {step} exists already at {path}; pass overwrite=True to replace it")
        self.step = step


class StepNotFound(CheckpointError, FileNotFoundError):
    """No such committed step."""

    def __init__(self, message: str, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


class CorruptCheckpoint(CheckpointError):
    """A step on disk is damaged.

    Attributes:
      step: the step, or None where no step number is known.
      problems: everything found wrong.
    """

    def __init__(self, step: int | None, problems: Sequence[Problem]) -> None:
        name = "the checkpoint" if step is None else f"step {step}"
        shown = [str(problem) for problem in problems[:20]]
        if len(problems) > len(shown):
            shown.append(f"... and {len(problems) - len(shown)} more")
        super().__init__(f"{name} is damaged: " + "; ".join(shown))
        self.step = step
        self.problems = tuple(problems)


class TreeMismatch(CheckpointError, ValueError):
    """The target does not fit what is stored; every leaf concerned is listed.

    Attributes:
      missing: leaves of the target that the checkpoint does not have.
      extra: leaves of the checkpoint that the target does not have.
      differing: leaf -> what differs, stored and target side by side.
    """

    def __init__(
        self,
        where: str,
        total: int,
        missing: Sequence[str] = (),
        extra: Sequence[str] = (),
        differing: Mapping[str, str] | None = None,
    ) -> None:
        self.missing = tuple(sorted(missing))
        self.extra = tuple(sorted(extra))
        self.differing = dict(sorted((differing or {}).items()))
        count = len(self.missing) + len(self.extra) + len(self.differing)
        how_many = f"{count} of {total} leaves" if count <= total else f"{count} differences"
        lines = [f"{where} does not fit the target ({how_many}):"]
        lines += [f"  missing in checkpoint  {leaf}" for leaf in self.missing]
        lines += [
            f"  not in target          {leaf}  (partial=True skips it)" for leaf in self.extra
        ]
        lines += [f"  {text:<21}  {leaf}" for leaf, text in self.differing.items()]
        super().__init__("\n".join(lines))


class PeerFailed(CheckpointError):
    """Another process of the job failed or stayed silent."""

    def __init__(self, phase: str, failures: Mapping[int, str], silent: Sequence[int]) -> None:
        parts = [f"process {rank}: {text}" for rank, text in sorted(failures.items())]
        if silent:
            parts.append("no answer from process " + ", ".join(map(str, sorted(silent))))
        super().__init__(f"phase {phase!r}: " + "; ".join(parts))
        self.phase = phase
        self.failures = dict(failures)
        self.silent = tuple(sorted(silent))


class StoreError(CheckpointError, OSError):
    """The storage refused an operation.

    Attributes:
      unknown: True where it may have taken effect all the same.
    """

    def __init__(self, message: str, unknown: bool = False) -> None:
        super().__init__(message)
        self.unknown = unknown
