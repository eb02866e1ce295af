"""Processes of a job that do not call the same: all are told who is odd and why, and go on.

Two jobs of three processes go through all cases; each test looks at what they reported of its own.
"""

import json
import re
from dataclasses import asdict, dataclass

import pytest

from tests.multiprocess.common import SCRIPT, finish_all
from tests.support.processes import start_job

pytestmark = pytest.mark.timeout(240)

DEADLINE = 3.0
GRACE = 0.5  # that the others wait longer for process 0
HOW = {"world": 3, "devices": 1, "timeout": 150}
SOON = 2.0  # seconds until all have raised what is known before the deadline


@dataclass(frozen=True)
class Case:
    """A call that one process makes otherwise, when steps 1 and 2 are there.

    Attributes:
      call: what the odd process calls; "" for nothing.
      words: what all are told of it, a pattern; "" where only its silence is known.
      right: what the others call.
      odd: the process.
      own: the type of the error that it raises itself, if that is another.
    """

    call: str
    words: str
    right: str = "save(3)"
    odd: int = 1
    own: str = ""


def leaf(name, mine, theirs):
    mine, theirs = re.escape(mine), re.escape(theirs)
    return f"has leaf 'default: {name}' as {mine} .*, not {theirs} .*: another tree than process 0"


def other_values(name):
    return f"has other values in '{name}' .* than process 0"


NEW_SHARDING = "put(wanted(3)['r'], NamedSharding(mesh(world), P(None, None)))"
F32 = "float32[3, 8] sharding"

OTHERWISE = {
    # steps, and how they are saved
    "step": Case("save(4)", "saves step 4 .*, not as processes 0, 2: saves step 3 in the backgr"),
    "step-0": Case("save(4)", "saves step 4 .*, not as processes 1, 2: saves step 3 ", odd=0),
    "sync": Case("save(3, sync=True)", "step 3 synchronously, not as .* in the background"),
    "overwrite": Case("save(3, overwrite=True)", "overwriting, not as processes 0, 2"),
    "exists": Case("save(2)", "^StepExists: step 2 exists already", own="StepExists"),
    # trees
    "missing": Case("save(3, without='r')", "has no leaf 'default: r' and so another tree"),
    "more": Case("save(3, more=1)", "has a leaf 'default: more' and so another tree"),
    "dtype": Case("save(3, host=np.zeros(2, 'i4'))", leaf("host", "int32[2]", "int64[2]")),
    "shape": Case("save(3, host=np.zeros(3, 'i8'))", leaf("host", "int64[3]", "int64[2]")),
    "sharding": Case(f"save(3, r={NEW_SHARDING})", leaf("r", F32, F32)),
    "string": Case("save(3, text='other')", leaf("text", "string", "string")),
    "type": Case("save(3, n=3.0)", leaf("n", "float64[]", "int64[]")),
    "tree-0": Case("save(3, without='r')", "has no leaf 'default: r' .* than process 1", odd=0),
    "containers": Case("save(3, list)", "has another tree than process 0", "save(3, tuple)"),
    "items": Case("save(3, lambda tree: Items(state=tree))", "another tree than process 0"),
    # what each process has for itself
    "numpy": Case("save(3, host=np.array([3, 5]))", other_values("host")),
    "int": Case("save(3, n=4)", other_values("n")),
    "float": Case("save(3, f=0.5)", other_values("f"), "save(3, f=0.25)"),
    "nan": Case("save(3, f=float('nan'))", other_values("f"), "save(3, f=-float('nan'))"),
    "array": Case("save(3, f=jnp.ones(3))", other_values("f"), "save(3, f=jnp.zeros(3))"),
    # other calls
    "restore": Case(
        "found.restore(step=1)",
        "restores step 1, not as processes 0, 2: restores step 2",
        "found.restore(step=2)",
    ),
    "restore-newest": Case(
        "found.restore()", "restores the latest step, not as .* step 2", "found.restore(step=2)"
    ),
    "delete": Case(
        "found.delete(1)",
        "deletes step 1, not as processes 0, 2: deletes step 2",
        "found.delete(2)",
    ),
    "truncate": Case(
        "found.truncate_after(0)",
        "deletes the steps above 0, not as .* steps above 1",
        "found.truncate_after(1)",
    ),
}

