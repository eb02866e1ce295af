"""Who writes what several processes hold: cases that can be worked out by hand."""

import random

import pytest

from ckptmgr.core.share import Piece, Run, share


def loads_of(pieces, runs, loads):
    found = dict(loads)
    for piece, given in zip(pieces, runs, strict=True):
        for run in given:
            found[run.process] = (
                found.get(run.process, 0) + (run.stop - run.start) * piece.nbytes / piece.cells
            )
    return found


def test_a_piece_of_one_holder_is_its_own():
    assert share([Piece((3,), 100, 7)], {}) == [(Run(3, 0, 7),)]


def test_equal_pieces_go_round_their_holders():
    pieces = [Piece((0, 1), 10)] * 4
    assert share(pieces, {}) == [
        (Run(0, 0, 1),),
        (Run(0, 0, 1),),
        (Run(1, 0, 1),),
        (Run(1, 0, 1),),
    ]


def test_a_large_piece_is_cut_between_cells():
    assert share([Piece((1, 4, 5), 600, 6)], {}) == [(Run(1, 0, 2), Run(4, 2, 4), Run(5, 4, 6))]
    assert share([Piece((0, 1), 100, 3)], {}) == [(Run(0, 0, 2), Run(1, 2, 3))]


def test_what_cannot_be_cut_goes_to_one():
    assert share([Piece((0, 1), 100)], {}) == [(Run(1, 0, 1),)]
    assert share([Piece((0, 1, 2), 0)], {}) == [(Run(2, 0, 1),)], "not even bytes"


def test_who_writes_much_besides_gets_less():
    pieces = [Piece((0, 1, 2), 120, 12)]
    assert share(pieces, {0: 60}) == [(Run(1, 0, 6), Run(2, 6, 12))]
    assert share(pieces, {0: 30, 2: 30}) == [(Run(0, 0, 3), Run(1, 3, 9), Run(2, 9, 12))]
    assert share(pieces, {0: 1000}) == [(Run(1, 0, 6), Run(2, 6, 12))], "nothing, if it has so much"
    assert share(pieces, {7: 10**9}) == share(pieces, {}), "what others write is their affair"


def test_those_with_the_least_choice_go_first():
    pieces = [Piece((0, 1, 2, 3), 100, 10), Piece((0, 1), 100, 10)]
    found = share(pieces, {})
    assert loads_of(pieces, found, {}) == {0: 50, 1: 50, 2: 50, 3: 50}
    assert found[0] == (Run(2, 0, 5), Run(3, 5, 10))


def test_each_gets_one_run_of_the_line_of_pieces():
    pieces = [Piece((0, 1, 2), size, size) for size in (5, 40, 1, 13, 31)]
    order = [run.process for runs in share(pieces, {}) for run in runs]
    assert order == sorted(order) and set(order) == {0, 1, 2}


@pytest.mark.parametrize("replicas", [2, 3, 156])
def test_replicas_share_evenly(replicas):
    groups = [tuple(range(i, 8 * replicas, 8)) for i in range(8)]
    everybody = tuple(range(8 * replicas))
    pieces = [Piece(groups[i % 8], 16 * replicas * 2**10, 16 * replicas) for i in range(80)]
    pieces += [Piece(everybody, 4096)] * 30
    loads = loads_of(pieces, share(pieces, {}), dict.fromkeys(everybody, 0))
    even = sum(loads.values()) / len(loads)
    assert max(loads.values()) <= 1.1 * even
    assert min(loads.values()) >= 0.9 * even


def test_the_order_of_what_is_known_changes_nothing():
    pieces = [Piece(h, 1000, 10) for h in ((0, 1, 2, 3, 4), (1, 2), (0, 3, 4), (2, 3))] * 3
    loads = {rank: 100 * rank for rank in range(5)}
    expected = share(pieces, loads)
    for seed in range(5):
        shuffled = list(loads.items())
        random.Random(seed).shuffle(shuffled)
        same = [Piece(tuple(list(p.holders)), p.nbytes, p.cells) for p in pieces]
        assert share(same, dict(shuffled)) == expected


def test_nothing_to_share():
    assert share([], {0: 5}) == []
