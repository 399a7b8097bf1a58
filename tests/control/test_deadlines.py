"""What is not so by a deadline is not so only once all that had arrived by then was handled: a controller may be stopped meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.control.recovery import restart
from holdfast.control.supervisor import controller
from holdfast.control.supervisor.controller import see_begun
from holdfast.policies.states import Event
from tests.control.bare_controller import bare_controller

NODE = "node-0"


class Stopped:
    """A reactor whose process was stopped until after the deadline: what had arrived is there once it has its turn again."""

    def __init__(self, read: Callable[[], None]) -> None:
        self._turns, self._until, self._read = 0, time.monotonic() - 60.0, read

    @property
    def caught_up(self) -> float:
        """Return until when all was read; have its turn at the third look."""
        self._turns += 1
        if self._turns == 3:
            self._read()
        return self._until if self._turns < 3 else time.monotonic()


def test_a_step_that_had_arrived_while_the_controller_was_stopped_is_no_overrun(
    tmp_path: Path, holdfast_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recovery had come to its first step in time."""
    assert holdfast_home.is_dir()
    with bare_controller(tmp_path, {NODE: [0]}) as run:
        facts = {"rank": 0, "generation": 1, "at": time.time()}

        def read() -> None:
            for event in ({"event": "worker.started", "pid": 1}, {"event": "worker.stepped", "step": 1, "until": 9}):
                run.agents.event_queue.put((NODE, {**event, **facts}))

        monkeypatch.setattr(controller, "REACTOR", Stopped(read))
        turn = see_begun(run, seconds=0.0)
        assert turn is not None
        assert turn.event is Event.STARTED
        assert run.generations.state.all_stepped()


def test_ranks_that_had_ended_while_the_controller_was_stopped_are_not_stuck(
    tmp_path: Path, holdfast_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their node would be left for it."""
    assert holdfast_home.is_dir()
    with bare_controller(tmp_path, {NODE: [0]}) as run:
        ended = {"event": "workers.exited", "generation": 1}
        monkeypatch.setattr(restart, "STOP_SECONDS", 0.0)
        monkeypatch.setattr(controller, "REACTOR", Stopped(lambda: run.agents.event_queue.put((NODE, ended))))
        assert restart.wait_until_stopped(run, {NODE}) == set()


def test_what_does_not_come_is_still_an_overrun(tmp_path: Path, holdfast_home: Path) -> None:
    """A deadline ends."""
    assert holdfast_home.is_dir()
    with bare_controller(tmp_path, {NODE: [0]}) as run:
        assert see_begun(run, seconds=0.3) is None
