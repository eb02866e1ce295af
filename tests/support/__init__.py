"""Helpers shared by the tests."""

from tests.support.child import ROOT, ChildFailed, finish, run_python, start_python

__all__ = ["ROOT", "ChildFailed", "finish", "run_python", "start_python"]
