"""`ckptmgr prune`: deletes the steps that a retention policy drops, and says why the others stay."""

from __future__ import annotations

import argparse
import functools
import operator
import re
from typing import Any

import ckptmgr
from ckptmgr.cli import answer
from ckptmgr.cli.answer import Answer
from ckptmgr.core.retention import Decision, Policy

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50}


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "prune",
        help="delete the steps that a policy drops",
        description="Deletes the steps below DIR that no --keep option keeps. The newest step, the "
        "newest heartbeat, the newest verified one, pinned steps and steps that somebody reads "
        "stay. What Orbax wrote is left alone.",
    )
    add = parser.add_argument
    add("directory", metavar="DIR", help="a run's directory")
    add("--dry-run", action="store_true", help="delete nothing, only print what would go and why")
    add("--keep-last", metavar="N", type=int, help="the N highest steps")
    add("--keep-every", metavar="STEPS", type=int, help="multiples of STEPS")
    add("--keep-every-seconds", metavar="S", type=float, help="one in S seconds")
    add("--keep-best", metavar="N:METRIC[:max]", type=_best, help="the N lowest METRIC, or highest")
    add("--keep-heartbeats", metavar="N", type=int, help="the N newest heartbeats")
    add("--keep-log-spaced", metavar="N", type=int, help="N steps per power of ten")
    add("--budget-bytes", metavar="SIZE", type=_size, help="at most so much, like 500GB or 2TiB")
    add("--budget-files", metavar="N", type=int, help="at most so many files")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Answer:
    policy = _policy(arguments)
    dry = arguments.dry_run
    decision = ckptmgr.prune(arguments.directory, policy, dry_run=dry)
    if not decision.keep and not decision.drop:
        return Answer("", answer.EMPTY, f"there is no step of ckptmgr in {arguments.directory}")
    return Answer(_json(decision, dry) if arguments.json else _text(decision, dry))


def _policy(arguments: argparse.Namespace) -> Policy:
    kinds: dict[str, Any] = {
        "keep_last": ckptmgr.KeepLast,
        "keep_every": lambda steps: ckptmgr.KeepEvery(steps=steps),
        "keep_every_seconds": ckptmgr.KeepEverySeconds,
        "keep_best": lambda best: ckptmgr.KeepBest(*best),
        "keep_heartbeats": ckptmgr.KeepHeartbeats,
        "keep_log_spaced": ckptmgr.KeepLogSpaced,
    }
    given = {name: getattr(arguments, name) for name in kinds}
    found = [kinds[name](value) for name, value in given.items() if value is not None]
    limits = arguments.budget_bytes, arguments.budget_files
    if limits == (None, None):
        if not found:
            raise ckptmgr.InvalidOption("say what to keep: one --keep option at least, or a budget")
        return functools.reduce(operator.or_, found)
    whole = functools.reduce(operator.or_, found) if found else ckptmgr.KeepAll()
    return whole & ckptmgr.Budget(bytes=limits[0], files=limits[1])


def _best(text: str) -> tuple[int, str, str]:
    count, _, rest = text.partition(":")
    metric, _, mode = rest.partition(":")
    if not count.isdigit() or not metric or mode not in ("", "min", "max"):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 2:loss or 3:accuracy:max")
    return int(count), metric, mode or "min"


def _size(text: str) -> int:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]*)", text.lower())
    if not found or found[2].removesuffix("b") + "b" * bool(found[2]) not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 500GB or 2TiB")
    return int(float(found[1]) * _UNITS[found[2].removesuffix("b") + "b" * bool(found[2])])


def _json(decision: Decision, dry: bool) -> str:
    return answer.as_json(
        {
            "deleted": [] if dry else list(decision.drop),
            "drop": list(decision.drop),
            "keep": [{"step": step, "why": why} for step, why in decision.keep.items()],
            "given_up": [{"step": step, "why": why} for step, why in decision.given_up.items()],
            "warnings": list(decision.warnings),
        }
    )


def _text(decision: Decision, dry: bool) -> str:
    verb = "would go" if dry else "deleted"
    rows = [(step, "kept", why) for step, why in decision.keep.items()]
    for step in decision.drop:
        why = decision.given_up.get(step)
        rows.append((step, verb, f"given up for the budget: {why}" if why else "nothing keeps it"))
    lines = [(str(step), what, answer.printable(why)) for step, what, why in sorted(rows)]
    text = answer.table(("STEP", "", "WHY"), lines, right=("STEP",))
    return text + "".join(f"warning: {warning}\n" for warning in decision.warnings)
