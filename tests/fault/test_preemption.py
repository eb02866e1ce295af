"""A real SIGTERM to a real training process: what is durable before the deadline wins."""

import os
import signal

import jax.numpy as jnp
import numpy as np
import pytest

import ckptmgr
from ckptmgr import Options
from tests.support import finish, run_python, start_python

TRAIN = """
import os, signal, sys
import jax, jax.numpy as jnp, numpy as np
import ckptmgr
from ckptmgr.engine.store import Store
from ckptmgr.testing import FaultyStore, Hold

root, every, when_busy, hold_step = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
add_one = jax.jit(lambda x: x + 1, donate_argnums=0)
holds = [Hold(lambda op: op.name == "rename" and op.path.startswith(f"{hold_step}."))]
store = FaultyStore(Store(root), holds)
options = ckptmgr.Options(
    schedule=ckptmgr.Schedule(every_steps=every, on_preemption=True),
    snapshot=ckptmgr.Snapshot(when_busy=when_busy),
)
called = []
if len(sys.argv) > 5:
    signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
state = jnp.zeros(1000)
with ckptmgr.CheckpointManager(root, options, store=store) as manager:
    step = 0
    while not manager.preempted:
        step += 1
        state = add_one(state)
        if manager.should_save(step):
            handle = manager.save(step, {"x": state, "n": np.full(10, step)})
            if handle.done:
                print("durable", step, handle.result().kind, flush=True)
            elif step == hold_step:
                holds[0].reached.wait()
                print("held", step, flush=True)
        if step == 20 or (step > 20 and step % 50 == 0):
            print("at", step, flush=True)
    again = [manager.should_save(n) for n in (step + 1, step + 2)]
    print("ended", step, called, again, flush=True)
"""


def read_until(child, text):
    for line in child.stdout:
        if line.startswith(text):
            return line.split()
    raise AssertionError(f"no line {text!r}: {child.stderr.read()}")


def start(root, every=1000, when_busy="wait", hold_step=-1, *more):
    return start_python(TRAIN, root, every, when_busy, hold_step, *more)


def check(root, step):
    with ckptmgr.CheckpointManager(root, Options(read_only=True)) as manager:
        found = manager.restore(step=step)
        assert np.array_equal(found["x"], np.full(1000, step, np.float32))
        assert np.array_equal(found["n"], np.full(10, step))
        return manager.info(step)


def test_sigterm_makes_the_next_step_a_synchronous_save_and_the_loop_can_end(tmp_path):
    child = start(tmp_path)
    read_until(child, "at")
    os.kill(child.pid, signal.SIGTERM)
    _, step, kind = read_until(child, "durable")
    assert kind == "preemption"
    ended = read_until(child, "ended")
    assert ended[1] == step and "[False, False]" in " ".join(ended)
    assert finish(child).returncode == 0
    assert check(tmp_path, int(step)).kind == "preemption"


def test_the_handler_that_was_there_before_is_called(tmp_path):
    child = start(tmp_path, 1000, "wait", -1, "handler")
    read_until(child, "at")
    os.kill(child.pid, signal.SIGTERM)
    assert f"[{signal.SIGTERM.value}]" in " ".join(read_until(child, "ended"))
    assert finish(child).returncode == 0


@pytest.mark.parametrize("when_busy", ["wait", "skip"])
def test_a_save_in_flight_is_waited_for_and_not_a_reason_to_skip(tmp_path, when_busy):
    done = run_python(
        """
        import os, signal, sys, threading
        import jax.numpy as jnp, numpy as np
        import ckptmgr
        from ckptmgr.engine.store import Store
        from ckptmgr.testing import FaultyStore, Hold

        hold = Hold("rename")
        options = ckptmgr.Options(
            schedule=ckptmgr.Schedule(every_steps=10, on_preemption=True),
            snapshot=ckptmgr.Snapshot(when_busy=sys.argv[2]),
        )
        store = FaultyStore(Store(sys.argv[1]), [hold])
        with ckptmgr.CheckpointManager(sys.argv[1], options, store=store) as manager:
            manager.save(10, {"x": jnp.full(1000, 10.0), "n": np.full(10, 10)})
            hold.reached.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            assert manager.should_save(11)
            threading.Timer(0.1, hold.release).start()
            handle = manager.save(11, {"x": jnp.full(1000, 11.0), "n": np.full(10, 11)})
            assert handle.accepted and handle.done and handle.waited > 0, handle
            assert [info.kind for info in manager.steps()] == ["async", "preemption"]
            print("fine")
        """,
        tmp_path,
        when_busy,
    )
    assert done.stdout == "fine\n"
    assert check(tmp_path, 11).kind == "preemption"


