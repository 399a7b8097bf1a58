"""The state of one job: changed by the transitions that the table in `holdfast.policies.states` allows, each put on record."""

from __future__ import annotations

import logging
import time

from holdfast.control.state.generations import Generations
from holdfast.control.state.job_log import JobLog
from holdfast.history import models
from holdfast.log import note
from holdfast.policies.states import TERMINAL, Event, State, advance

log = logging.getLogger("holdfast.control")


class JobStateMachine:
    """The present state, and why the job is in it."""

    def __init__(self, log: JobLog, generations: Generations) -> None:
        self._log, self._generations = log, generations
        self.state = State.LAUNCHING
        self.reason = ""
        """Reason of the last transition."""

    @property
    def ended(self) -> bool:
        """Whether the job has ended."""
        return self.state in TERMINAL

    def submit(self) -> None:
        """Record the submission of the job, which is no transition."""
        self._record("", "submitted", "submitted")

    def move(self, event: Event, reason: str) -> None:
        """Make the transition that *event* asks for, record and publish it; raise `IllegalMove` where the table has none."""
        before, self.state = self.state, advance(self.state, event)
        self.reason = reason
        self._record(before, event, reason)
        note(log, "job.moved", job=self._log.job.name, before=before, event=event, after=self.state, reason=reason)
        self._log.publish("moved", {"before": before, "event": event, "after": self.state, "reason": reason})

    def _record(self, before: str, event: str, reason: str) -> None:
        self._log.recorder.add(
            models.JobTransition(
                job_id=self._log.job.id,
                at=time.time(),
                before=before,
                event=event,
                after=self.state,
                reason=reason,
                generation=self._generations.number,
            )
        )
