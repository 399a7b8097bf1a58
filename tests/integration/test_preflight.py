"""A launch passes sick nodes over: by what the cluster-health flow left in the history, with a word of it."""

from __future__ import annotations

import time

from holdfast.history import queries
from holdfast.history.looks import keep
from policies.verdicts import Finding, Verdict
from tests.integration.stage import Stage


def test_a_sick_node_is_passed_over_for_others(stage: Stage) -> None:
    """The first node of three is sick: the job, spare included, runs on the others, and the history says why."""
    now = time.time()
    finding = Finding(kind="gpu-off-bus", part="gpu 0", quote="GPU 0: Xid 79", since=now, seen=now)
    sick = Verdict(node="node-0", standing="sick", since=now, at=now, seen=now, findings=(finding,))
    keep(stage.history, "stage", {"node-0": sick}, [], {})

    play = stage.play("choosy", args=["--steps", "20"], nodes={"wanted": 1, "ranks": 1, "spare": 1})
    assert play.ends() == 0, play.log()

    (generation,) = queries.generations(stage.history, play.job.id)
    assert list(generation.ranks) == ["node-1"]
    standings = queries.node_standings(stage.history, "stage")
    assert {node: move.standing for node, move in standings.items()} == {"node-1": "healthy", "node-2": "healthy"}
    told = [one.text for one in queries.remarks(stage.history, play.job.id)]
    assert "node-0 passed over: sick: gpu-off-bus: GPU 0: Xid 79" in told
