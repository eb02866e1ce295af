"""Who writes what several processes hold: even loads, without a word between them.

Every process works out the same answer from the same pieces. Pieces that have the same holders lie
end to end, and that line is cut where each holder reaches its quota, so that a process gets one
run of it and at most its ends are parts of pieces. Quotas fill the holders up to one level, as
water does, from what they have to write anyway. The sets of holders with the fewest go first, for
they have the least choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """Something that any of its holders could write.

    Attributes:
      holders: processes, ascending; at least one.
      nbytes: its size.
      cells: how many equal cells it can be cut into, which nobody divides further.
    """

    holders: tuple[int, ...]
    nbytes: int
    cells: int = 1


@dataclass(frozen=True, slots=True)
class Run:
    """Cells `start` to `stop` of a piece are written by `process`."""

    process: int
    start: int
    stop: int


def share(pieces: Sequence[Piece], loads: Mapping[int, int]) -> list[tuple[Run, ...]]:
    """For each piece who writes it.

    Args:
      loads: process -> bytes that it writes besides.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    same: dict[int, list[int]] = {}  # by identity first: equal tuples of thousands are slow to hash
    for number, piece in enumerate(pieces):
        members = same.get(id(piece.holders))
        if members is None:
            members = same[id(piece.holders)] = groups.setdefault(piece.holders, [])
        members.append(number)
    level = dict(loads)
    found: list[tuple[Run, ...]] = [()] * len(pieces)
    for holders in sorted(groups, key=lambda holders: (len(holders), holders)):
        _share_line(holders, groups[holders], pieces, level, found)
    return found


def _share_line(
    holders: tuple[int, ...],
    members: Sequence[int],
    pieces: Sequence[Piece],
    level: dict[int, int],
    found: list[tuple[Run, ...]],
) -> None:
    """Cuts the line of the pieces `members`; adds what each holder got to `level`."""
    ends = _ends(
        holders, [level.get(h, 0) for h in holders], sum(pieces[i].nbytes for i in members)
    )
    at, turn = 0.0, 0
    for number in members:
        piece = pieces[number]
        cell = piece.nbytes / piece.cells
        runs: list[Run] = []
        start = 0
        while start < piece.cells:
            while turn < len(holders) - 1 and at + (start + 0.5) * cell >= ends[turn]:
                turn += 1
            stop = piece.cells
            if turn < len(holders) - 1 and cell:
                # cells whose middle lies before the end of this holder's quota
                stop = min(stop, max(start + 1, round((ends[turn] - at) / cell)))
            runs.append(Run(holders[turn], start, stop))
            level[holders[turn]] = level.get(holders[turn], 0) + int((stop - start) * cell)
            start = stop
        at += piece.nbytes
        found[number] = tuple(runs)


def _ends(holders: Sequence[int], loads: Sequence[int], total: int) -> list[float]:
    """Where on a line of `total` bytes the quota of each holder ends."""
    filled, level = 0.0, 0.0
    ascending = sorted(loads)
    for count, load in enumerate(ascending, 1):
        filled += load
        level = (total + filled) / count
        if count == len(ascending) or level <= ascending[count]:
            break
    ends = []
    end = 0.0
    for load in loads:
        end += max(0.0, level - load)
        ends.append(end)
    return ends
