"""`ckptmgr verify`: is all of a step there, and is it what was written?"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ckptmgr import CheckpointManager, Options, StepNotFound, Verdict, verify
from ckptmgr.checking import problems_of
from ckptmgr.cli import answer
from ckptmgr.cli.answer import Answer
from ckptmgr.cli.showing import step_argument

_HEAD = ("STEP", "KIND", "VERDICT", "READ", "PROBLEMS")
_SHOWN = 50


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="read all of a step and compare every digest",
        description="Reads everything of a step, compares every size and digest, and tells all "
        "that is wrong. Changes nothing, and takes no accelerator.",
        epilog="Exit status: 0 nothing is wrong, 1 something is, 2 wrong call, 3 no such step.",
    )
    parser.add_argument("path", metavar="PATH", help="a step's directory, or a run's")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--step",
        type=step_argument,
        metavar="N",
        help="of a run: this step instead of the newest",
    )
    which.add_argument("--all", action="store_true", help="of a run: every step, oldest first")
    parser.add_argument(
        "--from-storage",
        action="store_true",
        help="drop the files from the page cache first, so that the device is read",
    )
    parser.add_argument(
        "--leaf-digests",
        action="store_true",
        help="digests of the values whatever their mesh; compared where they were recorded",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Answer:
    try:
        found = _verify_all(arguments) if arguments.all else [_verify(arguments, arguments.step)]
    except StepNotFound as exc:
        return Answer("", answer.EMPTY, str(exc))
    text = _json(found) if arguments.json else _text(found)
    bad = [verdict for verdict in found if not verdict.good]
    if bad:
        what = f"{len(bad)} of {len(found)} steps" if len(found) > 1 else _name(bad[0])
        count = sum(len(verdict.problems) for verdict in bad)
        return Answer(text, answer.FAILED, f"{what} failed with {_problems(count)}")
    return Answer(text)


def _verify_all(arguments: argparse.Namespace) -> list[Verdict]:
    """All steps, oldest first, and what has the name of one; what goes meanwhile is left out."""
    with CheckpointManager(arguments.path, Options(read_only=True)) as manager:
        where = manager.directory
        steps = {info.step for info in manager.steps()}
    found = []
    for step in sorted(steps | {step for step, _ in problems_of(where)}):
        with contextlib.suppress(StepNotFound):
            found.append(_verify(arguments, step))
    if not found:
        raise StepNotFound(f"there is no step in {where}")
    return found


def _verify(arguments: argparse.Namespace, step: int | None) -> Verdict:
    bar = _Bar("" if step is None else f"step {step} ") if sys.stderr.isatty() else None
    try:
        return verify(
            arguments.path,
            step,
            from_storage=arguments.from_storage,
            leaf_digests=arguments.leaf_digests,
            progress=bar,
        )
    finally:
        if bar is not None:
            bar.clear()


class _Bar:
    """A line on a terminal that shows how far it is; drawn ten times a second at most."""

    WIDTH = 30

    def __init__(self, label: str) -> None:
        self._label = label
        self._began = time.monotonic()
        self._drawn = float("-inf")

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._drawn < 0.1:
            return
        self._drawn = now
        share = done / total if total else 1.0
        filled = int(share * self.WIDTH)
        bar = "#" * filled + "." * (self.WIDTH - filled)
        rate = answer.size(int(done / max(now - self._began, 1e-3)))
        line = f"{self._label}[{bar}] {share:4.0%} of {answer.size(total)}, {rate}/s"
        print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _json(found: Sequence[Verdict]) -> str:
    return answer.as_json(
        {
            "verdicts": [
                {**asdict(verdict), "good": verdict.good, "verified": verdict.verified}
                for verdict in found
            ]
        }
    )


def _text(found: Sequence[Verdict]) -> str:
    rows = [
        (
            "-" if verdict.step is None else str(verdict.step),
            verdict.kind or "-",
            _word(verdict),
            answer.size(verdict.nbytes),
            str(len(verdict.problems)),
        )
        for verdict in found
    ]
    text = answer.table(_HEAD, rows, right=("STEP", "READ", "PROBLEMS"))
    for verdict in found:
        lines = [answer.printable(str(problem)) for problem in verdict.problems[:_SHOWN]]
        more = len(verdict.problems) - _SHOWN
        lines += [f"and {more} more; --json lists them all"] if more > 0 else []
        lines += [f"note: {answer.printable(note)}" for note in verdict.notes]
        unknown = [answer.printable(name) for name in verdict.unknown[:_SHOWN]]
        if unknown:
            count = len(verdict.unknown)
            rest = ", ..." if count > _SHOWN else ""
            lines.append(f"note: nothing names these ({count}): {', '.join(unknown)}{rest}")
        for item, digests in verdict.leaf_digests.items():
            lines += [f"{hex}  {item}  {answer.printable(leaf)}" for leaf, hex in digests.items()]
        if lines:
            text += f"\n{_name(verdict)}:\n" + "".join(f"  {line}\n" for line in lines)
    return text


def _word(verdict: Verdict) -> str:
    if not verdict.good:
        return "damaged"
    return "verified" if verdict.verified else "readable"


def _name(verdict: Verdict) -> str:
    return answer.printable(verdict.path) if verdict.step is None else f"step {verdict.step}"


def _problems(count: int) -> str:
    return f"{count} problem" if count == 1 else f"{count} problems"