NEVER = {
    "never": Case("", ""),
    "never-0": Case("", "", odd=0),
    "never-restores": Case("", "", "found.restore(step=2)"),
    "never-latest": Case("", "", "found.restore_latest(None)"),
    "never-deletes": Case("", "", "found.delete(2)"),
    "not-a-step": Case("save(3, number='3')", "", own="InvalidOption"),
}

CASES = OTHERWISE | NEVER

COMMON = (
    SCRIPT
    + """
deadline, coord.GRACE_SECONDS = json.loads(arguments[0]), json.loads(arguments[1])

def make(name, **how):
    return manager(f"{root}/{name}", deadline=deadline, **how)

def timed(call):
    began = time.monotonic()
    return {"error": told(call), "seconds": time.monotonic() - began}
"""
)

ONE_BY_ONE = (
    COMMON
    + """
def call_of(text):
    def save(step, wrap=lambda tree: tree, without="", sync=False, overwrite=False, number=None, **changes):
        tree = state(step, **changes)
        tree.pop(without, None)
        tree = wrap(tree.values()) if wrap in (list, tuple) else wrap(tree)
        found.save(step if number is None else number, tree, sync=sync, overwrite=overwrite).result()
    return lambda: eval(text or "None", {**globals(), "save": save})

for name, case in json.loads(arguments[2]).items():
    found = make(name)
    seen = {"first": [saving(found, 1), saving(found, 2)]}
    call = call_of(case["call"] if rank == case["odd"] else case["right"])
    meet()
    seen |= timed(call)
    meet()
    seen["steps"] = numbers(found)
    seen["again"] = saving(found, 7)
    seen["restore"] = told(lambda: seen.update(restored=holds(found.restore(step=7), 7)))
    seen["delete"] = told(lambda: found.delete(7))
    seen["close"] = told(found.close)
    report(**{name: seen})
    meet()

leave_in_order()
"""
)

OTHERS = (
    COMMON
    + """
# -- again and again

found = make("missed")
saving(found, 1)
turns = []
for turn, misses in enumerate([(1,), (0,), (1, 2), (0, 2)]):
    meet()
    if rank in misses:
        turns.append({})
    else:
        turns.append(saving(found, 10 + turn))
    meet()
    turns.append(saving(found, 20 + turn))
report(missed={"turns": turns, "steps": numbers(found)})
meet()

# -- should_save

found = make("due", schedule=Schedule(every_seconds=3600.0))
seen = {"first": found.should_save(1), "error": told(lambda: found.should_save(3 - (rank == 1)))}
meet()
seen["then"] = [told(lambda: found.should_save(step)) for step in (4, 5)]
if rank != 1:
    found.should_save(6)  # process 1 misses that
meet()
seen["behind"] = told(lambda: found.should_save(7))
meet()
seen["again"] = [told(lambda: found.should_save(step)) for step in (8, 9)]
seen["save"] = saving(found, 10, force=True)
meet()
seen["odd save"] = told(lambda: found.save(11 + (rank == 1), state(11), force=True).result())
meet()
seen["save again"] = saving(found, 13, force=True)
report(due=seen)
meet()

# -- directories and managers

seen = {"made": timed(lambda: globals().update(found=make(f"own/{rank}")))}
if rank == 0:
    seen["save"] = timed(lambda: found.save(1, state(1)).result())
report(own=seen)
meet()

writing.SHARED_SECONDS = 0.3
elsewhere = Store(f"{root}/elsewhere", durable=False) if rank == 1 else None
found = make("here", store=elsewhere)
seen = {"save": timed(lambda: found.save(1, state(1)).result()), "steps": numbers(found)}
report(elsewhere=seen)
meet()

seen = timed(lambda: make("only-1")) if rank == 1 else {}
report(only_1=seen)
meet()

seen = {}
if rank == 0:
    found = make("only-0")
    seen["save"] = timed(lambda: found.save(1, state(1)).result())
meet()
found = make("only-0")
seen["second"] = timed(lambda: found.save(1, state(1)).result())
report(only_0=seen)
meet()

for order in ("same", "other"):
    names = [f"{order}-a", f"{order}-b"]
    if order == "other" and rank == 1:
        names.reverse()
    made = {name: make(name) for name in names}
    handles = {name: made[name].save(1, state(ord(name[-1]))) for name in sorted(names)}
    seen = {name: told(handle.result) for name, handle in handles.items()}
    seen["restored"] = [holds(made[name].restore(), ord(name[-1])) for name in sorted(names)]
    report(**{f"{order} order": seen})
    meet()

found = make("closed")
saving(found, 1)
if rank == 1:
    found.close()
meet()
seen = timed(lambda: found.save(2, state(2)).result())
meet()
found.close()
found = make("closed")
seen["again"] = saving(found, 2)
report(closed=seen)
leave_in_order()
"""
)


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    cases = json.dumps({name: asdict(case) for name, case in CASES.items()})
    jobs = [
        start_job(text, tmp_path_factory.mktemp("bad_calls"), DEADLINE, GRACE, *args, **HOW)
        for text, args in ((ONE_BY_ONE, [cases]), (OTHERS, []))
    ]
    return [one | other for one, other in zip(*finish_all(jobs), strict=True)]


