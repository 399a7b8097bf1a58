"""When a job that reports no steps got on."""

from __future__ import annotations

import pytest

from holdfast.policies.uptime import LEAST, SILENT, counts_as_progress


@pytest.mark.parametrize(
    ("uptime", "startup", "answer"),
    [
        pytest.param(12.0, 1.5, True, id="a dozen good steps"),
        pytest.param(4.0, 0.1, False, id="a moment, however fast it starts"),
        pytest.param(5.0, 0.1, True, id="the least"),
        pytest.param(119.0, 40.0, False, id="a slow start, and little after it"),
        pytest.param(120.0, 40.0, True, id="a slow start, and twice as long after it"),
        pytest.param(59.0, None, False, id="nothing printed for a minute"),
        pytest.param(60.0, None, True, id="nothing printed, but it runs"),
    ],
)
def test_a_run_got_on_when_it_lasted_some_starts(uptime: float, startup: float | None, answer: bool) -> None:  # noqa: FBT001
    """By the time from the start of the ranks to the first output."""
    assert counts_as_progress(uptime, startup) is answer
    assert LEAST < SILENT
