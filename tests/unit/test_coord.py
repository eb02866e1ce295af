"""Processes that talk: threads play them over one board."""

import contextlib
import logging
import threading

import pytest

from ckptmgr.engine import coord
from ckptmgr.engine.board import BoardLost, LocalBoard
from ckptmgr.engine.coord import Together
from ckptmgr.engine.meeting import Alone, telling, unwrapped
from ckptmgr.errors import PeerFailed, StepExists, StoreError
from tests.support.together import LONG, job, one_error, play


def joined(payloads):
    return b"|".join(payloads)


@pytest.fixture
def quick(monkeypatch):
    """Looks and patience of a few hundredths of a second."""
    monkeypatch.setattr(coord, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(coord, "GRACE_SECONDS", 0.2)


# -- exchange and lead --------------------------------------------------------------------------


def test_all_hear_what_process_0_makes_of_the_payloads_in_rank_order():
    found = play(job(5), lambda m: m.exchange("p", b"%d" % m.rank, LONG, joined))
    assert [found[rank].value for rank in range(5)] == [b"0|1|2|3|4"] * 5


def test_only_process_0_does_what_it_leads():
    done = []

    def body(member):
        return member.lead("p", lambda: done.append(member.rank) or b"made", LONG)

    assert [o.value for o in play(job(3), body).values()] == [b"made"] * 3
    assert done == [0]


def test_who_comes_later_hears_what_process_0_said_long_ago():
    first, second = job(2)
    assert first.lead("p", lambda: b"made", LONG) == b"made"
    assert second.lead("p", lambda: b"other", LONG) == b"made"


def test_one_process_answers_itself():
    alone = Alone()
    assert alone.exchange("p", b"x", LONG, joined) == alone.lead("p", lambda: b"x", LONG) == b"x"
    wrong = ValueError("w")
    assert alone.failed("p", wrong) is wrong
    assert alone.forget("p") is None


def test_phases_of_two_managers_never_meet():
    board = LocalBoard()
    here, there = job(2, board, "a"), job(2, board, "b")
    found = {}
    both = [
        threading.Thread(
            target=lambda ms=members, text=text: found.update(
                {text: play(ms, lambda m: m.exchange("p", text, LONG, joined))}
            )
        )
        for members, text in ((here, b"h"), (there, b"t"))
    ]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(60)
    assert [o.value for o in found[b"h"].values()] == [b"h|h"] * 2
    assert [o.value for o in found[b"t"].values()] == [b"t|t"] * 2


def test_what_is_forgotten_is_gone_and_names_that_begin_alike_stay():
    board = LocalBoard()
    members = job(2, board)
    for phase in ("save.1", "save.1/write", "save.10"):
        play(members, lambda m, phase=phase: m.exchange(phase, b"", LONG))
    members[0].forget("save.1")
    assert {key.split("/")[1] for key in board.all("job")} == {"save.10"}


# -- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, 2])
def test_a_failure_reaches_all_within_a_second_whatever_the_deadline(bad):
    def body(member):
        if member.rank == bad:
            raise member.failed("p", ValueError("no disk"))
        member.exchange("p", b"", LONG)

    found = play(job(4), body)
    assert one_error(found).failures == {bad: "ValueError: no disk"}
    assert max(outcome.seconds for outcome in found.values()) < 1


def test_where_the_answer_cannot_be_made_all_raise_it_and_process_0_knows_the_cause():
    def answer(payloads):
        raise StepExists(3, "/there")

    found = play(job(3), lambda m: m.exchange("p", b"", LONG, answer))
    assert list(one_error(found).failures) == [0]
    assert "StepExists: step 3 exists already" in str(found[1].error)
    assert type(found[0].error.__cause__) is StepExists


def test_a_finding_about_others_is_nobodys_cause():
    def answer(payloads):
        raise PeerFailed("p", {1: "odd"}, ())

    found = play(job(3), lambda m: m.exchange("p", b"", LONG, answer))
    assert one_error(found).failures == {1: "odd"}
    assert found[0].error.__cause__ is None


def test_process_0_is_interrupted_itself_and_the_others_are_told():
    def body(member):
        def work():
            raise KeyboardInterrupt

        member.lead("p", work, LONG)

    found = play(job(2), body)
    assert type(found[0].error) is KeyboardInterrupt
    assert list(found[1].error.failures) == [0]


def test_the_first_of_two_failures_is_what_all_hear():
    members = job(4)
    first = members[1].failed("p", ValueError("first"))
    second = members[2].failed("p", ValueError("second"))
    found = play(members, lambda m: m.exchange("p", b"", LONG))
    assert one_error(found).failures == {1: "ValueError: first"}
    assert first.failures == second.failures == {1: "ValueError: first"}


def test_a_long_text_is_cut():
    told = job(1)[0].failed("p", ValueError("x" * 10_000))
    assert len(told.failures[0]) == coord.TEXT


def test_the_silent_are_named_by_all_within_the_deadline(quick):
    found = play(job(6), lambda m: m.exchange("p", b"", 0.3), without=(1, 4))
    error = one_error(found)
    assert (error.silent, error.failures) == ((1, 4), {})
    assert "no answer from process 1, 4" in str(error)
    assert 0.2 < max(outcome.seconds for outcome in found.values()) < 2


def test_process_0_is_named_where_it_is_the_silent_one(quick):
    found = play(job(4), lambda m: m.exchange("p", b"", 0.1), without=(0,))
    assert one_error(found).silent == (0,)
    assert 0.3 * 0.9 < max(outcome.seconds for outcome in found.values()) < 2


@pytest.mark.parametrize("late", [0, 2])
def test_who_comes_after_the_others_gave_up_hears_so_at_once(quick, late):
    members = job(3)
    gave_up = play(members, lambda m: m.exchange("p", b"", 0.1), without=(late,))
    came = play([members[late]], lambda m: m.exchange("p", b"", LONG))
    assert one_error(gave_up | came).silent == (late,)
    assert came[late].seconds < 1


def test_without_the_service_process_0_is_the_silent_one():
    class Lost:
        def get(self, *_):
            raise BoardLost("gone")

        put = all = remove = get

    for member in job(2, Lost()):
        for call in (
            lambda m: m.exchange("p", b"", LONG),
            lambda m: m.lead("p", lambda: b"", LONG),
        ):
            with pytest.raises(PeerFailed) as found:
                call(member)
            assert (found.value.silent, found.value.failures) == ((0,), {})
            assert type(found.value.__cause__) is BoardLost
        assert member.failed("p", ValueError("w")).silent == (0,)
        member.forget("p")


def test_where_something_may_be_done_all_the_same_all_hear_that_it_is_in_doubt():
    def work():
        raise StoreError("in place, but may not survive", unknown=True)

    found = play(job(3), lambda m: m.lead("p", work, LONG))
    for outcome in found.values():
        assert type(outcome.error) is coord.InDoubt and outcome.error.unknown
        assert list(outcome.error.failures) == [0]


def test_a_service_that_does_not_answer_is_given_up_at_the_deadline(monkeypatch, quick):
    monkeypatch.setattr(coord, "ANSWER_SECONDS", 0.2)
    board, stopped = LocalBoard(), threading.Event()
    monkeypatch.setattr(board, "put", lambda key, value: stopped.wait(30))
    try:
        found = play([Together(board, 1, 2, "job")], lambda m: m.exchange("p", b"", 0.3))
    finally:
        stopped.set()
    assert found[1].error.silent == (0,)
    assert type(found[1].error.__cause__) is BoardLost
    assert 0.2 < found[1].seconds < 3


# -- calls and managers that not all have made --------------------------------------------------


def test_a_call_that_one_has_missed_does_not_spoil_the_next(quick):
    members = job(3)
    gave_up = play(members, lambda m: m.exchange("save.1/open", b"step 1", 0.1), without=(2,))
    assert one_error(gave_up).silent == (2,)

    def second(member):
        call = "save.1" if member.rank == 2 else "save.2"  # as each counts
        opened = member.exchange(f"{call}/open", b"step 2", LONG, joined)
        return opened + member.lead(f"{call}/publish", lambda: b", published", LONG)

    wanted = b"step 2|step 2|step 2, published"
    assert [o.value for o in play(members, second).values()] == [wanted] * 3


def test_who_comes_late_with_the_very_call_hears_that_the_others_gave_up(quick):
    members = job(3)
    play(members, lambda m: m.exchange("save.1/open", b"step 1", 0.1), without=(2,))
    late = play(members[2:], lambda m: m.exchange("save.1/open", b"step 1", LONG))
    assert late[2].error.silent == (2,) and late[2].seconds < 1


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ([], "has no manager of '/run': all processes"),
        (["/other"], "has no manager of '/run' but of '/other'"),
        (["/run"], "has made 1 managers of '/run' and process 0 2"),
    ],
    ids=["none", "elsewhere", "fewer"],
)
def test_the_silent_that_have_no_such_manager_are_told_by_what_they_have(quick, made, text):
    board = LocalBoard()
    for count, root in enumerate(made, 1):
        Together(board, 1, 2, "", root=root).announce(count)
    with pytest.raises(PeerFailed) as found:
        Together(board, 0, 2, "job", root="/run", number=2).exchange("save.1", b"", 0.05)
    assert found.value.silent == (1,)
    assert text in found.value.failures[1]


