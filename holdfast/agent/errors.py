"""How an order is turned down."""

from __future__ import annotations


class Refused(Exception):
    """An order that cannot be carried out, and why."""


class StaleEpoch(Refused):
    """An order of a flow whose job another one steers by now."""

    def __init__(self, epoch: int, yours: int) -> None:
        super().__init__(f"a newer flow steers this job (epoch {epoch}, yours {yours})")
        self.epoch = epoch