def pick(facts, name):
    return [each[name] for each in facts]


def kinds(error):
    """The types of an error and of what is behind it."""
    return [kind for kind, _ in error["chain"]]


# -- a call that is made otherwise --------------------------------------------------------------


@pytest.mark.parametrize("name", OTHERWISE)
def test_all_are_told_at_once_who_does_not_call_the_same_and_why(name, facts):
    case, seen = OTHERWISE[name], pick(facts, name)
    for rank, each in enumerate(seen):
        assert each["seconds"] < SOON
        if rank == case.odd and case.own:
            assert kinds(each["error"]) == [case.own]
            continue
        assert kinds(each["error"])[-1] == "PeerFailed"
        assert each["error"]["silent"] == []
        ((odd, text),) = each["error"]["failures"]
        assert odd == case.odd
        assert re.search(case.words, text)


@pytest.mark.parametrize("name", NEVER)
def test_all_others_name_the_process_that_does_not_call_when_the_deadline_has_come(name, facts):
    case, seen = NEVER[name], pick(facts, name)
    own = seen.pop(case.odd)
    assert kinds(own["error"]) == [case.own] if case.own else own["error"] == {}
    for each in seen:
        assert (each["error"]["silent"], each["error"]["failures"]) == ([case.odd], [])
        assert f"no answer from process {case.odd}" in each["error"]["words"]
        assert DEADLINE * 0.9 < each["seconds"] < DEADLINE + GRACE + SOON


@pytest.mark.parametrize("name", CASES)
def test_a_bad_call_changes_nothing_and_the_next_right_ones_work(name, facts):
    for each in pick(facts, name):
        assert each["first"] == [{}, {}]
        assert each["steps"] == [1, 2]
        assert (each["again"], each["restore"], each["delete"]) == ({}, {}, {})
        assert each["restored"]
        assert each["close"] == {}


def test_calls_that_any_process_misses_spoil_no_later_one(facts):
    for each in pick(facts, "missed"):
        assert all(error == {} or "no answer from" in error["words"] for error in each["turns"])
        assert each["turns"][1::2] == [{}] * 4
        assert each["steps"] == [1, 20, 21, 22, 23]


# -- should_save --------------------------------------------------------------------------------