def test_a_save_that_cannot_make_the_deadline_leaves_the_last_good_step(tmp_path):
    done = start_python(
        """
        import os, signal, sys
        import jax.numpy as jnp, numpy as np
        import ckptmgr
        from ckptmgr.engine.store import Store
        from ckptmgr.testing import FaultyStore, Hold

        class Telling(Hold):
            def pass_through(self):
                print("stuck", flush=True)
                super().pass_through()

        stuck = Telling(lambda op: op.name == sys.argv[2] and "11.orbax" in op.path)
        options = ckptmgr.Options(schedule=ckptmgr.Schedule(every_steps=10, on_preemption=True))
        store = FaultyStore(Store(sys.argv[1]), [stuck])
        with ckptmgr.CheckpointManager(sys.argv[1], options, store=store) as manager:
            manager.save(10, {"x": jnp.full(1000, 10.0), "n": np.full(10, 10)}).result()
            os.kill(os.getpid(), signal.SIGTERM)
            assert manager.should_save(11)
            manager.save(11, {"x": jnp.full(1000, 11.0), "n": np.full(10, 11)})
        """,
        tmp_path,
        "sync_tree",
    )
    assert read_until(done, "stuck") == ["stuck"]
    os.kill(done.pid, signal.SIGKILL)  # the grace period is over
    assert finish(done, check=False).returncode == -signal.SIGKILL
    assert check(tmp_path, 10).status == "good"
    with ckptmgr.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 10
        manager.save(11, {"x": jnp.full(1000, 11.0), "n": np.full(10, 11)}, sync=True)
    assert check(tmp_path, 11).status == "good"


def test_a_second_signal_changes_nothing(tmp_path):
    child = start(tmp_path)
    read_until(child, "at")
    for _ in range(5):
        os.kill(child.pid, signal.SIGTERM)
    read_until(child, "ended")
    assert finish(child).returncode == 0
    with ckptmgr.CheckpointManager(tmp_path, Options(read_only=True)) as manager:
        assert [info.kind for info in manager.steps()] == ["preemption"]


def test_without_the_option_sigterm_does_what_it_always_does(tmp_path):
    done = run_python(
        """
        import os, signal, sys
        import ckptmgr
        with ckptmgr.CheckpointManager(sys.argv[1]) as manager:
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            assert not manager.preempted
            os.kill(os.getpid(), signal.SIGTERM)
            print("never")
        """,
        tmp_path,
        check=False,
    )
    assert done.returncode == -signal.SIGTERM and "never" not in done.stdout


def test_a_closed_manager_has_given_the_signal_back(tmp_path):
    done = run_python(
        """
        import signal, sys
        import ckptmgr
        options = ckptmgr.Options(schedule=ckptmgr.Schedule(on_preemption=True))
        mine = lambda number, frame: None
        signal.signal(signal.SIGTERM, mine)
        with ckptmgr.CheckpointManager(sys.argv[1], options) as first:
            assert signal.getsignal(signal.SIGTERM) is not mine
            with ckptmgr.CheckpointManager(sys.argv[1] + "/b", options) as second:
                pass
            assert signal.getsignal(signal.SIGTERM) is not mine
        assert signal.getsignal(signal.SIGTERM) is mine
        print("fine")
        """,
        tmp_path,
    )
    assert done.stdout == "fine\n"


def test_a_preemption_save_that_fails_is_tried_again_at_the_next_step(tmp_path):
    done = run_python(
        """
        import os, signal, sys
        import jax.numpy as jnp
        import ckptmgr
        from ckptmgr.engine.store import Store
        from ckptmgr.testing import Fault, FaultyStore
        options = ckptmgr.Options(schedule=ckptmgr.Schedule(every_steps=100, on_preemption=True))
        store = FaultyStore(Store(sys.argv[1]), [Fault("arrays")])
        with ckptmgr.CheckpointManager(sys.argv[1], options, store=store) as manager:
            os.kill(os.getpid(), signal.SIGTERM)
            for step in (1, 2, 3):
                if manager.should_save(step):
                    try:
                        manager.save(step, {"x": jnp.ones(3)})
                    except ckptmgr.SaveFailed as error:
                        print("failed", error.step)
            print([(info.step, info.kind) for info in manager.steps()])
        """,
        tmp_path,
    )
    assert done.stdout.splitlines() == ["failed 1", "[(2, 'preemption')]"]


def test_a_preemption_save_goes_before_a_heartbeat_which_comes_next(tmp_path):
    done = run_python(
        """
        import os, signal, sys
        import jax.numpy as jnp
        import ckptmgr
        options = ckptmgr.Options(
            schedule=ckptmgr.Schedule(on_preemption=True),
            heartbeat=ckptmgr.Heartbeat(every_saves=1),
        )
        with ckptmgr.CheckpointManager(sys.argv[1], options) as manager:
            for step in (1, 2, 3):
                if step == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                manager.save(step, {"x": jnp.ones(3)})
            print([info.kind for info in manager.steps()])
        """,
        tmp_path,
    )
    assert done.stdout == "['heartbeat', 'preemption', 'heartbeat']\n"


SERVICE = """
import os, signal, socket, sys
import jax, jax.numpy as jnp
with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
jax.config.update("jax_enable_preemption_service", sys.argv[2] == "on")
jax.distributed.initialize(f"localhost:{port}", num_processes=1, process_id=0)
import ckptmgr
options = ckptmgr.Options(schedule=ckptmgr.Schedule(every_steps=10**9, on_preemption=True))
with ckptmgr.CheckpointManager(sys.argv[1], options) as manager:
    step = 1
    while not manager.should_save(step):
        step += 1
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
    manager.save(step, {"x": jnp.ones(3)})
    print([info.kind for info in manager.steps()])
"""


@pytest.mark.parametrize("service", ["on", "off"])
def test_with_jaxs_coordination_service_a_notice_is_heeded_and_its_absence_is_no_error(
    tmp_path, service
):
    done = run_python(SERVICE, tmp_path, service)
    assert "['preemption']" in done.stdout
