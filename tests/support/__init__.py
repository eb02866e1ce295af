"""Helpers shared by the tests."""

from tests.support.child import ChildFailed, finish, run_python, start_python

__all__ = ["ChildFailed", "finish", "run_python", "start_python"]
