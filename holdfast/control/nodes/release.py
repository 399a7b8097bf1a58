"""Release nodes that a recovery drops: nothing of the job may run there any more."""

from __future__ import annotations

from holdfast.control.state.incidents import IncidentInWork
from holdfast.control.supervisor.controller import JobController
from policies.node_faults import find_node_faults


def release_nodes(run: JobController, nodes: tuple[str, ...], *, lost: set[str], reason: str) -> None:
    """End what the job has on *nodes*; no other job gets them either where they have to answer for the incident."""
    if run.incidents.current is not None and run.incidents.current.case is not None:
        run.nodes.eligibility.record_faults(find_node_faults(run.incidents.current.case, nodes))
    run.agents.each(nodes, run.agents.drop)
    for node in nodes:
        run.generations.sent_to.pop(node, None)
        run.log.record_node_status(node, "lost" if node in lost else "excluded", reason)


def release_unreachable(run: JobController, incident: IncidentInWork, node: str) -> None:
    """Release a node whose ranks all leave it and whose agent could not be told to end them: that is done once it can be reached."""
    incident.lost.add(node)
    run.generations.sent_to.pop(node, None)
    run.log.record_node_status(node, "lost", "it could not be told to end the ranks that leave it")
    run.agents.drop_async(node)
