"""One process of a job fails: all learn of it at once, in the same words, and the next save works.

One job of two processes goes through every case; each test looks at what both reported of its own.
"""

import errno
import json
import re
from dataclasses import asdict, dataclass

import pytest

from tests.multiprocess.common import SCRIPT
from tests.support.processes import run_job

pytestmark = pytest.mark.timeout(240)

SOON = 3.0  # seconds from a failure until all have raised, on a busy machine; the deadline is 60


@dataclass(frozen=True)
class Case:
    """One way to fail.

    Attributes:
      phase: where all learn of it.
      rank: the process that fails.
      how: a test of an operation of its store that fails, or a call in the script that makes
        something else fail and returns what undoes that.
      words: what the error says besides, a pattern.
      beat: whether every save is a heartbeat.
      error: the errno of a store that fails.
      stays: whether the step is there all the same.
    """

    phase: str
    rank: int
    how: str
    words: str = "Input/output error"
    beat: bool = False
    error: int = errno.EIO
    stays: bool = False


OWN_ARRAYS = "op.name == 'arrays' and op.path.endswith(f'/ocdbt.process_{rank}')"
RECEIPT = "op.name == 'write_file' and 'receipt' in op.path"
RECEIPT_SYNCED = "op.name == 'sync_path' and 'receipt' in op.path"
MERGED = "op.name == 'arrays' and op.path.endswith('/default')"
METADATA = "op.name == 'write_file' and op.path.endswith('/_CHECKPOINT_METADATA')"
TREE = "op.name == 'write_file' and op.path.endswith('/tree.json')"
ALL_SYNCED = "op.name == 'sync_tree' and layout.parse_tmp(op.path)"
NO_MEMORY = "MemoryError: by a test"
TORN = "AuditFailed: .* for leaf 'w'"
FLIPPED = "CorruptCheckpoint: .* leaf w"

CASES = {
    "intent": Case("open", 0, "op.name == 'put_file'"),
    "directory": Case("open", 0, "op.name == 'make_dir' and layout.parse_tmp(op.path)"),
    "arrays-0": Case("write", 0, OWN_ARRAYS),
    "arrays-1": Case("write", 1, OWN_ARRAYS),
    "full-disk-1": Case("write", 1, OWN_ARRAYS, "No space left on device", error=errno.ENOSPC),
    "make_dir-1": Case("write", 1, "op.name == 'make_dir'"),
    "receipt-0": Case("write", 0, RECEIPT),
    "receipt-1": Case("write", 1, RECEIPT),
    "synced-0": Case("write", 0, RECEIPT_SYNCED),
    "synced-1": Case("write", 1, RECEIPT_SYNCED),
    "data-synced-1": Case("write", 1, "op.name == 'sync_tree'"),
    "values-0": Case("write", 0, "break_(arrays, 'values_of')", NO_MEMORY),
    "values-1": Case("write", 1, "break_(arrays, 'values_of')", NO_MEMORY),
    "shares": Case("write", 0, "break_(writing.Share, 'from_json')", NO_MEMORY),
    "audit-0": Case("write", 0, "tear()", TORN, beat=True),
    "audit-1": Case("write", 1, "tear()", TORN, beat=True),
    "merge": Case("complete", 0, MERGED),
    "tree": Case("write", 0, TREE),
    "metadata": Case("complete", 0, METADATA),
    "sync": Case("complete", 0, ALL_SYNCED),
    "beat-merge": Case("complete", 0, MERGED, beat=True),
    "beat-sync": Case("complete", 0, ALL_SYNCED, beat=True),
    "flip-0": Case("readback", 0, "flip()", FLIPPED, beat=True),
    "flip-1": Case("readback", 1, "flip()", FLIPPED, beat=True),
    "reader-0": Case("readback", 0, "break_(pipeline, 'read_back')", NO_MEMORY, beat=True),
    "reader-1": Case("readback", 1, "break_(pipeline, 'read_back')", NO_MEMORY, beat=True),
    "manifest": Case("publish", 0, "op.path.endswith('/' + layout.MANIFEST)"),
    "rename": Case("publish", 0, "op.name == 'rename'"),
    "beat-rename": Case("publish", 0, "op.name == 'rename'", beat=True),
    "root-synced": Case("publish", 0, "op.name == 'sync_path' and not op.path", stays=True),
}

REFUSED = {
    "unsupported-0": (0, "UnsupportedLeaf", "state(2, bad=object())"),
    "unsupported-1": (1, "UnsupportedLeaf", "state(2, bad=object())"),
    "donated-0": (0, "SnapshotLost", "donated()"),
    "donated-1": (1, "SnapshotLost", "donated()"),
}
"""The process whose call of save() is refused, how, and the state that it gives."""

BUSY = ["wait", "skip"]