# -- telling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True])
def test_what_goes_wrong_in_a_block_is_told_to_all_its_phases(own):
    wrong = ValueError("torn")

    def body(member, phase):
        if member.rank == 1:
            with telling(member, "p", "q", own=own):
                raise wrong
        else:
            member.exchange(phase, b"", LONG)

    for phase in ("p", "q"):
        found = play(job(3), lambda m, phase=phase: body(m, phase))
        raised = found.pop(1).error
        assert one_error(found).failures == {1: "ValueError: torn"}
        assert one_error(found).phase == phase
        if own:
            assert raised is wrong
        else:
            assert (raised.failures, raised.__cause__) == ({1: "ValueError: torn"}, wrong)


def test_what_all_know_is_not_told_again():
    board = LocalBoard()
    known = PeerFailed("before", {1: "w"}, ())
    with pytest.raises(PeerFailed) as found, telling(job(2, board)[0], "p"):
        raise known
    assert found.value is known
    assert board.all("job") == {}


def test_an_interruption_is_told_and_raised_as_it_is():
    members = job(2)
    with pytest.raises(KeyboardInterrupt), telling(members[1], "p"):
        raise KeyboardInterrupt
    with pytest.raises(PeerFailed, match="process 1: KeyboardInterrupt"):
        members[0].exchange("p", b"", LONG)


