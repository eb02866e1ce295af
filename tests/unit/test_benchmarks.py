"""Each benchmark runs at its smoke size, and its tables have all their rows and columns."""

import json
import os
import pathlib

from tests.support import run_python

# No test here looks at how long anything took: smoke sizes on a busy machine tell nothing.
BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
MODES = ["copy_on_write", "double_buffer", "sync"]


def run(name: str, *args: object) -> str:
    """The output of a benchmark that has to succeed."""
    done = run_python(
        """
        import subprocess, sys
        sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)
        """,
        BENCHMARKS / name,
        "--smoke",
        *args,
        timeout=100,
    )
    return done.stdout


def tables(text: str) -> list[dict[str, list[str]]]:
    """Each markdown table as {title of the row: its cells}, the head under ""."""
    found: list[dict[str, list[str]]] = []
    inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        title, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if not inside:
            found.append({"": [title, *cells][1:]})
        elif set(title) != {"-"}:
            found[-1][title] = cells
        inside = True
    return found


def full(table: dict[str, list[str]], head: list[str], *rows: str) -> None:
    """The table has these columns and rows, and a figure in each cell."""
    assert table[""] == head
    assert [row for row in table if row] == list(rows)
    assert [row for row in rows if not all(table[row])] == []


def test_lost_time(tmp_path):
    args = ["--workloads", "dense8", "--directory", tmp_path, "--json", tmp_path / "out.json"]
    one, one_ratios, always, always_ratios, checks = tables(run("lost_time.py", *args))
    full(
        one,
        [*MODES, "orbax"],
        "step without saving",
        "in save()",
        "first step after, longer by",
        "further steps, longer by",
        "lost per save",
        "to durable",
        "steps in the window",
        "CPU of the writer",
        "of all cores meanwhile",
        "arrays donated to the first step",
    )
    full(
        always,
        [*MODES, "orbax"],
        "step without saving",
        "rate of steps, of that without saving",
        "the same, CPU-adjusted",
        "from save to save",
        "lost per save",
        "CPU of the writer, per save",
        "of all cores",
    )
    pairs = [cell for mode in MODES for cell in (f"{mode} / orbax", "target")]
    assert one_ratios[""] == always_ratios[""] == pairs
    assert "<= 0.60" in one_ratios["lost per save"][1]
    assert "<= 0.30" in one_ratios["in save()"][1]
    assert one["arrays donated to the first step"][:3] == ["100.0 %"] * 3
    assert set(checks) == {"", "copy_on_write", "double_buffer"}
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert {case: len(records) > 0 for case, records in result["records"].items()} == {
        "single": True,
        "continuous": True,
    }
    assert list(tmp_path.iterdir()) == [tmp_path / "out.json"]


def test_memory(tmp_path):
    systems = ["copy_on_write", "double_buffer:quarter"]
    args = ["--systems", ",".join(systems), "--directory", tmp_path]
    resident, peaks, checks = tables(run("memory.py", *args))
    saves = ["save 1", "save 2", "save 3", "save 4"]
    full(resident, ["before", *saves, "last / early", "live arrays, before", "after"], *systems)
    assert peaks[""] == ["peak", "over before", "of the state", "held by snapshots", "limit"]
    assert [bool(peaks[name][4]) for name in systems] == [False, True]
    assert set(checks) == {"", *systems}


def test_heartbeat(tmp_path):
    args = ["--workloads", "dense8", "--directory", tmp_path]
    times, ratios, phases, checks = tables(run("heartbeat.py", *args))
    full(times, ["sync", "heartbeat", "audited"], "to durable", "CPU")
    assert ratios[""] == ["heartbeat / sync", "target", "audited / sync", "target"]
    assert [row for row in ratios if row] == ["to durable", "CPU"]
    assert {"write", "sync", "publish", "save", "call"} <= set(phases)
    assert list(checks)[1:] == ["audited"]


def test_verification(tmp_path):
    args = ["--workloads", "dense8", "--directory", tmp_path]
    times, ratios, checks = tables(run("verification.py", *args))
    assert times[""] == ["none", "digests", "leaf"]
    assert all(times["save, to durable"]) and all(times["restore"])
    assert ratios[""] == ["digests / none", "target", "leaf / none", "target"]
    assert set(checks) == {"", "digests"}


def test_run(tmp_path):
    args = ["--workloads", "small1", "--directory", tmp_path]
    times, ratios = tables(run("run.py", *args))
    rows = ["in save()", "to durable", "restore", "CPU, save", "CPU, restore"]
    full(times, ["ckptmgr", "orbax", "raw"], *rows, "bytes on disk", "files")
    assert ratios[""] == ["ckptmgr / orbax", "target", "ckptmgr / raw", "target"]
    assert [row for row in ratios if row] == rows


def test_device_check(tmp_path):
    out = tmp_path / "out.json"
    text = run("device_check.py", "--directory", tmp_path, "--json", out)
    systems = ["copy_on_write", "orbax", "double_buffer", "sync"]
    assert "8 x cpu" in text
    for table in tables(text):
        assert table[""] == systems
        for title in ("in save()", "first donated step after", "to durable"):
            assert all(table[title])
        assert table["to the host, by its event"][1] == ""
        assert [table["arrays donated (is_deleted)"][place] for place in (0, 2, 3)] == ["yes"] * 3
        leaves = table["leaves as they were in save()"]
        assert [leaves[place] for place in (0, 2, 3)] == ["16 of 16 looked at"] * 3
    assert len(tables(text)) == len(json.loads(out.read_text())["sizes"]) == 2
    assert os.listdir(tmp_path) == ["out.json"]


def test_device_check_says_what_it_lacks():
    done = run_python(
        """
        import runpy, sys

        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name in ("xxhash", "tensorstore"):
                    raise ModuleNotFoundError(name)

        sys.meta_path.insert(0, Missing())
        sys.path[0], sys.argv = sys.argv[2], [sys.argv[1]]
        runpy.run_path(sys.argv[0], run_name="__main__")
        """,
        BENCHMARKS / "device_check.py",
        BENCHMARKS,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == "device_check needs what is not installed here: tensorstore, xxhash\n"