JOB = (
    SCRIPT
    + """
from ckptmgr.testing.torn import TornStager

failed_at = []

def break_(owner, name):
    '''What of ours does not come through the store fails, too.'''
    right = getattr(owner, name)
    def wrong(*args, **how):
        failed_at.append(time.monotonic())
        raise MemoryError("by a test")
    setattr(owner, name, wrong)
    return lambda: setattr(owner, name, right)

def flip():
    '''A byte of this process's part of "w" changes on disk before it is read back.'''
    right = pipeline.read_back
    def wrong(path, *args, **how):
        part = wanted(2)["w"][256 * rank : 256 * (rank + 1)].tobytes()
        folder = f"{path}/default/ocdbt.process_{rank}/d"
        for name in os.listdir(folder):
            with open(f"{folder}/{name}", "r+b") as file:
                at = file.read().find(part)
                if at >= 0:
                    file.seek(at + 77), file.write(bytes([part[77] ^ 1]))
                    failed_at.append(time.monotonic())
        assert failed_at
        return right(path, *args, **how)
    pipeline.read_back = wrong
    return lambda: setattr(pipeline, "read_back", right)

def tear():
    stager.armed = True
    def mend():
        assert stager.torn
        stager.armed = False
    return mend

def hits(test):
    def where(op):
        found = eval(test, globals(), {"op": op})
        if found:
            failed_at.append(time.monotonic())
        return found
    return where

logging.basicConfig(level=logging.WARNING)

def one_case(name, case):
    global stager
    failed_at.clear()
    stager = TornStager(Snapshot(), "w")
    stager.armed = False
    where = f"{root}/{name}"
    beat = Heartbeat(every_saves=1) if case["beat"] else None
    found = manager(where, heartbeat=beat, stager=stager)
    seen = {"first": saving(found, 1)}
    meet()
    undo = lambda: None
    if rank == case["rank"]:
        if "op." in case["how"]:
            found._store.arm(Fault(hits(case["how"]), error=case["error"]))
        else:
            undo = eval(case["how"])
    began = time.monotonic()
    seen["error"] = saving(found, 2)
    seen["failed_at"] = min(failed_at, default=began)
    meet()
    undo()
    seen["leftovers"] = common.leftovers(where)
    seen["steps"] = numbers(found)
    seen["latest"] = holds(found.restore(), 2 if case["stays"] else 1)
    seen["again"] = saving(found, 2, overwrite=case["stays"])
    seen["restored"] = holds(found.restore(), 2)
    seen["close"] = told(found.close)
    report(**{name: seen})

for name, case in json.loads(arguments[0]).items():
    one_case(name, case)
    meet()

# -- refused calls

def donated():
    found = state(2)
    found["r"].delete()
    return found

for name, (odd, _, tree) in json.loads(arguments[1]).items():
    for busy in json.loads(arguments[2]):
        found = manager(
            f"{root}/{name}/{busy}", snapshot=Snapshot(when_busy=busy),
            heartbeat=Heartbeat(every_saves=3, audit=False),
        )
        saving(found, 1)
        mine = eval(tree) if rank == odd else state(2)
        meet()
        seen = {"began": time.monotonic(), "error": saving(found, 2, mine)}
        meet()
        seen["leftovers"] = common.leftovers(f"{root}/{name}/{busy}")
        seen["again"] = [saving(found, step) for step in (2, 3, 4)]
        seen["kinds"] = [info.kind for info in found.steps()]
        report(**{f"{name}/{busy}": seen})
        meet()

# -- more

stager = TornStager(Snapshot(), "w")
stager.armed = False
found = manager(f"{root}/suspects", heartbeat=Heartbeat(every_saves=2), stager=stager)
seen = {"first": [saving(found, 1), saving(found, 2), saving(found, 3)]}
stager.armed = rank == 1
seen["beat"] = saving(found, 4)
meet()
seen["status"] = [info.status for info in found.steps()]
seen["latest"] = holds(found.restore(), 2)
stager.armed = False
meet()
seen["again"] = saving(found, 4)
seen["kinds"] = [info.kind for info in found.steps()]
report(suspects=seen)
meet()

lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("ckptmgr").addHandler(handler)

found = manager(f"{root}/warn", on_save_error="warn")
if rank == 1:
    found._store.arm(Fault(hits("op.name == 'arrays'")))
handle = found.save(1, state(1))
seen = {"wait": told(found.wait), "lines": list(lines), "result": told(handle.result)}
seen["next"] = saving(found, 1)
report(warn=seen)
meet()

calls = []
def hook(info):
    calls.append(info.step)
    raise RuntimeError("no e-mail")
lines.clear()
found = manager(f"{root}/hook", on_committed=hook)
seen = {"saves": [saving(found, 1), saving(found, 2)], "wait": told(found.wait)}
report(hook={**seen, "calls": calls, "lines": list(lines), "steps": numbers(found)})
meet()

found = manager(f"{root}/both")
found._store.arm(Fault("arrays"))
seen = {"error": saving(found, 1), "again": saving(found, 1)}
report(both=seen)
leave_in_order()
"""
)


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    root = tmp_path_factory.mktemp("failures")
    cases = json.dumps({name: asdict(case) for name, case in CASES.items()})
    refused = json.dumps(REFUSED), json.dumps(BUSY)
    return run_job(JOB, root, cases, *refused, devices=1, timeout=200)


