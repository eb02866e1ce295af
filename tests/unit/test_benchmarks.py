"""Each benchmark runs at its smoke size, and its tables have all their rows and columns."""

import json
import os
import pathlib

import pytest

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


def test_scale(tmp_path):
    args = ["--directory", tmp_path, "--json", tmp_path / "out.json"]
    plans, commits, steps, checks = tables(run("scale.py", *args))
    jobs = ["16 groups", "32 groups", "32 all", "48 all"]
    head = "chunks, of one, places, plan, least, most, receipt, parsed in, Share, messages, each in"
    full(plans, head.split(", "), *jobs)
    assert commits[""][-3:] == ["commit", "its CPU", "besides, at 1 ms"]
    full(commits, commits[""], *jobs)
    full(steps, steps[""], *jobs)
    assert [plans[job][0] for job in jobs] == ["1,028", "1,028", "2,052", "3,076"]
    merged = commits[""].index("merge")
    assert [commits[job][merged].startswith("~") for job in jobs] == [False, False, False, True]
    assert list(checks)[1:] == ["ckptmgr"]
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [row["processes"] for row in result["rows"]] == [16, 32, 32, 48]
    assert os.listdir(tmp_path) == ["out.json"]


def test_goodput(tmp_path):
    out = tmp_path / "out.json"
    scenarios, harder = tables(run("goodput.py", "--json", out))
    titles = [
        f"{size}, {mode}, {distribution}"
        for size in ("64", "16,384")
        for mode in ("sync", "copy_on_write", "double_buffer")
        for distribution in ("exponential", "weibull", "trace")
    ]
    columns = ["best", "hourly", "Young", "Daly", "Saxena", "advise", "adaptive"]
    full(scenarios, ["failures", *columns, "adaptive / best", "target"], *titles)
    assert {cells[-1].rsplit(" ", 1)[0] for cells in list(scenarios.values())[1:]} == {">= 0.98"}
    assert harder[""] == ["failures", "best", "adaptive", "adaptive / best", "target"]
    assert len(harder) == 1 + 2 * 2 * 3
    results = json.loads(out.read_text())["results"]
    assert len(results) == len(titles) + len(harder) - 1
    for row in results:
        assert all(0 < good <= 1 for good in row["goodput"].values())
        assert row["goodput"]["best"] == max(good for _, good in row["curve"])


def test_goodput_draws_from_a_trace_of_ones_own(tmp_path):
    trace = tmp_path / "trace.txt"
    args = ["--distributions", "trace", "--modes", "sync", "--trace", trace]
    trace.write_text("3600\n60\n7200\n")
    (found,) = tables(run("goodput.py", *args))
    assert [row for row in found if row] == ["64, sync, trace", "16,384, sync, trace"]
    trace.write_text("3600\n-1\n")
    with pytest.raises(AssertionError, match="two or more positive numbers, one a line"):
        run("goodput.py", *args)


def test_goodput_says_that_plots_want_matplotlib():
    done = run_python(
        """
        import runpy, sys

        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name == "matplotlib":
                    raise ModuleNotFoundError(name)

        sys.meta_path.insert(0, Missing())
        sys.path[0], sys.argv = sys.argv[2], [sys.argv[1], "--smoke", "--plots", "."]
        runpy.run_path(sys.argv[0], run_name="__main__")
        """,
        BENCHMARKS / "goodput.py",
        BENCHMARKS,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "--plots: matplotlib is not installed; pip install 'ckptmgr[plots]'\n"


def test_goodput_draws_its_plots(tmp_path):
    pytest.importorskip("matplotlib")
    run("goodput.py", "--distributions", "exponential", "--plots", tmp_path)
    found = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(found) == ["goodput.png", "goodput_sizes.png"]
    assert all(data.startswith(b"\x89PNG") and len(data) < 150_000 for data in found.values())


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
