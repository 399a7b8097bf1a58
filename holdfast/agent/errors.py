"""Why an agent refuses a command."""

from __future__ import annotations


class Refused(Exception):
    """A command that cannot be carried out, and why."""


class StaleEpoch(Refused):
    """A command of a controller after a newer one has taken over its job."""

    def __init__(self, epoch: int, yours: int) -> None:
        super().__init__(f"a newer controller runs this job (epoch {epoch}, yours {yours})")
        self.epoch = epoch