@pytest.fixture(params=CASES)
def case(request, facts):
    return CASES[request.param], [each[request.param] for each in facts]


def kinds(error):
    """The types of an error and of what is behind it."""
    return [kind for kind, _ in error["chain"]]


# -- a save that fails --------------------------------------------------------------------------


def test_a_failure_of_one_process_is_raised_by_all_with_the_same_words(case):
    case, (one, other) = case
    for seen in (one, other):
        right = ["SaveFailed", "InDoubt" if case.stays else "PeerFailed"]
        assert kinds(seen["error"])[:2] == right
        assert seen["error"]["phase"] == f"save.2/{case.phase}"
        assert seen["error"]["silent"] == []
        ((rank, text),) = seen["error"]["failures"]
        assert rank == case.rank
        assert re.search(case.words, text)
        assert f"process {case.rank}" in seen["error"]["chain"][0][1]
    assert one["error"]["words"] == other["error"]["words"]


def test_the_process_that_failed_has_its_own_error_behind_that(case):
    case, seen = case
    assert len(seen[1 - case.rank]["error"]["chain"]) == 2
    own, text = seen[case.rank]["error"]["chain"][2]
    assert own in seen[case.rank]["error"]["words"]
    assert re.search(case.words, f"{own}: {text}")


def test_all_learn_of_a_failure_at_once(case):
    case, seen = case
    assert max(each["error"]["at"] for each in seen) - seen[case.rank]["failed_at"] < SOON


def test_the_last_good_step_stays_and_nothing_of_the_failed_one_is_left(case):
    case, seen = case
    for each in seen:
        assert each["first"] == {}
        assert each["steps"] == ([1, 2] if case.stays else [1])
        assert each["latest"]
        assert each["leftovers"] == []


def test_a_failure_says_whether_there_may_be_a_step_all_the_same(case):
    case, seen = case
    outcome = "is in doubt" if case.stays else "failed and left no step behind"
    for each in seen:
        assert outcome in each["error"]["chain"][0][1]


def test_the_very_next_save_after_a_failure_works(case):
    _, seen = case
    for each in seen:
        assert each["again"] == {}
        assert each["restored"]
        assert each["close"] == {}


# -- a call that is refused ---------------------------------------------------------------------


@pytest.fixture(params=[f"{name}/{busy}" for name in REFUSED for busy in BUSY])
def refused(request, facts):
    odd, kind, _ = REFUSED[request.param.partition("/")[0]]
    seen = [each[request.param] for each in facts]
    return odd, kind, seen[odd], seen[1 - odd]


def test_a_call_that_one_process_refuses_fails_everywhere_before_anything_is_written(refused):
    odd, kind, own, other = refused
    assert kinds(own["error"]) == [kind]
    assert other["error"]["failures"][0][0] == odd
    assert other["error"]["failures"][0][1].startswith(f"{kind}: ")
    assert own["leftovers"] == other["leftovers"] == []


def test_the_others_learn_of_a_refused_call_at_once(refused):
    _, _, own, other = refused
    assert other["error"]["at"] - own["began"] < SOON


def test_all_count_a_refused_call_alike_towards_the_next_heartbeat(refused):
    _, _, own, other = refused
    assert own["again"] == other["again"] == [{}, {}, {}]
    assert own["kinds"] == other["kinds"] == ["async", "heartbeat", "async", "async"]


# -- more ---------------------------------------------------------------------------------------


def test_a_torn_copy_in_one_process_makes_the_staged_steps_suspect_for_all(facts):
    for each in facts:
        seen = each["suspects"]
        assert seen["first"] == [{}, {}, {}]
        assert "steps [3] are marked suspect" in seen["beat"]["failures"][0][1]
        assert seen["status"] == ["good", "good", "suspect"]
        assert seen["latest"], "of step 2"
        assert seen["again"] == {}
        assert seen["kinds"] == ["async", "heartbeat", "async", "heartbeat"]


def test_a_job_that_asked_for_warnings_only_is_warned_in_every_process(facts):
    for each in facts:
        seen = each["warn"]
        assert seen["wait"] == {}
        assert any("process 1: StoreError" in line for line in seen["lines"])
        assert kinds(seen["result"])[:2] == ["SaveFailed", "PeerFailed"]
        assert seen["next"] == {}


def test_a_hook_that_raises_in_process_0_fails_no_save(facts):
    for rank, each in enumerate(facts):
        seen = each["hook"]
        assert seen["saves"] == [{}, {}] and seen["wait"] == {}
        assert seen["steps"] == [1, 2]
        assert seen["calls"] == ([1, 2] if rank == 0 else []), "process 0 alone calls it"
    assert any("on_committed raised" in line for line in facts[0]["hook"]["lines"])


def test_where_both_fail_all_have_the_words_of_the_first(facts):
    one, other = (each["both"] for each in facts)
    assert one["error"]["words"] == other["error"]["words"]
    assert len(one["error"]["failures"]) == 1
    assert one["again"] == other["again"] == {}
