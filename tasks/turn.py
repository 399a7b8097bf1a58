"""What a task answers: the event that moves the job on, and why."""

from __future__ import annotations

from typing import NamedTuple

from policies.states import Event


class Turn(NamedTuple):
    """One move of the job's state machine."""

    event: Event
    because: str
