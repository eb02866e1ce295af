"""Run Python text in a child process that cannot hang unseen.

The child is a real script in a process group of its own. It dumps the stack of every thread
and ends when its time is up; whatever is still in its group after that is killed.
"""

import contextlib
import functools
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping

ROOT = pathlib.Path(__file__).resolve().parents[2]
# For scripts that start JAX's distributed runtime: gloo, in native code, tells of its connections
# on file descriptor 1, also in the middle of a line of the script. Python gets that output for
# itself, and what native code writes goes to standard error.
OWN_OUTPUT = """
import io, os, sys
sys.stdout = io.TextIOWrapper(os.fdopen(os.dup(1), "wb", 0), "utf-8", write_through=True)
os.dup2(2, 1)
"""
GRACE = 10.0  # seconds between the child's own dump and the kill from outside
_number = itertools.count(1)


class ChildFailed(AssertionError):
    """A child that ended with a status other than 0, or did not end at all."""

    def __init__(self, done: "subprocess.CompletedProcess[str]", what: str) -> None:
        super().__init__(
            f"child {what}\n--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}\n--- end"
        )
        self.done = done


@functools.cache
def _script_dir() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="ckptmgr-test-")


def _write_script(text: str, timeout: float) -> pathlib.Path:
    # The watchdog stands on the first line, where a text that begins with a line break is
    # empty, so that the line numbers in a traceback are those of the text.
    arm = f"import faulthandler; faulthandler.dump_traceback_later({timeout!r}, exit=True)"
    body = textwrap.dedent(text)
    path = pathlib.Path(_script_dir().name) / f"script_{next(_number)}.py"
    path.write_text(arm + (body if body.startswith("\n") else "\n" + body) + "\n")
    return path


def _environment(changes: Mapping[str, str | None] | None) -> dict[str, str]:
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    env["PYTHONUNBUFFERED"] = "1"  # what was printed before a kill is not lost
    for name, value in (changes or {}).items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def start_python(
    script_text: str,
    *args: object,
    env: Mapping[str, str | None] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float = 60,
) -> "subprocess.Popen[str]":
    """Start `script_text` under this interpreter and return at once; see `finish`.

    Every `args` is turned into a string for `sys.argv[1:]`. `env` is laid over the present
    environment; a value of None takes a variable away.
    """
    script = _write_script(script_text, timeout)
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", str(script), *map(str, args)],
        env=_environment(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def finish(
    child: "subprocess.Popen[str]", *, timeout: float = 60, check: bool = True
) -> "subprocess.CompletedProcess[str]":
    """Wait for a child; give its status and output. Leaves no process of its group behind.

    Raises `ChildFailed` where the child did not end in time or, with `check`, ended with a
    status other than 0.
    """
    late = False
    try:
        stdout, stderr = child.communicate(timeout=timeout + GRACE)
    except subprocess.TimeoutExpired:
        late = True
        _kill_group(child)
        stdout, stderr = child.communicate()
    finally:
        _kill_group(child)
    done = subprocess.CompletedProcess(child.args, child.returncode, stdout, stderr)
    if late:
        raise ChildFailed(done, f"did not end within {timeout:g} s and had to be killed")
    if done.returncode != 0 and _timed_out(done):
        raise ChildFailed(done, f"did not end within {timeout:g} s; its stacks are in stderr")
    if check and done.returncode != 0:
        raise ChildFailed(done, f"ended with status {done.returncode}")
    return done


def run_python(
    script_text: str,
    *args: object,
    env: Mapping[str, str | None] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float = 60,
    check: bool = True,
) -> "subprocess.CompletedProcess[str]":
    """Run `script_text` to its end: `start_python`, then `finish`."""
    child = start_python(script_text, *args, env=env, cwd=cwd, timeout=timeout)
    return finish(child, timeout=timeout, check=check)


def _timed_out(done: "subprocess.CompletedProcess[str]") -> bool:
    return any(line.startswith("Timeout (") for line in done.stderr.splitlines())


def _kill_group(child: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
