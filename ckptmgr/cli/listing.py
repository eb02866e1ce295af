"""`ckptmgr ls`: the steps below a run's directory."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict
from typing import Any

from ckptmgr import CheckpointManager, Options, Problem, StepInfo, StepNotFound
from ckptmgr.checking import problems_of
from ckptmgr.cli import answer
from ckptmgr.cli.answer import Answer

_HEAD = ("STEP", "KIND", "STATUS", "CREATED", "AGE", "SIZE", "METRICS")


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "ls",
        help="list the steps of a run",
        description="Lists the steps below DIR, and directories that have the name of a step and "
        "are none.",
    )
    parser.add_argument("directory", metavar="DIR", help="a run's directory")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Answer:
    with CheckpointManager(arguments.directory, Options(read_only=True)) as manager:
        where = manager.directory
        if not os.path.isdir(where):
            state = "is a file, not a directory" if os.path.lexists(where) else "does not exist"
            raise StepNotFound(f"{where} {state}")
        steps = manager.steps()
    damaged = sorted(problems_of(where), key=lambda found: found[0])
    text = _json(where, steps, damaged) if arguments.json else _text(steps, damaged)
    if damaged:
        what = f"step {damaged[0][0]}" if len(damaged) == 1 else f"{len(damaged)} steps"
        return Answer(text, answer.FAILED, f"{what} in {where} cannot be used")
    if not steps:
        return Answer(text, answer.EMPTY, f"there is no step in {where}")
    return Answer(text)


def _json(where: str, steps: tuple[StepInfo, ...], damaged: list[tuple[int, Problem]]) -> str:
    return answer.as_json(
        {
            "directory": where,
            "steps": [asdict(info) for info in steps],
            "damaged": [{"step": step, **asdict(problem)} for step, problem in damaged],
        }
    )


def _text(steps: tuple[StepInfo, ...], damaged: list[tuple[int, Problem]]) -> str:
    now = time.time()
    rows = [
        (
            str(info.step),
            info.kind,
            info.status + (", pinned" if info.pinned else ""),
            answer.moment(info.created),
            answer.age(now - info.created),
            answer.size(info.nbytes),
            answer.pairs(info.metrics),
        )
        for info in steps
    ]
    text = answer.table(_HEAD, rows, right=("STEP", "AGE", "SIZE")) if rows else ""
    if damaged:
        text += ("\n" if text else "") + "damaged:\n"
        text += "".join(f"  {step}  {answer.printable(str(why))}\n" for step, why in damaged)
    return text
