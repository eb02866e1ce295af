"""`ckptmgr advise`: how often to save a job, in which mode, and what that costs."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ckptmgr import Advice, advise
from ckptmgr.cli import answer
from ckptmgr.cli.answer import Answer
from ckptmgr.errors import InvalidOption


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "advise",
        help="how often to save a job, in which mode, and what that costs",
        description="Prints the interval with the highest expected goodput, the mode that suits, "
        "and what both cost, each figure with its formula or source. Looks at no checkpoint.",
        epilog="Numbers may be written as 175e9. docs/ADVICE.md has the formulas.",
    )
    for name, (kind, metavar, text) in _ARGUMENTS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, metavar=metavar, dest=name, help=text
        )
    parser.add_argument("--no-heartbeat", action="store_true", help="save without heartbeats")
    parser.add_argument("--json", action="store_true", help="print JSON, in seconds and bytes")
    parser.set_defaults(run=run)


def _whole(text: str) -> int:
    """A whole number, also where it is written as 1e3."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise argparse.ArgumentTypeError(f"a whole number is wanted, not {text!r}")
    return int(number)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a number is wanted, not {text!r}") from None


def _giga(text: str) -> float:
    return _number(text) * 1e9


# Where the names differ from those of `advise`, `_NAMES` says so.
_ARGUMENTS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "params": (_number, "N", "parameters of the model"),
    "bytes_per_param": (_number, "B", "bytes for each, optimizer included (default: 14)"),
    "state_bytes": (_number, "B", "size of the state, instead of --params"),
    "accelerators": (_whole, "N", "of the whole job"),
    "hosts": (_whole, "N", "default: one for 8 accelerators"),
    "step_seconds": (_number, "S", "length of a training step; gives the interval in steps"),
    "write_gbps": (_giga, "GB/s", "writing, all hosts together, in gigabytes a second"),
    "flush_seconds": (_number, "S", "from save() to durable, where it was measured"),
    "read_gbps": (_giga, "GB/s", "reading; default: as fast as writing"),
    "restore_seconds": (_number, "S", "reading a step, where it was measured"),
    "stall_seconds": (_number, "S", "what a save stops training, where it was measured"),
    "detect_and_restart_seconds": (_number, "S", "from a failure to reading (default: 600)"),
    "undetected_seconds": (_number, "S", "how long a wrong value may go unnoticed"),
    "mean_seconds_between_failures": (_number, "S", "of the whole job"),
    "failures_per_accelerator_day": (_number, "N", "where that is not known (default: Llama 3's)"),
    "interval_seconds": (_number, "S", "your own interval, to compare"),
    "run_days": (_number, "DAYS", "length of the run (default: 30)"),
    "keep_last": (_whole, "N", "steps that KeepLast keeps; default: all are kept"),
    "keep_every_seconds": (_number, "S", "one step kept for good in so many seconds"),
    "heartbeat_every_saves": (_whole, "N", "default: 100"),
    "mode": (str, "MODE", "sync, copy_on_write or double_buffer; default: what suits"),
    "job": (str, "JOB", "training, llm or rl (default: training)"),
}
_NAMES = {"write_gbps": "write_bytes_per_second", "read_gbps": "read_bytes_per_second"}


def run(arguments: argparse.Namespace) -> Answer:
    given = {name: getattr(arguments, name) for name in _ARGUMENTS}
    asked = {_NAMES.get(name, name): value for name, value in given.items() if value is not None}
    asked.setdefault("accelerators", None)  # so that its absence is told like any other mistake
    if arguments.no_heartbeat:
        asked["heartbeat_every_saves"] = None
    try:
        found = advise(**asked)
    except InvalidOption as exc:
        raise InvalidOption(_as_flags(str(exc))) from exc
    return Answer(_json(found) if arguments.json else str(found))


def _as_flags(text: str) -> str:
    """A message of the library with its arguments by the names that they have here."""
    flags = {_NAMES.get(name, name): f"--{name.replace('_', '-')}" for name in _ARGUMENTS}
    words = "|".join(name for name in flags if "_" in name or name == "params")
    text = re.sub(rf"\b({words})\b", lambda found: flags[found[1]], text)
    first, _, rest = text.partition(" ")
    return f"{flags.get(first, first)} {rest}"


def _json(found: Advice) -> str:
    figures = [{**asdict(figure), "shown": figure.shown} for figure in found.figures]
    return answer.as_json({**asdict(found), "figures": figures})
