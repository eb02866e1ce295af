"""When to save."""

import pytest

from ckptmgr.core.cadence import due


@pytest.mark.parametrize(
    ("step", "every", "at", "expected"),
    [
        (0, 5, (), True),
        (4, 5, (), False),
        (5, 5, (), True),
        (7, 5, (7,), True),
        (7, None, (7,), True),
        (8, None, (7,), False),
        (0, None, (), False),
        (3, 1, (), True),
    ],
)
def test_a_step_is_due_as_a_multiple_or_by_name(step, every, at, expected):
    assert due(step, every, at) is expected
