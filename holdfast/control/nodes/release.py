"""Release nodes that a recovery drops: nothing of the job may run there any more."""

from __future__ import annotations

from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.incident import IncidentInWork
from policies.node_faults import offences


def release_nodes(run: JobController, nodes: tuple[str, ...], *, lost: set[str], reason: str) -> None:
    """End what the job has on *nodes*; no other job gets them either where they have to answer for the incident."""
    if run.incident is not None and run.incident.case is not None:
        run.eligibility.accuse(offences(run.incident.case, nodes))
    run.fleet.each(nodes, run.fleet.drop)
    for node in nodes:
        run.held.pop(node, None)
        run.stand(node, "lost" if node in lost else "excluded", reason)


def release_unreachable(run: JobController, incident: IncidentInWork, node: str) -> None:
    """Release a node whose ranks all leave it and whose agent could not be told to end them: that is done once it can be reached."""
    incident.lost.add(node)
    run.held.pop(node, None)
    run.stand(node, "lost", "it could not be told to end the ranks that leave it")
    run.fleet.drop_later(node)
