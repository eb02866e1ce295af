"""The command line, on real steps of ours and of Orbax."""

import inspect
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ckptmgr
from ckptmgr import Items
from ckptmgr.cli import advising, answer, main, verifying
from tests.support import run_python


class Iterator:
    """Keeps its own state, as a data iterator does."""

    def get_state(self):
        return {"position": 7}

    def set_state(self, state):
        raise AssertionError("nothing is restored here")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with steps of both kinds of writer; tests copy it before they change it."""
    import orbax.checkpoint as ocp

    root = tmp_path_factory.mktemp("made") / "run"
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))

    def placed(value, *spec):
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))

    state = {
        "params": {
            "w": placed(np.ones((64, 32), np.float32), "data", None),
            "e": placed(np.ones((16,), np.float32), ("data", "model")),
        },
        "single": jax.device_put(np.zeros((2, 3), np.int32), jax.devices()[0]),
        "host": np.arange(5, dtype=np.int16),
        "key": jax.random.key(0),
        "text": "hello",
        "big": 2**70,
        "line\nbreak": 1.5,
        "none": None,
    }
    with ckptmgr.CheckpointManager(root) as manager:
        manager.save(2, state, metrics={"loss": 0.123456789, "bad": float("nan")}, sync=True)
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(root, options=options) as orbax:
        tree = {"w": state["params"]["w"], "list": [np.zeros(2), 3], "text": "hi"}
        assert orbax.save(9, args=ocp.args.PyTreeSave(tree), metrics={"loss": 0.5})
        orbax.wait_until_finished()
    with ckptmgr.CheckpointManager(root) as manager:
        items = Items(state={"w": np.ones(3)}, data=Iterator())
        manager.save(10, items, extra={"note": (1, b"x")})
    return root


@pytest.fixture
def run(made, tmp_path):
    return pathlib.Path(shutil.copytree(made, tmp_path / "run", symlinks=True))


@pytest.fixture
def call(capsys):
    def call(*arguments):
        """(exit status, stdout, stderr) of a call in this process."""
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        out = capsys.readouterr()
        assert "Traceback" not in out.err
        assert out.err.count("\n") == (1 if out.err else 0), "more than one line on stderr"
        return status, out.out, out.err

    return call


# -- ls ---------------------------------------------------------------------------------------


def test_ls_lists_the_steps_of_both_writers_in_numeric_order(made, call):
    status, out, err = call("ls", made)
    head, *rows = [line.split() for line in out.splitlines()]
    assert (status, err) == (0, "")
    assert head == ["STEP", "KIND", "STATUS", "CREATED", "AGE", "SIZE", "METRICS"]
    assert [row[:3] for row in rows] == [
        ["2", "sync", "good"],
        ["9", "foreign", "good"],
        ["10", "async", "good"],
    ]
    assert rows[0][-2:] == ["loss=0.123457,", "bad=nan"]
    assert rows[1][-1] == "loss=0.5"


def test_ls_as_json_is_strict_and_says_it_all(made, call):
    status, out, _ = call("ls", made, "--json")

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    data = json.loads(out, parse_constant=refuse)
    assert status == 0
    assert data["directory"] == str(made)
    assert data["damaged"] == []
    two, nine, ten = data["steps"]
    assert (two["step"], two["kind"], two["metrics"]) == (
        2,
        "sync",
        {"loss": 0.123456789, "bad": "nan"},
    )
    with ckptmgr.CheckpointManager(made, ckptmgr.Options(read_only=True)) as manager:
        infos = manager.steps()
    assert [step["created"] for step in data["steps"]] == [info.created for info in infos]
    assert [step["nbytes"] for step in data["steps"]] == [info.nbytes for info in infos]
    assert (nine["kind"], nine["nbytes"], nine["metrics"]) == ("foreign", None, {"loss": 0.5})
    assert ten["extra"] == {"note": [1, "eA=="]}


def test_ls_lists_damaged_directories_below_with_the_reason(run, call):
    (run / "2" / "_CKPTMGR").unlink()
    (run / "11").mkdir()
    text = (run / "10" / "_CKPTMGR").read_bytes()
    (run / "10" / "_CKPTMGR").write_bytes(text.replace(b'"step":10', b'"step":12'))
    status, out, err = call("ls", run)
    above, _, below = out.partition("\ndamaged:\n")
    assert status == 1
    assert [line.split()[0] for line in above.splitlines()] == ["STEP", "9"]
    assert below.splitlines() == [
        "  2  _CKPTMGR: missing",
        "  10  _CKPTMGR: the manifest's digest does not fit its text",
        "  11  no manifest of ckptmgr and no metadata of Orbax",
    ]
    assert err == f"ckptmgr: 3 steps in {run} cannot be used\n"
    _, out, _ = call("ls", run, "--json")
    assert [(d["step"], d["file"]) for d in json.loads(out)["damaged"]] == [
        (2, "_CKPTMGR"),
        (10, "_CKPTMGR"),
        (11, ""),
    ]


def test_ls_says_which_version_a_newer_step_needs(run, call):
    for step in (2, 9):
        shutil.rmtree(run / str(step))
    (run / "10" / "_CKPTMGR").write_text('{"digest": "x", "body": {"format": 999}}')
    status, out, err = call("ls", run)
    assert status == 1
    assert "written by format 999" in out and "upgrade ckptmgr" in out
    assert err == f"ckptmgr: step 10 in {run} cannot be used\n"


def test_ls_leaves_out_what_has_no_name_of_a_step(run, call):
    (run / "notes").mkdir()
    (run / "007").mkdir()
    (run / "12").write_text("a file")
    (run / "13.orbax-checkpoint-tmp-ab").mkdir()
    status, out, _ = call("ls", run)
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["2", "9", "10"]


def test_ls_of_an_empty_directory_says_that_nothing_is_there(tmp_path, call):
    assert call("ls", tmp_path) == (3, "", f"ckptmgr: there is no step in {tmp_path}\n")
    status, out, _ = call("ls", tmp_path, "--json")
    assert status == 3
    assert json.loads(out) == {"directory": str(tmp_path), "steps": [], "damaged": []}


def test_ls_of_what_is_not_there_or_no_directory_fails(tmp_path, call):
    there = tmp_path / "file"
    there.write_text("x")
    gone = tmp_path / "gone"
    assert call("ls", gone) == (1, "", f"ckptmgr: {gone} does not exist\n")
    assert not gone.exists()
    assert call("ls", there) == (1, "", f"ckptmgr: {there} is a file, not a directory\n")


def test_ls_of_a_step_says_what_to_pass(made, call):
    status, out, err = call("ls", made / "2")
    assert (status, out) == (2, "")
    assert err == f"ckptmgr: {made / '2'} is a step; pass the directory above it: {made}\n"


# -- show -------------------------------------------------------------------------------------


def leaves_of(out: str) -> dict[str, list[str]]:
    """Rows of the tables of leaves, by the name of the leaf."""
    rows: dict[str, list[str]] = {}
    inside = False
    for line in out.splitlines():
        if line.startswith("LEAF"):
            inside = True
        elif not line:
            inside = False
        elif inside:
            name, *cells = [cell for cell in line.split("  ") if cell]
            rows[name] = [cell.strip() for cell in cells]
    return rows


def test_show_prints_a_table_of_leaves(made, call):
    status, out, err = call("show", made / "2")
    assert (status, err) == (0, "")
    assert leaves_of(out) == {
        "params.w": ["64x32", "float32", "array", "P(data, None) on data=4 model=2", "8.19 kB"],
        "params.e": ["16", "float32", "array", "P(data+model) on data=4 model=2", "64 B"],
        "single": ["2x3", "int32", "array", "cpu:0", "24 B"],
        "host": ["5", "int16", "numpy", "-", "10 B"],
        "key": ["()", "key<threefry2x32>", "key", "cpu:0", "8 B"],
        "text": ["()", "str", "string", "-", "0 B"],
        "big": ["()", "int", "scalar", "-", "0 B"],
        r"'line\nbreak'": ["()", "float64", "scalar", "-", "8 B"],
    }
    lines = out.splitlines()
    assert "step      2 (sync, good)" in lines
    assert "size      8.31 kB in 8 leaves" in lines
    assert "topology  processes 1, devices 8 (cpu), mesh data=4 model=2" in lines
    assert "item default: 8 leaves, 8.31 kB" in lines
    assert any(line.startswith("versions") and jax.__version__ in line for line in lines)


def test_show_as_json_has_exact_numbers(made, call):
    status, out, _ = call("show", made, "--step", "2", "--json")
    data = json.loads(out)
    assert status == 0
    assert data["path"] == str(made / "2")
    assert data["info"]["step"] == 2
    leaves = {leaf["name"]: leaf for leaf in data["items"]["default"]["leaves"]}
    weights = leaves["params.w"]
    assert (weights["path"], weights["shape"]) == (["params", "w"], [64, 32])
    assert (weights["dtype"], weights["kind"], weights["nbytes"]) == ("float32", "array", 8192)
    assert weights["sharding"]["axes"] == [["data", 4], ["model", 2]]
    assert weights["sharding"]["spec"] == [["data"], None]
    assert leaves["host"]["sharding"] is None
    assert leaves["big"]["value"] == str(2**70)
    assert data["nbytes"] == data["items"]["default"]["nbytes"] == data["info"]["nbytes"] == 8306


def test_show_of_a_run_shows_its_latest_step(made, call):
    status, out, _ = call("show", made)
    assert status == 0
    assert "step      10 (async, good)" in out
    assert 'extra     {"note": [1, "eA=="]}' in out
    assert "item state: 1 leaf, 24 B" in out
    assert "item data: 0 leaves, 0 B" in out
    assert leaves_of(out) == {"w": ["3", "float64", "numpy", "-", "24 B"]}


@pytest.mark.parametrize("how", [["9"], [".", "--step", "9"]])
def test_show_of_a_step_of_orbax_has_leaves_and_shardings(made, call, how):
    status, out, err = call("show", made / how[0], *how[1:])
    assert (status, err) == (0, "")
    assert "step      9 (foreign, good)" in out
    assert "metrics   loss=0.5" in out
    rows = leaves_of(out)
    assert rows["w"] == ["64x32", "float32", "array", "P(data, None) on data=4 model=2", "8.19 kB"]
    assert rows["list.0"] == ["2", "float64", "numpy", "-", "16 B"]
    assert rows["list.1"][0] == "()"
    assert rows["text"] == ["()", "str", "string", "-", "0 B"]
    assert len(rows) == 4


def test_show_of_a_damaged_step_names_it_and_the_file(run, call):
    (run / "2" / "default" / "ckptmgr" / "tree.json").write_text("{}")
    status, out, err = call("show", run / "2")
    assert (status, out) == (1, "")
    assert err.startswith("ckptmgr: step 2 is damaged: default/ckptmgr/tree.json: ")
    (run / "2" / "_CKPTMGR").unlink()
    assert call("show", run, "--step", 2) == (
        1,
        "",
        "ckptmgr: step 2 is damaged: _CKPTMGR: missing\n",
    )


@pytest.mark.parametrize(
    "file",
    ["_METADATA", "_sharding", "_strings.json", "array_metadatas/process_0", "manifest.ocdbt"],
)
def test_show_of_a_damaged_step_of_orbax_names_it_and_the_file(run, call, file):
    (run / "9" / "default" / file).write_text("{broken")
    status, out, err = call("show", run / "9")
    assert status == 1
    if file == "manifest.ocdbt":  # the tree is known, its arrays are not
        assert "(3): list.0, list.1, w" in err
        kinds = {name: row[2] for name, row in leaves_of(out).items()}
        assert kinds == {"w": "unreadable", "text": "string"} | dict.fromkeys(
            ["list.0", "list.1"], "unreadable"
        )
    else:
        assert out == ""
        assert err.startswith(f"ckptmgr: step 9 is damaged: default/{file}: ")


def test_show_of_what_is_not_there_fails_and_says_what_it_looks_like(made, tmp_path, call):
    gone = tmp_path / "gone"
    assert call("show", gone) == (1, "", f"ckptmgr: {gone} does not exist\n")
    status, _, err = call("show", made, "--step", 5)
    assert (status, err) == (1, f"ckptmgr: there is no step 5 in {made}\n")
    status, _, err = call("show", made / "2" / "default")
    assert (status, err.endswith(f"it is an item inside a step, pass {made / '2'}\n")) == (1, True)
    status, _, err = call("show", made.parent)
    assert (status, err.endswith(f"; {made} has some\n")) == (3, True)


def test_show_of_an_empty_run_says_that_nothing_is_there(tmp_path, call):
    expected = f"ckptmgr: there is no committed step in {tmp_path}\n"
    assert call("show", tmp_path) == (3, "", expected)


def test_show_of_a_run_with_damaged_steps_only_fails(run, call):
    for step in (9, 10):
        shutil.rmtree(run / str(step))
    (run / "2" / "_CKPTMGR").unlink()
    assert call("show", run)[0] == 1


def test_show_reads_no_array_data(run, call):
    for step in ("2", "10"):
        for file in (run / step).rglob("*"):
            if file.parent.name == "d" and "ocdbt.process_0" in file.parts:
                file.write_bytes(b"\0" * file.stat().st_size)
    status, out, _ = call("show", run / "2")
    assert status == 0
    assert leaves_of(out)["params.w"][-1] == "8.19 kB"


def test_looking_changes_nothing(run, call):
    def state():
        return {
            str(path): (path.lstat().st_mtime_ns, path.lstat().st_size)
            for path in [run, *run.rglob("*")]
        }

    before = state()
    for arguments in (
        ["ls", run],
        ["ls", run, "--json"],
        ["show", run],
        ["show", run / "9"],
        ["verify", run, "--all"],
        ["verify", run / "2", "--from-storage"],
    ):
        assert call(*arguments)[0] == 0
    assert state() == before


# -- verify -----------------------------------------------------------------------------------


def test_verify_of_a_run_verifies_its_newest_step(made, call):
    status, out, err = call("verify", made)
    assert (status, err) == (0, "")
    assert [line.split() for line in out.splitlines()] == [
        ["STEP", "KIND", "VERDICT", "READ", "PROBLEMS"],
        ["10", "async", "verified", "24", "B", "0"],
    ]


@pytest.mark.parametrize("how", [["2"], [".", "--step", "2"]])
def test_verify_of_one_step(made, call, how):
    status, out, err = call("verify", made / how[0], *how[1:])
    assert (status, err) == (0, "")
    assert out.splitlines()[1].split()[:3] == ["2", "sync", "verified"]


def test_verify_of_all_steps_says_of_orbaxs_that_it_has_no_digests(made, call):
    status, out, err = call("verify", made, "--all")
    table, _, below = out.partition("\n\n")
    assert (status, err) == (0, "")
    assert [line.split()[:3] for line in table.splitlines()[1:]] == [
        ["2", "sync", "verified"],
        ["9", "foreign", "readable"],
        ["10", "async", "verified"],
    ]
    assert below == ("step 9:\n  note: not verified: written by Orbax, which records no digests\n")


def test_verify_tells_every_problem_of_every_step(run, call):
    (run / "2" / "_CKPTMGR").unlink()
    (run / "10" / "metadata").write_text("stray")
    (run / "10" / "data" / "metadata").write_text("{}")
    (run / "10" / "state" / "_METADATA").unlink()
    (run / "11").mkdir()
    status, out, err = call("verify", run, "--all")
    assert status == 1
    assert err == "ckptmgr: 3 of 4 steps failed with 5 problems\n"
    assert "step 2:\n  _CKPTMGR: missing\n  note: " in out
    assert "  data/metadata: has 2 bytes instead of " in out
    assert "  state/_METADATA: missing\n" in out
    assert "  note: nothing names these (1): metadata\n" in out
    assert "step 11:\n  no manifest of ckptmgr and no metadata of Orbax\n" in out
    status, out, err = call("verify", run, "--step", 2)
    assert (status, err) == (1, "ckptmgr: step 2 failed with 1 problem\n")


def test_verify_as_json_has_every_field(run, call):
    (run / "10" / "state" / "_METADATA").unlink()
    status, out, _ = call("verify", run, "--all", "--json")
    two, nine, ten = json.loads(out)["verdicts"]
    assert status == 1
    assert (two["step"], two["good"], two["verified"], two["nbytes"]) == (2, True, True, 8306)
    assert (nine["kind"], nine["good"], nine["verified"]) == ("foreign", True, False)
    assert (ten["good"], ten["verified"]) == (False, False)
    assert ten["problems"] == [
        {"file": "state/_METADATA", "message": "missing", "leaf": "", "transient": False}
    ]


def test_verify_of_what_is_not_there_is_status_3(made, tmp_path, call):
    for arguments in (
        [made, "--step", 5],
        [tmp_path / "gone"],
        [tmp_path],
        [tmp_path, "--all"],
    ):
        status, out, err = call("verify", *arguments)
        assert (status, out) == (3, "") and err
    assert call("verify", made / "2", "--all")[0] == 2


def test_verify_shows_a_bar_on_a_terminal_only(made, call, capsys, monkeypatch):
    assert call("verify", made)[2] == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["verify", str(made), "--step", "2"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("STEP")
    assert err.startswith("\rstep 2 [....") and "of 8.31 kB" in err
    assert err.endswith("\r\x1b[K")  # nothing of it stays


def test_the_bar_shows_how_far_it_is_and_is_not_drawn_at_every_step(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(verifying.time, "monotonic", lambda: now[0])
    bar = verifying._Bar("")
    for done, at in ((0, 100.0), (10**6, 100.05), (2 * 10**6, 101.0)):
        now[0] = at
        bar(done, 4 * 10**6)
    drawn = capsys.readouterr().err.split("\r")[1:]
    assert [line.split("]")[1] for line in drawn] == [
        "   0% of 4 MB, 0 B/s\x1b[K",
        "  50% of 4 MB, 2 MB/s\x1b[K",
    ]
    now[0] = 200.0
    bar(0, 0)  # a step without arrays
    assert "100% of 0 B" in capsys.readouterr().err


# -- advise -----------------------------------------------------------------------------------

JOB = ("--params", "175e9", "--accelerators", "1024", "--write-gbps", "10")


def test_advise_prints_the_page_of_the_library(call):
    status, out, err = call("advise", *JOB, "--step-seconds", 15, "--keep-last", 3)
    wanted = ckptmgr.advise(
        params=175e9,
        accelerators=1024,
        write_bytes_per_second=10e9,
        step_seconds=15,
        keep_last=3,
    )
    assert (status, out, err) == (0, str(wanted), "")


def test_advise_as_json_is_in_seconds_and_bytes(call):
    status, out, _ = call("advise", *JOB, "--json")
    data = json.loads(out)
    assert status == 0
    assert (data["mode"], data["config"]) == ("double_buffer", "configs/large.py")
    assert data["interval_steps"] is None
    flush = next(figure for figure in data["figures"] if figure["name"] == "flush")
    assert flush == {
        "group": "The job",
        "name": "flush",
        "value": 245.0,
        "unit": "seconds",
        "why": "from save() to durable: 2.45 TB at 10 GB/s.",
        "shown": "245 s",
    }


def test_advise_takes_every_argument_of_the_library_but_a_tree():
    names = {advising._NAMES.get(name, name) for name in advising._ARGUMENTS}
    assert names == set(inspect.signature(ckptmgr.advise).parameters) - {"state"}


def test_advise_without_heartbeats(call):
    _, out, _ = call("advise", *JOB, "--no-heartbeat", "--json")
    figures = {figure["name"]: figure["value"] for figure in json.loads(out)["figures"]}
    assert figures["heartbeat"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            JOB[:2] + JOB[4:],
            "--accelerators must be a whole number from 1 to 1,000,000,000, got None",
        ),
        (JOB[:4], "the time of a save needs --write-gbps, or a measured --flush-seconds"),
        ((*JOB, "--mode", "fast"), "--mode must be one of None, 'sync', 'copy_on_write', "),
        ((*JOB, "--state-bytes", "1e9"), "the size needs one of --params, --state-bytes and state"),
    ],
)
def test_advise_refuses_with_one_sentence_that_names_arguments_as_they_are_here(
    call, arguments, message
):
    status, out, err = call("advise", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"ckptmgr: {message}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--params", "many"), "argument --params: a number is wanted, not 'many'"),
        (("--write-gbps", "x"), "argument --write-gbps: a number is wanted, not 'x'"),
        (("--hosts", "1.5"), "argument --hosts: a whole number is wanted, not '1.5'"),
        (("--accelerators", "x"), "argument --accelerators: a whole number is wanted, not 'x'"),
        (("--accelerators", "inf"), "argument --accelerators: a whole number is wanted, not 'inf'"),
    ],
)
def test_advise_names_the_argument_that_is_no_number(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        main(["advise", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


# -- the call itself --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [[], ["nope"], ["ls"], ["show"], ["ls", "a", "b"], ["show", "a", "--step", "x"]]
    + [["show", "a", "--step=-1"], ["ls", "a", "--what"]]
    + [["verify"], ["verify", "a", "--step", "x"], ["verify", "a", "--step", "1", "--all"]],
)
def test_a_wrong_call_is_status_2_and_shows_the_usage(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: ckptmgr")


def test_a_path_that_is_not_local_is_status_2(call):
    status, _, err = call("ls", "gs://bucket/run")
    assert (status, err) == (
        2,
        "ckptmgr: 'gs://bucket/run' is not a local path; object stores are not supported yet\n",
    )


def test_help_and_version_are_status_0(capsys):
    for option in ("--help", "--version"):
        with pytest.raises(SystemExit) as ended:
            main([option])
        assert ended.value.code == 0
        assert capsys.readouterr().out.split()[:1] in (["usage:"], ["ckptmgr"])


# -- as a process -----------------------------------------------------------------------------

COMMAND = [sys.executable, "-m", "ckptmgr"]


def environment(**changes):
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    env["PYTHONPATH"] = str(pathlib.Path(ckptmgr.__file__).parents[1])
    return env | changes


def process(*arguments, **changes):
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def test_the_module_is_a_command(made):
    done = process("ls", made)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["STEP", "2", "9", "10"]


def test_a_failure_of_the_command_is_one_line_and_a_status(tmp_path):
    done = process("show", tmp_path / "gone")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"ckptmgr: {tmp_path / 'gone'} does not exist\n"
    assert process("ls", tmp_path).returncode == 3
    assert process("ls").returncode == 2


def test_names_print_on_a_terminal_that_knows_only_ascii(tmp_path):
    with ckptmgr.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"größe": np.ones(2)})
    done = process("show", tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert r"gr\xf6\xdfe" in done.stdout


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_a_reader_that_goes_away_is_no_failure(made, command):
    reader, writer = os.pipe()
    os.close(reader)  # gone before the first byte, so that no buffer is large enough
    child = subprocess.run(
        [*COMMAND, command, str(made)],
        env=environment(),
        stdout=writer,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )
    os.close(writer)
    assert (child.returncode, child.stderr) == (0, b"")


def test_no_accelerator_is_taken_unless_asked_for(made):
    script = """
        import sys
        from ckptmgr.cli import main
        assert main(["ls", sys.argv[1]]) == 0
        import jax
        print(jax.config.jax_platforms)
        """
    assert run_python(script, made, env={"JAX_PLATFORMS": None}).stdout.splitlines()[-1] == "cpu"
    chosen = run_python(script, made, env={"JAX_PLATFORMS": "cpu,cpu"})
    assert chosen.stdout.splitlines()[-1] == "cpu,cpu"


# -- text -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1234, "1.23 kB"),
        (999_499, "999 kB"),
        (999_600, "1 MB"),
        (8_192_000_000, "8.19 GB"),
        (10**19, "1e+04 PB"),
    ],
)
def test_sizes_are_short(nbytes, text):
    assert answer.size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (59.4, "59 s"), (60, "1 min"), (7199, "1 h"), (86400 * 40, "40 d")],
)
def test_ages_are_short(seconds, text):
    assert answer.age(seconds) == text


def test_moments_are_in_utc_and_nonsense_is_a_dash():
    assert answer.moment(0) == "1970-01-01 00:00:00 UTC"
    assert answer.moment(1e300) == answer.moment(float("nan")) == "-"


def test_json_values_that_json_lacks_become_text_lists_and_base64():
    data = {1: (float("inf"), b"x", 1j), "a": np.arange(2), "b": np.float32(0.5)}
    assert json.loads(answer.as_json(data)) == {
        "1": ["inf", "eA==", "1j"],
        "a": [0, 1],
        "b": 0.5,
    }