def test_who_asks_about_another_step_than_process_0_is_told_so(facts):
    for rank, each in enumerate(pick(facts, "due")):
        assert each["first"] is False
        if rank == 1:
            text = "asks about step 2, process 0 about step 3"
            assert each["error"]["failures"] == [[1, text]]
        else:
            assert each["error"] == {}, "process 0 decides and waits for nobody"
        assert each["then"] == [{}, {}]


def test_who_missed_a_question_is_told_once(facts):
    for rank, each in enumerate(pick(facts, "due")):
        if rank == 1:
            assert "asks about step 7, process 0 about step 6" in each["behind"]["words"]
        assert each["again"] == [{}, {}]
        assert each["save"] == {}


def test_a_save_of_another_step_by_a_clock_fails_everywhere_and_the_next_works(facts):
    for each in pick(facts, "due"):
        assert each["odd save"]["failures"] or each["odd save"]["silent"] == [1]
        assert each["save again"] == {}


# -- directories and managers -------------------------------------------------------------------


def test_processes_with_directories_of_their_own_are_told_to_share_one(facts):
    first, *others = pick(facts, "own")
    assert first["made"]["error"] == {}, "process 0 waits for nobody when it starts"
    assert first["save"]["error"]["silent"] == [1, 2]
    for rank, text in first["save"]["error"]["failures"]:
        assert "own/0' but of '/" in text and f"own/{rank}'" in text
        assert "one directory that they share" in text
    for rank, each in enumerate(others, 1):
        assert each["made"]["error"]["silent"] == [0]
        ((odd, text),) = each["made"]["error"]["failures"]
        assert odd == 0
        assert f"own/{rank}' but of '/" in text and "own/0'" in text
        assert "one directory that they share" in text
        assert each["made"]["seconds"] < DEADLINE + GRACE + SOON


def test_a_directory_that_is_another_one_elsewhere_fails_the_first_save_by_its_path(facts):
    for each in pick(facts, "elsewhere"):
        ((rank, text),) = each["save"]["error"]["failures"]
        assert rank == 1
        assert re.search("process 1 does not see .*/elsewhere/1.orbax-checkpoint-tmp", text)
        assert "all processes of a job must be given one directory that they share" in text
        assert each["save"]["seconds"] < SOON
        assert each["steps"] == []


def test_a_manager_that_process_0_does_not_make_is_told_when_it_is_made(facts):
    error = facts[1]["only_1"]["error"]
    assert error["silent"] == [0]
    assert "has no manager of" in error["failures"][0][1]
    assert facts[1]["only_1"]["seconds"] < DEADLINE + GRACE + SOON


def test_a_manager_that_only_process_0_makes_is_told_by_its_first_save(facts):
    first, *others = pick(facts, "only_0")
    assert first["save"]["error"]["silent"] == [1, 2]
    assert [rank for rank, _ in first["save"]["error"]["failures"]] == [1, 2]
    for _, text in first["save"]["error"]["failures"]:
        assert "has no manager of" in text
    for each in (first, *others):  # process 0 has made two by now
        assert "error" in each["second"] and each["second"]["error"]
    for _, text in first["second"]["error"]["failures"]:
        assert "has made 1 managers of" in text and "process 0 2" in text


@pytest.mark.parametrize("order", ["same", "other"])
def test_managers_of_two_directories_may_be_made_in_any_order(order, facts):
    for each in pick(facts, f"{order} order"):
        assert each[f"{order}-a"] == each[f"{order}-b"] == {}
        assert each["restored"] == [True, True]


def test_a_save_after_one_process_has_closed_names_it_and_new_managers_work(facts):
    seen = pick(facts, "closed")
    assert kinds(seen[1]["error"]) == ["ManagerClosed"]
    for each in (seen[0], seen[2]):
        assert each["error"]["silent"] == [1]
        assert each["seconds"] < DEADLINE + GRACE + SOON
    assert [each["again"] for each in seen] == [{}, {}, {}]