def test_one_process_raises_what_went_wrong_in_a_block():
    with pytest.raises(ValueError, match="torn") as found, telling(Alone(), "p"):
        raise ValueError("torn")
    assert found.value.__cause__ is None


@pytest.mark.parametrize(
    ("cause", "raised"),
    [
        (StepExists(3, "/there"), StepExists),
        (OSError("w"), PeerFailed),
        (BoardLost("gone"), PeerFailed),
        (None, PeerFailed),
    ],
)
def test_process_0_raises_its_own_error_and_wraps_what_is_not_for_users(cause, raised):
    with pytest.raises(Exception) as found, unwrapped():
        raise PeerFailed("p", {0: "w"}, ()) from cause
    assert type(found.value) is raised


# -- the log ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patient", "silent", "said"),
    [(0, (2, 3), {"2, 3"}), (1, (2, 3), {"2, 3"}), (1, (0,), {"0"})],
    ids=["process 0", "another", "for process 0"],
)
def test_who_waits_says_for_whom(monkeypatch, caplog, quick, patient, silent, said):
    monkeypatch.setattr(coord, "TELL_SECONDS", 0.2)
    board = LocalBoard()
    members = job(5, board)
    for rank in {1, 2, 3, 4} - set(silent) - {patient}:
        board.put(f"job/p/0/{rank}", b"")
    with caplog.at_level(logging.WARNING, "ckptmgr"), contextlib.suppress(PeerFailed):
        members[patient].exchange("p", b"", 0.7)
    lines = [r.getMessage() for r in caplog.records]
    named = {line.removeprefix("p: waiting for process ").rpartition(" since")[0] for line in lines}
    assert named == said
    assert 1 <= len(lines) <= 4, "one each time, not one for each look"


