"""What a controller writes about its job: events for people, status changes of nodes, and news for the Prefect UI."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from holdfast.history import Recorder, models
from holdfast.log import note

log = logging.getLogger("holdfast.control")


class JobLog:
    """Writes rows about one job through its recorder. Every part of the controller has it; it holds none of them."""

    def __init__(self, job: models.Job, cluster: str, recorder: Recorder) -> None:
        self.job, self.cluster, self.recorder = job, cluster, recorder
        self.publisher: Callable[[str, dict[str, Any]], None] = lambda _event, _facts: None
        """Shows news of the job in the Prefect UI."""

    def publish(self, event: str, facts: dict[str, Any]) -> None:
        """Pass an event and its facts on to the publisher."""
        self.publisher(event, facts)

    def record_event(self, text: str) -> None:
        """Record an event that is no fault."""
        note(log, "job.event", job=self.job.name, text=text)
        self.recorder.add(models.JobEvent(job_id=self.job.id, at=time.time(), text=text))

    def record_node_status(self, node: str, status: str, reason: str) -> None:
        """Record that the status of *node* changed."""
        self.recorder.add(
            models.NodeStatusChange(cluster=self.cluster, node=node, at=time.time(), status=status, reason=reason, job_id=self.job.id)
        )
