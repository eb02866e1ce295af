"""How one check of a contract went, and the way all of them are run."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass


class Broken(AssertionError):
    """Something that was promised did not hold."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one check went.

    Attributes:
      check: the sentence it proves.
      passed: whether the sentence held.
      detail: what was expected and what found; "" where it held.
      seconds: how long it took.
    """

    check: str
    passed: bool
    detail: str
    seconds: float

    def __str__(self) -> str:
        word = "ok" if self.passed else "FAILED"
        line = f"{word:6} {self.seconds:5.1f} s  {self.check}"
        return f"{line}: {self.detail}" if self.detail else line


def outcome_of(
    sentence: str, directory: str, check: Callable[[str], None], *, keep: bool = False
) -> Outcome:
    """Runs a check in a directory of its own; one that fails is an outcome, not an exception.

    With `keep` what a failed check wrote stays, and is named.
    """
    own = tempfile.mkdtemp(prefix="ckptmgr-contract-", dir=directory)
    started = time.monotonic()
    detail = ""
    try:
        check(own)
    except Exception as exc:
        told = [str(exc), *getattr(exc, "__notes__", ())]
        name = "" if isinstance(exc, Broken) else f"{type(exc).__name__}: "
        detail = f"{name}{'; '.join(told)}" + (f" (what was written is in {own})" if keep else "")
    if not (keep and detail):
        shutil.rmtree(own, ignore_errors=True)
    return Outcome(sentence, not detail, detail, time.monotonic() - started)
