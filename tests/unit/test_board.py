"""JAX's coordination service as a board: a real service of one process, in a child."""

import json

import pytest

from tests.support import run_python

SERVICE = """
import json, os, threading, time
import jax
from tests.support.processes import free_port

where = f"localhost:{free_port()}"
jax.distributed.initialize(where, 1, 0, coordinator_bind_address=where)
from ckptmgr.engine.board import BoardLost, JaxBoard
from ckptmgr.engine.coord import Together
from ckptmgr.errors import PeerFailed

def leave(found):
    print(json.dumps(found), flush=True)
    os._exit(0)
"""


def with_service(text):
    done = run_python(SERVICE + text + "\nleave(found)\n", env={"JAX_PLATFORMS": "cpu"})
    return json.loads(done.stdout)


def test_notes_on_the_service_of_jax():
    found = with_service(
        """
board, found = JaxBoard(), {}
found["put"] = [board.put("a/1/x", b"first"), board.put("a/1/x", b"second")]
found["there"] = [board.get("a/1/x", s).decode() for s in (0, 5)]
board.put("a/10/x", b""), board.put("a/1/y/z", b"below"), board.put("a/1", b"itself")
found["empty"] = board.get("a/10/x", 0) == b""
found["all"] = [sorted(board.all(prefix)) for prefix in ("a/1", "a", "b")]
start = time.monotonic()
found["absent"] = [board.get("b", 0.3), board.get("b", 0), board.get("b", -1)]
found["waited"] = time.monotonic() - start
threading.Timer(0.3, board.put, ("late", b"came")).start()
found["late"] = board.get("late", 30).decode()
large = os.urandom(2**20)
for i in range(8):
    board.put(f"large/{i}", large)
found["large"] = list(board.all("large").values()) == [large] * 8
board.remove("b"), board.remove("a/1")
found["left"] = sorted(board.all("a")) + [board.get("a/1", 0)]
"""
    )
    assert 0.25 < found.pop("waited") < 5
    assert found == {
        "put": [True, False],
        "there": ["first", "first"],
        "empty": True,
        "all": [["a/1/x", "a/1/y/z"], ["a/1", "a/1/x", "a/1/y/z", "a/10/x"], []],
        "absent": [None, None, None],
        "late": "came",
        "large": True,
        "left": ["a/10/x", None],
    }


def test_processes_meet_on_the_service_of_jax_until_it_goes():
    found = with_service(
        """
board, heard = JaxBoard(), {}

def run(rank):
    me = Together(board, rank, 3, "job")
    heard[rank] = [me.exchange("p", b"%d" % rank, 30, b"|".join).decode()]
    if rank == 2:
        me.failed("q", ValueError("no disk"))
        return
    try:
        me.exchange("q", b"", 30)
    except PeerFailed as exc:
        heard[rank].append(str(exc))

threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
Together(board, 0, 3, "job").forget("p")
left = {key.split("/")[1] for key in board.all("job")}
jax.distributed.shutdown()
lost = []
for call in (board.put, board.get, board.all, board.remove):
    try:
        call("x", *{board.put: [b""], board.get: [0.1]}.get(call, []))
    except BoardLost as exc:
        lost.append(str(exc)[:44])
found = [heard[0], heard[1], heard[2], sorted(left), lost]
"""
    )
    failed = ["0|1|2", "phase 'q': process 2: ValueError: no disk"]
    gone = ["JAX's coordination service does not answer ("]
    assert found == [failed, failed, ["0|1|2"], ["q"], gone * 4]


MOVED = {
    "the module": (
        "sys.modules['jax._src.distributed'] = None; del jax._src.distributed",
        "jax._src.distributed",
    ),
    "the state": ("del distributed.global_state", "global_state"),
    "the class": ("del _jax.DistributedRuntimeClient", "DistributedRuntimeClient"),
    "two methods": (
        "_jax.DistributedRuntimeClient = type('C', (), dict.fromkeys(['key_value_delete', "
        "'blocking_key_value_get_bytes', 'key_value_try_get_bytes']))",
        "its client lacks key_value_dir_get_bytes, key_value_set_bytes",
    ),
}


@pytest.mark.parametrize("change", MOVED)
def test_a_release_of_jax_that_moves_its_client_is_told(change):
    line, missing = MOVED[change]
    done = run_python(
        f"""
        import sys
        import jax.experimental.multihost_utils
        from jax._src import distributed
        from jax._src.lib import _jax
        {line}
        import ckptmgr
        from ckptmgr.engine.board import JaxBoard
        try:
            JaxBoard()
        except ckptmgr.InvalidOption as exc:
            print(jax.__version__ in str(exc), exc)
        """,
        env={"JAX_PLATFORMS": "cpu"},
    )
    assert done.stdout.startswith("True "), done.stdout
    assert missing in done.stdout and "use a release of ckptmgr" in done.stdout


def test_a_job_without_the_service_is_told_what_to_call():
    done = run_python(
        """
        import ckptmgr
        from ckptmgr.engine.board import JaxBoard
        try:
            JaxBoard()
        except ckptmgr.InvalidOption as exc:
            print(exc)
        """
    )
    assert "call jax.distributed.initialize() before" in done.stdout