def test_long_lists_are_cut_in_the_log(monkeypatch, caplog, quick):
    monkeypatch.setattr(coord, "TELL_SECONDS", 0.1)
    with pytest.raises(PeerFailed):
        job(30)[0].exchange("p", b"", 0.3)
    assert "18, 19, 20 and others since" in caplog.text


def test_others_in_a_large_job_do_not_fetch_all_payloads_to_say_for_whom_they_wait(
    monkeypatch, caplog, quick
):
    monkeypatch.setattr(coord, "TELL_SECONDS", 0.1)
    board = LocalBoard()
    monkeypatch.setattr(board, "all", None)
    with pytest.raises(PeerFailed):
        Together(board, 7, coord.BUCKET + 1, "job").exchange("p", b"", 0.1)
    assert "waiting for process 0 since" in caplog.text


# -- many ---------------------------------------------------------------------------------------

MANY = 600


def many(board, without=()):
    """All of a job of `MANY` but process 0 have said who they are."""
    for rank in set(range(1, MANY)) - set(without):
        board.put(f"job/p/{rank // coord.BUCKET}/{rank}", b"%d" % rank)
    return Together(board, 0, MANY, "job")


def test_more_processes_than_are_fetched_together(monkeypatch):
    board = LocalBoard()
    asked = []
    real = board.all
    monkeypatch.setattr(board, "all", lambda prefix: asked.append(prefix) or real(prefix))
    answer = many(board).exchange("p", b"0", LONG, joined)
    assert answer.split(b"|") == [b"%d" % rank for rank in range(MANY)]
    assert asked == ["job/p/0", "job/p/1", "job/p/2"]
    assert Together(board, MANY - 1, MANY, "job").exchange("p", b"", LONG) == answer


def test_the_silent_of_many_are_all_named(quick):
    with pytest.raises(PeerFailed) as found:
        many(LocalBoard(), (5, 300, 599)).exchange("p", b"", 0.1)
    assert found.value.silent == (5, 300, 599)


def test_a_late_one_of_many_is_waited_for(quick):
    board = LocalBoard()
    threading.Timer(0.3, board.put, ("job/p/1/300", b"300")).start()
    assert many(board, (300,)).exchange("p", b"", LONG, joined).split(b"|")[300] == b"300"


# -- which coordinator --------------------------------------------------------------------------


def test_the_nth_managers_of_a_directory_belong_together(monkeypatch):
    assert type(coord.of_this_job("/a")) is Alone  # of one process
    board = LocalBoard()
    monkeypatch.setattr(coord, "JaxBoard", lambda: board)
    monkeypatch.setattr(coord.jax, "process_count", lambda: 2)
    made = {}
    for rank in range(2):
        monkeypatch.setattr(coord.jax, "process_index", lambda rank=rank: rank)
        monkeypatch.setattr(coord, "_made", type(coord._made)())
        made[rank] = [coord.of_this_job(root) for root in ("/a", "/a", "/b")]
        assert type(coord.of_this_job("/a", alone=True)) is Alone
    for number, text in enumerate((b"x", b"y", b"z")):
        pair = [made[rank][number] for rank in range(2)]
        assert [member.rank for member in pair] == [0, 1]
        found = play(pair, lambda m, text=text: m.exchange("start", text, LONG, joined))
        assert [o.value for o in found.values()] == [text + b"|" + text] * 2
