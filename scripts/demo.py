"""The main job, end to end: train, save while training, crash, resume, change the mesh.

1. A run without saving (but for its last step), to compare times with.
2. A run with saving that nothing disturbs: the reference.
3. The same run, killed with SIGKILL in the middle of a save.
4. It resumes on the same mesh: its losses must be the reference's, bit for bit.
5. It goes on, on another mesh with fewer devices: its losses must follow the reference's.
6. Its last checkpoint is opened on a third mesh and evaluated.
7. A job of two processes is killed in the middle of a save, one process of it first; one process
   goes on alone, and then four together.

The exit status is 0 only if every check holds.
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
MESH, NEW_MESH, EVALUATION_MESH, JOB_MESH = "4x2", "2x1", "1x4", "2x2"
RESUMED_STEPS, STEPS = 40, 60
KILL_AFTER = 15  # kill in the first save that is seen once this step is committed
NEVER = "--config.checkpoint.schedule.every_steps=1000000"
TOLERANCE = 1e-3  # between meshes sums are taken in another order, so the last bits may differ
TIMEOUT_SECONDS = 150


class Failed(Exception):
    pass


class Demo:
    """Runs in one directory, and what was checked about them."""

    def __init__(self, root: Path):
        self.root = root
        self.failures = 0
        self.environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            # The runs compile the same programs: only the first has to wait for it.
            "JAX_COMPILATION_CACHE_DIR": str(root / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }

    def check(self, holds: bool, sentence: str) -> None:
        self.failures += not holds
        print(f"   {'ok    ' if holds else 'FAILED'} {sentence}", flush=True)

    def train(self, name: str, *flags: str, checkpoints: str | None = None) -> dict:
        """Runs scripts/train.py to its end and returns its summary."""
        subprocess.run(
            self._command(name, checkpoints or name, *flags),
            env=self.environment,
            check=True,
            timeout=TIMEOUT_SECONDS,
        )
        return json.loads((self.root / f"{name}.json").read_text())

    def train_until_killed(self, name: str, *flags: str) -> int:
        """Kills scripts/train.py in the middle of a save; returns the step it was saving."""
        with subprocess.Popen(self._command(name, name, *flags), env=self.environment) as run:
            try:
                return kill_in_a_save(run, self.root / name)
            finally:
                run.kill()

    def start_job(self, name: str, checkpoints: str, processes: int, *flags: str) -> list:
        """Starts scripts/train.py in so many processes of one job."""
        port = free_port()
        return [
            subprocess.Popen(
                [
                    *self._command(name, checkpoints, *flags),
                    f"--coordinator=localhost:{port}",
                    f"--processes={processes}",
                    f"--process={number}",
                ],
                env=self.environment,
                stderr=subprocess.DEVNULL if number else None,
            )
            for number in range(processes)
        ]

    def train_together(self, name: str, checkpoints: str, processes: int, *flags: str) -> dict:
        """Runs a job to its end and returns the summary of its first process."""
        runs = self.start_job(name, checkpoints, processes, *flags)
        try:
            for run in runs:
                if run.wait(TIMEOUT_SECONDS):
                    raise Failed(f"a process of {name} ended with status {run.returncode}")
        finally:
            kill(runs)
        return json.loads((self.root / f"{name}.json").read_text())

    def evaluate(self, checkpoints: str, mesh: str) -> float:
        """Runs scripts/restore_new_mesh.py and returns the held-out loss that it prints."""
        run = subprocess.run(
            [
                *(sys.executable, SCRIPTS / "restore_new_mesh.py"),
                *(f"--checkpoints={self.root / checkpoints}", f"--mesh={mesh}"),
            ],
            env=self.environment,
            check=True,
            timeout=TIMEOUT_SECONDS,
            stdout=subprocess.PIPE,
            text=True,
        )
        print(run.stdout, end="")
        return float(re.search(r"held-out loss ([\d.]+)", run.stdout)[1])

    def losses(self, name: str) -> dict[int, float]:
        """The losses of a run by step, exact."""
        lines = (self.root / f"{name}.jsonl").read_text().splitlines()
        return {row["step"]: float.fromhex(row["loss"]) for row in map(json.loads, lines)}

    def _command(self, name: str, checkpoints: str, *flags: str) -> list:
        return [
            *(sys.executable, SCRIPTS / "train.py", "--verbosity=-1", *flags),
            f"--checkpoints={self.root / checkpoints}",
            f"--losses={self.root / name}.jsonl",
            f"--summary={self.root / name}.json",
        ]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def kill(runs: list[subprocess.Popen]) -> None:
    for run in runs:
        run.kill()
        run.wait()


def committed(checkpoints: Path) -> int:
    """The newest step, as a directory listing shows it; 0 if there is none."""
    names = [path.name for path in checkpoints.glob("*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def in_flight(checkpoints: Path) -> list[int]:
    """The steps being saved: their directories have a name of their own until they are whole."""
    marks = checkpoints.glob("*.orbax-checkpoint-tmp-*")
    return [int(path.name.partition(".")[0]) for path in marks]


def kill_in_a_save(run: subprocess.Popen, checkpoints: Path) -> int:
    """Stops the run when it seems to be saving, and kills it if it then still is."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if run.poll() is not None:
            raise Failed(f"the run ended by itself, with status {run.returncode}")
        if committed(checkpoints) >= KILL_AFTER and in_flight(checkpoints):
            run.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, run.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if steps := in_flight(checkpoints):
                run.kill()
                run.wait()
                return steps[0]
            run.send_signal(signal.SIGCONT)
        time.sleep(0.001)
    raise Failed(f"no save was seen in {TIMEOUT_SECONDS} seconds")


