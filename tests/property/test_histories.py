"""What a manager keeps on disk, with a restart in the middle, against the model of `decide`."""

import tempfile

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr import CheckpointManager, Options
from ckptmgr.core.retention import decide
from ckptmgr.events import Clock
from tests.property.test_deciding import BUDGETS, POLICIES


class Turned(Clock):
    """A clock that goes as the test says, back too."""

    now = 0.0

    def time(self):
        return self.now


SAVES = st.lists(
    st.tuples(
        st.integers(0, 60),  # the step
        st.floats(0, 1000),  # when
        st.one_of(st.none(), st.just(float("nan")), st.integers(-3, 3)),  # its loss
        st.booleans(),  # whether it is pinned at once
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda save: save[0],
)


@settings(max_examples=40, deadline=None)
@given(SAVES, POLICIES, BUDGETS, st.data())
def test_a_manager_keeps_what_the_model_keeps_though_it_is_restarted_in_the_middle(
    saves, policy, budget, data
):
    policy = policy if budget is None else policy & budget
    restart = data.draw(st.integers(0, len(saves)))
    clock = Turned()
    with tempfile.TemporaryDirectory() as root:
        options = Options(retention=policy, heartbeat=None)
        manager = CheckpointManager(root, options, clock=clock)
        there = {}
        for number, (step, when, loss, pinned) in enumerate(saves):
            if number == restart:
                manager.close()
                manager = CheckpointManager(root, options, clock=clock)
            clock.now = when
            metrics = None if loss is None else {"loss": loss}
            manager.save(step, {"w": np.full(3, step)}, metrics=metrics)
            manager.wait()
            there[step] = manager.info(step)
            for dropped in decide(list(there.values()), policy, when, step).drop:
                del there[dropped]
            assert [info.step for info in manager.steps()] == sorted(there)
            if pinned:
                manager.pin(step, "a test")
                there[step] = manager.info(step)
        best = None if loss is None else manager.best_step("loss")
        manager.close()
        with CheckpointManager(root, Options(read_only=True)) as again:
            found = {info.step: info for info in again.steps()}
            assert found.keys() == there.keys()
            assert {s for s, info in found.items() if info.pinned} == {
                s for s, info in there.items() if info.pinned
            }
            if best is not None:
                assert again.best_step("loss") == best
