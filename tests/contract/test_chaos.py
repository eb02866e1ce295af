"""The contracts that users run on their own file system, and that they are able to fail."""

import json
import os
import shutil
import sys
import threading

import pytest

from ckptmgr.cli import main
from ckptmgr.engine.store import Store
from ckptmgr.testing import fault_contract, store_contract


def failed(outcomes):
    return {outcome.check: outcome.detail for outcome in outcomes if not outcome.passed}


def test_this_file_system_keeps_the_store_contract_and_nothing_is_left(tmp_path):
    outcomes = store_contract.run(tmp_path)
    assert failed(outcomes) == {}
    assert [outcome.check for outcome in outcomes] == list(store_contract.CHECKS)
    assert os.listdir(tmp_path) == []


class Replacing(Store):
    """A file system whose rename replaces what is there."""

    def rename(self, old, new):
        shutil.rmtree(self.path(new), ignore_errors=True)
        return super().rename(old, new)


class Copying(Store):
    """One that exchanges in several steps."""

    def exchange(self, a, b):
        for old, new in ((a, "between"), (b, a), ("between", b)):
            super().rename(old, new)
            threading.Event().wait(0.002)  # long enough to be seen
        return True


class Slow(Store):
    """One that shows files before they are whole."""

    def put_file(self, name, data):
        with open(self.path(name), "wb", buffering=0) as file:
            for start in range(0, len(data), 1000):
                file.write(data[start : start + 1000])


class Forgetful(Store):
    """One that loses the last byte of what is written."""

    def write_file(self, name, data):
        super().write_file(name, data[:-1])


@pytest.mark.parametrize(
    ("broken", "word"),
    [(Replacing, "refused"), (Copying, "a reader always"), (Slow, "whole"), (Forgetful, "byte")],
)
def test_a_file_system_that_breaks_it_is_found(tmp_path, broken, word):
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that readers look between two steps of a writer
    try:
        found = failed(store_contract.run(tmp_path, broken))
    finally:
        sys.setswitchinterval(before)
    assert any(word in sentence for sentence in found), found


def test_saves_that_go_wrong_at_every_operation_leave_whole_steps_here(tmp_path, monkeypatch):
    once = {"fails": fault_contract.FAULTS["fails"]}
    monkeypatch.setattr(fault_contract, "FAULTS", once)
    outcomes = list(fault_contract.run(tmp_path, kills=2))
    assert failed(outcomes) == {}
    assert len(outcomes) == len(fault_contract.SCENARIOS) + 1
    assert os.listdir(tmp_path) == []


def test_values_that_are_not_those_of_the_call_are_found(tmp_path, monkeypatch):
    once = {"fails": fault_contract.FAULTS["fails"]}
    monkeypatch.setattr(fault_contract, "FAULTS", once)
    right = fault_contract._state
    saved = []

    def wrong(number):  # what is saved as the next step, not what it is compared with
        if number == fault_contract._NEXT and not saved:
            saved.append(number)
            return right(number) | {"w": right(number)["w"] + 1}
        return right(number)

    monkeypatch.setattr(fault_contract, "_state", wrong)
    found = failed(fault_contract.run(tmp_path, kills=0))
    assert found and "w is" in next(iter(found.values()))


def test_the_command_prints_a_verdict_for_each_sentence_and_leaves_nothing(tmp_path, capsys):
    assert main(["chaos", str(tmp_path), "--parts", "store"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("VERDICT") and told.out.count("\nholds") == len(
        store_contract.CHECKS
    )
    assert told.err == "" and os.listdir(tmp_path) == []
    assert main(["chaos", str(tmp_path), "--parts", "store", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {entry["part"] for entry in found} == {"store"}
    assert all(entry["passed"] for entry in found)


@pytest.mark.parametrize("wrong", [["--parts", "store,magic"], ["--kills", "-1"]])
def test_a_wrong_call_of_the_command_is_refused_with_one_line(tmp_path, capsys, wrong):
    assert main(["chaos", str(tmp_path / "new"), *wrong]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert not (tmp_path / "new").exists()