def heading(text: str) -> None:
    print(f"\n{text}", flush=True)


def crash_and_resume(demo: Demo, reference: dict[int, float]) -> None:
    heading(f"3. the same on mesh {MESH}, killed in the middle of a save")
    torn = demo.train_until_killed("killed", f"--mesh={MESH}", f"--steps={STEPS}")
    newest = committed(demo.root / "killed")
    print(f"   SIGKILL while step {torn} was being saved; step {newest} is the newest whole one")
    demo.check(newest < torn, f"step {torn} is not taken for a step")

    heading(f"4. resume it on the same mesh, up to step {RESUMED_STEPS}")
    flags = (f"--mesh={MESH}", f"--steps={RESUMED_STEPS}")
    start = demo.train("resumed", *flags, checkpoints="killed")["start"]
    demo.check(start == newest, f"it resumed from step {start}")
    demo.check(not in_flight(demo.root / "killed"), "nothing of the torn save is left")
    losses = demo.losses("killed") | demo.losses("resumed")
    same = len(losses) == RESUMED_STEPS and losses.items() <= reference.items()
    demo.check(same, f"losses 1 to {RESUMED_STEPS} are the reference's, bit for bit")


def change_the_mesh(demo: Demo, reference: dict[int, float]) -> None:
    heading(f"5. go on, on mesh {NEW_MESH}, up to step {STEPS}")
    flags = (f"--mesh={NEW_MESH}", f"--steps={STEPS}")
    summary = demo.train("new_mesh", *flags, checkpoints="killed")
    demo.check(summary["start"] == RESUMED_STEPS, f"it resumed from step {summary['start']}")
    losses = demo.losses("new_mesh")
    off = max(abs(loss - reference[step]) for step, loss in losses.items())
    demo.check(off < TOLERANCE, f"its losses follow the reference's, at most {off:.1e} away")

    heading(f"6. open its last checkpoint on mesh {EVALUATION_MESH} and evaluate it")
    off = abs(demo.evaluate("killed", EVALUATION_MESH) - summary["held_out_loss"])
    demo.check(off < TOLERANCE, f"the loss is that of mesh {NEW_MESH}, {off:.1e} away")


