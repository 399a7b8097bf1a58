"""Scenarios and events for tests of the simulator."""

from __future__ import annotations

from typing import Any

from holdfast.simulator.causes import Cause, Symptom
from holdfast.simulator.fault_sources import NodeFault
from holdfast.simulator.scenario import Scenario

LOST = Cause(name="lost", kind="node-lost", symptom=Symptom.NODE_LOST)
GPU = Cause(name="GPU", kind="gpu-off-bus")
CABLE = Cause(name="cable", kind="link-down", symptom=Symptom.HANG)
PROCESS = Cause(name="process", kind="worker-exit-code", of_process=True)
HOUR, DAY = 3600.0, 86_400.0
PATIENCE = dict.fromkeys(("retry_step", "replace_ranks", "shrink_live", "restart_workers", "replace_node", "shrink_restart"), "20m")
"""Timeouts with which no recovery of the published length is cut off."""


def scenario(*, nodes: int = 10, nnodes: int | str = 8, hot_spares: int = 1, copies: int = 1, **fields: Any) -> Scenario:
    """Return a scenario of one job without faults of its own."""
    job = {
        "nnodes": nnodes,
        "step": "10s",
        "copies": copies,
        "checkpoint": {"interval": "30m", "stall": "0s", "overlapped": "0s", "snapshot_overhead": "0%"},
        "timeouts": PATIENCE,
        **fields.pop("job", {}),
    }
    cluster = {"nodes": nodes, "gpus_per_node": 2, "hot_spares": hot_spares, **fields.pop("cluster", {})}
    whole: dict[str, Any] = {
        "name": "test",
        "duration": "2d",
        "runs": 1,
        "cluster": cluster,
        "jobs": [job],
        "faults": {"constant_rate": {"per_1000_node_days": 0}},
        **fields,
    }
    return Scenario.model_validate(whole)


def fault(at: float, node: int = 0, cause: Cause = LOST, repair: float = DAY) -> NodeFault:
    """Return a fault; one of a process needs no repair."""
    return NodeFault(at, node, cause, 0.0 if cause.of_process else repair)
