"""The helpers themselves: a broken watchdog would let every other test hang."""

import os
import sys
import textwrap
import time

import jax
import pytest

from tests.support import ChildFailed, finish, run_python, start_python
from tests.support.child import OWN_OUTPUT


def test_the_meshes_have_their_shapes(mesh8, mesh42):
    assert dict(mesh8.shape) == {"x": 8}
    assert dict(mesh42.shape) == {"data": 4, "model": 2}
    assert len(jax.devices()) == 8


def test_a_child_gets_arguments_and_environment(tmp_path):
    done = run_python(
        """
        import os, sys
        print(sys.executable, *sys.argv[1:], os.environ["ADDED"], "HOME" in os.environ, os.getcwd())
        """,
        1,
        tmp_path,
        env={"ADDED": "yes", "HOME": None},
        cwd=tmp_path,
    )
    assert done.stdout.split() == [
        sys.executable,
        "1",
        str(tmp_path),
        "yes",
        "False",
        str(tmp_path),
    ]


def test_a_child_sees_eight_devices_and_the_project():
    done = run_python("import jax, ckptmgr; print(len(jax.devices()), ckptmgr.__name__)")
    assert done.stdout.split() == ["8", "ckptmgr"]


def test_native_code_does_not_write_into_what_a_script_of_several_processes_prints():
    script = """
        import os
        print("one", end="")
        os.write(1, b"[gloo] connected")
        print(" line")
        """
    done = run_python(OWN_OUTPUT + textwrap.dedent(script))
    assert (done.stdout, done.stderr) == ("one line\n", "[gloo] connected")


def test_a_failing_child_raises_with_its_output():
    script = """
        import sys
        print("said this")
        raise ValueError("broke on line 4")
        """
    with pytest.raises(ChildFailed, match=r"status 1(?s:.*)said this(?s:.*)line 4(?s:.*)broke"):
        run_python(script)
    assert run_python(script, check=False).returncode == 1


def test_a_hung_child_shows_its_stack_and_ends():
    script = """
        import time
        def stuck_here():
            time.sleep(300)
        stuck_here()
        """
    start = time.monotonic()
    with pytest.raises(ChildFailed, match=r"did not end within 1 s(?s:.*)stuck_here"):
        run_python(script, timeout=1, check=False)
    assert time.monotonic() - start < 20


def test_nothing_of_a_child_survives_it():
    child = start_python(
        """
        import subprocess, sys
        sleeper = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(300)"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        print(sleeper.pid)
        """
    )
    pid = int(finish(child).stdout)
    for _ in range(100):  # the kill is sent at once; who collects the process may take a moment
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if _is_zombie(pid):
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} is still there")


def _is_zombie(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
