"""The tables of `device_check.py`."""

import statistics
from collections.abc import Callable
from typing import Any

import report

WARM_UPS = 2  # saves that make buffers and compile
ORBAX = "orbax"


def size_report(size: Any, systems: list[str]) -> str:
    """All about one size, in markdown; `size` and its turns are those of `device_check.py`."""
    if size.why_not and not size.turns:
        return f"## {size.name}\n\nLeft out: {size.why_not}."
    head = (
        f"## {size.name}\n\nStep without saving {_seconds([size.step])}. Plain copies to the host, "
        f"first and again: to pinned_host {_rates(size.pinned)}, "
        f"`np.asarray` {_rates(size.asarray)}."
    )
    return "\n\n".join([head, report.columns(_table(size, systems)), *_notes(size, systems)])


def _table(size: Any, systems: list[str]) -> list[list[str]]:
    turns = {system: size.turns.get(system) for system in systems}
    ran = {system: turn for system, turn in turns.items() if turn and turn.in_save}

    def row(title: str, show: Callable[[Any], str]) -> list[str]:
        return [title, *(show(ran[system]) if system in ran else "" for system in systems)]

    def of_orbax(measure: str) -> list[str]:
        theirs = ran.get(ORBAX)
        return row("... of Orbax's", lambda turn: _ratio(turn, theirs, measure))

    return [
        ["", *systems],
        row("saves counted, of all", lambda t: f"{len(_warm(t.in_save))} of {len(t.in_save)}"),
        row("in save()", lambda turn: _seconds(_warm(turn.in_save))),
        of_orbax("in_save"),
        row("... the very first", lambda turn: _seconds(turn.in_save[:1])),
        row("first donated step after", lambda turn: _seconds(_warm(turn.first))),
        row("... of a step without saving", lambda turn: _inflation(turn, turn.first)),
        row("further steps until durable", lambda turn: _seconds(_warm(turn.during))),
        row("... of a step without saving", lambda turn: _inflation(turn, turn.during)),
        row("to durable", lambda turn: _seconds(_warm(turn.durable))),
        of_orbax("durable"),
        row("to the host, by its event", lambda turn: _rates(_warm(turn.transfer)[-1:])),
        row("... as the first step met it", lambda turn: _met(turn, size.nbytes)),
        row("arrays donated (is_deleted)", lambda turn: "yes" if turn.donated else "NO"),
        row("leaves as they were in save()", _equal),
    ]


def _notes(size: Any, systems: list[str]) -> list[str]:
    lines = [f"- {size.name}: {size.why_not}"] if size.why_not else []
    for system in systems:
        turn = size.turns.get(system)
        reason = "its turn did not come" if turn is None else turn.why_not
        if turn and not turn.in_save and not reason:
            reason = "stopped"
        if reason:
            lines.append(f"- {system}: {reason}")
    return ["Left out or broken off:\n\n" + "\n".join(lines)] if lines else []


def _warm(values: list[float]) -> list[float]:
    """Without the warm-ups, where there is anything else; else the last."""
    return values[WARM_UPS:] or values[-1:]


def _median(values: list[float]) -> float:
    return statistics.median(_warm(values))


def _seconds(values: list[float]) -> str:
    return report.Spread.of(values).show(report.seconds)


def _rates(values: list[float]) -> str:
    return ", ".join(f"{value / 1e9:.2f}" for value in values) + " GB/s" if values else ""


def _ratio(turn: Any, theirs: Any, measure: str) -> str:
    if theirs is None:
        return ""
    return f"{_median(getattr(turn, measure)) / _median(getattr(theirs, measure)):.2f}"


def _inflation(turn: Any, values: list[float]) -> str:
    return f"{_median(values) / statistics.median(turn.base):.2f}"


def _met(turn: Any, nbytes: int) -> str:
    """The copies are over when the first donated step is, if it had to wait for them at all."""
    if _median(turn.in_save) >= 0.9 * _median(turn.durable):
        return ""  # synchronous
    waited = _median(turn.first) - statistics.median(turn.base)
    if waited < 0.1 * statistics.median(turn.base):
        return "no wait"
    return _rates([nbytes / (_median(turn.in_save) + waited)])


def _equal(turn: Any) -> str:
    if not turn.checked:
        return ""
    wrong = f", WRONG: {', '.join(turn.wrong[:3])}" if turn.wrong else ""
    return f"{turn.checked - len(turn.wrong)} of {turn.checked} looked at{wrong}"