def several_processes(demo: Demo, reference: dict[int, float]) -> None:
    heading(f"7. two processes on mesh {JOB_MESH}, killed in the middle of a save")
    runs = demo.start_job("job", "job", 2, f"--mesh={JOB_MESH}", f"--steps={STEPS}")
    try:
        torn = kill_in_a_save(runs[0], demo.root / "job")
    finally:
        kill(runs)
    newest = committed(demo.root / "job")
    demo.check(newest < torn, f"step {torn} is not taken for a step; the newest is {newest}")
    flags = (f"--mesh={JOB_MESH}", f"--steps={RESUMED_STEPS}")
    start = demo.train("one_process", *flags, checkpoints="job")["start"]
    demo.check(start == newest, f"one process went on from step {start}")
    flags = (f"--mesh={JOB_MESH}", f"--steps={STEPS}")
    start = demo.train_together("four_processes", "job", 4, *flags)["start"]
    demo.check(start == RESUMED_STEPS, f"four processes went on from step {start}")
    losses = {}
    for name in ("job", "one_process", "four_processes"):
        losses |= demo.losses(name)
    off = max(abs(loss - reference[step]) for step, loss in losses.items())
    whole = len(losses) == STEPS and off < TOLERANCE
    demo.check(whole, f"losses 1 to {STEPS} follow the reference's, at most {off:.1e} away")


def print_table(without: dict, saving: dict) -> None:
    print(f"\n{'in milliseconds':<28}{'without saving':>16}{'saving':>12}")
    for label, key in [("a step, median", "step_median"), ("a step, mean", "step_mean")]:
        print(f"{label:<28}{without[key] * 1000:>16.1f}{saving[key] * 1000:>12.1f}")
    for label, key in [
        ("inside save(), median", "save_median"),
        ("save() to durable, median", "durable_median"),
    ]:
        print(f"{label:<28}{'':>16}{saving[key] * 1000:>12.1f}")
    print(f"(saves of the run: {saving['saves']}, of {STEPS} steps)")


def print_where_to_look(root: Path, kept: bool) -> None:
    command = Path(sys.executable).with_name("ckptmgr")
    print(f"""
where to look next
  the ten lines a loop needs      scripts/train.py, in train()
  what a run can be told          configs/tiny.py
  the steps that were written     {command} ls {root / "killed"}
  losses and times of each run    {root}/*.jsonl and *.json""")
    if not kept:
        print(f"  {root} is removed now; scripts/demo --keep keeps it")


def run_demo(root: Path, keep: bool) -> bool:
    """Whether every check held."""
    began = time.monotonic()
    demo = Demo(root)
    flags = (f"--mesh={MESH}", f"--steps={STEPS}")
    heading(f"1. train on mesh {MESH} without saving, but for the last step")
    without = demo.train("no_saving", *flags, NEVER)
    heading(f"2. train on mesh {MESH} and save: the reference")
    saving = demo.train("reference", *flags)
    reference = demo.losses("reference")
    demo.check(reference == demo.losses("no_saving"), "saving changes no loss, not by one bit")
    crash_and_resume(demo, reference)
    change_the_mesh(demo, reference)
    several_processes(demo, reference)
    print_table(without, saving)
    print_where_to_look(root, kept=keep or demo.failures > 0)
    outcome = f"{demo.failures} checks FAILED" if demo.failures else "all checks hold"
    print(f"\n{outcome}, after {time.monotonic() - began:.0f} s")
    return demo.failures == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        "scripts/demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, help="an empty or new directory to work in")
    parser.add_argument("--keep", action="store_true", help="keep what was written")
    options = parser.parse_args()
    if options.dir and options.dir.exists() and any(options.dir.iterdir()):
        parser.error(f"{options.dir} is not empty")
    root = options.dir or Path(tempfile.mkdtemp(prefix="ckptmgr-demo-"))
    root.mkdir(parents=True, exist_ok=True)
    root = root.resolve()
    try:
        passed = run_demo(root, options.keep)
    except (Failed, subprocess.SubprocessError) as problem:
        print(f"\nFAILED: {problem}\nwhat was written is in {root}", file=sys.stderr)
        return 1
    if passed and not options.keep:
        shutil.rmtree(root)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
