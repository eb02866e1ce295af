"""What several processes want alike is read once, a part by each, and passed on by the devices."""

import pytest

from tests.multiprocess import test_saving

pytestmark = pytest.mark.timeout(120)

JOB = """
from ckptmgr import Problem, Restore
from ckptmgr.engine.reader import Reader

grid = mesh(2, 2)
w = np.arange(1024 * 1024, dtype=np.float32).reshape(1024, 1024)
specs = {"copies": P(), "rows": P(None, "y"), "all": P("x", "y")}
values = {name: w + i for i, name in enumerate(specs)}
state = {name: put(values[name], NamedSharding(grid, spec)) for name, spec in specs.items()}
state |= {"odd": put(w[:1023, :1021], NamedSharding(grid, P())), "small": put(w[:8], NamedSharding(grid, P()))}
values |= {"odd": w[:1023, :1021], "small": w[:8]}
like = {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for n, a in state.items()}
options = Options(
    coordination=Coordination(deadline_seconds=30), restore=Restore(broadcast_replicas=True)
)

asked = []
start = Reader.start

def noted(self, units, wanted, into):
    asked.extend(unit.box.size * np.dtype(self._tree.leaves[unit.leaf].stored_dtype).itemsize for unit in units)
    return start(self, units, wanted, into)

def whole(found):
    return {n: same(found[n], v) and found[n].sharding == like[n].sharding for n, v in values.items()}

with ckptmgr.CheckpointManager(root, options) as manager:
    manager.save(1, state, sync=True)
    manager.save(2, state, sync=True)
    Reader.start = noted
    found = manager.restore(like)
    report(whole=whole(found), read=sum(asked))
    plan = ckptmgr.plan_restore(root, like, options=options)
    plain = ckptmgr.plan_restore(root, like)
    report(planned=plan.read_bytes, without=plain.read_bytes, notes=list(plan.notes))

    def broken(self, units, wanted, into):
        if self._step == 2:
            raise CorruptCheckpoint(2, [Problem("default", "the disk is gone", "rows")])
        return start(self, units, wanted, into)

    Reader.start = broken if rank == 1 else start
    started = time.monotonic()
    report(failed=outcome(lambda: manager.restore(like, step=2)), seconds=time.monotonic() - started)
    latest = manager.restore_latest(like)
    report(latest=latest.step, skipped=[str(s.reason) for s in latest.skipped], again=whole(latest.state))
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    return test_saving.run(JOB, tmp_path_factory.mktemp("broadcast"), timeout=90)


def test_every_process_has_every_array_bit_for_bit_where_its_target_wants_it(facts):
    for one in facts:
        assert one["whole"] == dict.fromkeys(["copies", "rows", "all", "odd", "small"], True)


def test_a_process_reads_its_part_of_what_both_want_and_the_plan_says_so(facts):
    mib = 2**20
    odd = 1023 * 1021 * 4
    small = 8 * 1024 * 4
    for one in facts:
        # half of `copies`, and half of each half of `rows`, and what it needs of `all`
        assert one["read"] == one["planned"] == 2 * mib + 2 * mib + 2 * mib + odd + small
        assert one["without"] == 4 * mib + 4 * mib + 2 * mib + odd + small


def test_the_plan_says_what_is_broadcast_and_why_the_rest_is_not(facts):
    for one in facts:
        assert set(one["notes"]) == {
            "read in parts, broadcast: copies, rows",
            "not broadcast: no two devices hold the same of it: all",
            "not broadcast: no dimension of it is divided by mesh axis 'x' of size 2: odd",
            "not broadcast: it has no more than 1048576 bytes: small",
        }


def test_a_process_that_fails_before_the_broadcast_keeps_nobody_waiting_in_it(facts):
    zero, one = facts
    assert one["failed"][0].startswith("CorruptCheckpoint: step 2")
    assert zero["failed"][0].startswith("PeerFailed") and "process 1" in zero["failed"][0]
    assert all(fact["seconds"] < 15 for fact in facts)


def test_all_fall_back_together_when_one_finds_damage_before_the_broadcast(facts):
    for one in facts:
        assert one["latest"] == 1
        assert all(one["again"].values())
        assert len(one["skipped"]) == 1 and "the disk is gone" in one["skipped"][0]
