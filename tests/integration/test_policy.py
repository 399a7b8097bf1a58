"""A policy file under a running job: a change holds from the next decision on, a bad one changes nothing, for the next flow neither."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from holdfast.cli.commands.analyse.policy import attempts
from holdfast.history import queries
from tests.integration.stage import Play, Stage
from tests.mentions import one_line_mentions
from tests.waiting import wait_until


def events_with(play: Play, words: str) -> list[str]:
    """Return the remarks with these *words*."""
    return [one.text for one in queries.job_events(play.stage.history, play.job.id) if words in one.text]


def killed(play: Play, number: int) -> None:
    """Kill rank 1 once all ranks are at work, and wait until incident *number* is over."""
    play.steps_to(play.chaos.step() + 2)
    play.chaos.kill(1)
    wait_until(lambda: play.saw(number) and play.incidents()[-1].outcome is not None, seconds=60, explain=play.log)


@pytest.mark.long
def test_a_policy_file_is_read_anew_and_a_bad_one_changes_nothing(stage: Stage, tmp_path: Path) -> None:
    """The same kill is answered in place, then by another node; the broken file is reported once, and outlives the flow."""
    stage.widen({f"node-{number}": f"rack-{number}" for number in range(4)})
    file = tmp_path / "careful.yaml"
    file.write_text("based_on: balanced\nmax_restarts_in_place: 9\n")
    play = stage.play("ruled", args=["--steps", "100000"], nnodes=2, nproc_per_node=1, spare_nodes=2, policy=str(file))
    killed(play, 1)
    file.write_text("based_on: balanced\nrecommended_actions: {worker-sigkill: evict}\n")
    wait_until(lambda: events_with(play, "has changed"), seconds=60, explain=play.log)
    (change,) = events_with(play, "has changed")
    assert one_line_mentions(change, "recommended_actions.worker-sigkill: evict")
    assert one_line_mentions(change, "max_restarts_in_place: 3", 9)
    killed(play, 2)
    assert [one.action for one in play.incidents()] == ["restart-workers", "replace-node"], play.log()
    assert next(one for one in queries.faults(stage.history, play.job.id)[::-1] if one.root).recommended_action == "evict"
    first, second = (
        attempts(one, queries.decisions(stage.history, incident_id=one.id), queries.transitions(stage.history, play.job.id))
        for one in play.incidents()
    )
    assert [one["rule"] for one in first] == ["RestartWorkers(gpu=1)"]
    (attempt,) = second
    assert (attempt["rule"], attempt["policy"]) == ("ReplaceNode(on_secondary=True)", str(file))
    assert attempt["passed_over"]["RestartWorkers"].endswith("cannot hold ranks")
    file.write_text("recommended_actions: {worker-sigkil: record}\n")
    wait_until(lambda: events_with(play, "stays in force"), seconds=60, explain=play.log)
    (refusal,) = events_with(play, "stays in force")
    assert one_line_mentions(refusal, "recommended_actions.worker-sigkil", "line 1", "'worker-sigkill'")
    play.dies()
    play = stage.again(play.name, play.spec)
    wait_until(lambda: events_with(play, "The last policy that was in force"), seconds=60, explain=play.log)
    killed(play, 3)
    assert play.incidents()[-1].action == "replace-node", play.log()
    play.process.send_signal(signal.SIGTERM)
    play.ends()
