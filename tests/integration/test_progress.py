"""Trouble with progress in real gloo ranks under a real flow: what it is called, whom it names, how soon, and what goes on all the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import troubles
from holdfast.cli.job_view import view_job
from holdfast.history import models, queries
from tests.integration.stage import Play, Stage
from tests.mentions import mentions
from tests.waiting import wait_until

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "train_troubled.py"
THREE = {"nnodes": 3, "nproc_per_node": 1}


def begun(stage: Stage, name: str, *more: str, **fields: Any) -> Play:
    """Start a job of three ranks, each on a node of its own, and let it come to its way."""
    quick = {**THREE, "timeouts": {"hang": "2s"}}
    play = stage.play(name, script=str(SCRIPT), args=["--steps", "100000", *more], **{**quick, **fields})
    play.steps_to(10)
    return play


def nodes_of(play: Play) -> dict[int, str]:
    """Return on which node each rank is."""
    return {rank: placed.node for rank, placed in play.chaos.ranks().items()}


def trouble(play: Play, rank: int, statements: str) -> None:
    """Have *rank* get into trouble, and see that it did."""
    folder = play.stage.home / "jobs" / play.name / "checkpoints"
    troubles.trouble(folder, rank, statements)
    wait_until(lambda: troubles.troubled_at(folder, rank), seconds=60, explain=play.log)


def the_fault(play: Play, kind: str) -> models.FaultRecord:
    """Wait for a fault of this kind, and return the newest; a failure shows all that were seen."""

    def explain() -> str:
        seen = [f"{one.kind} {one.target}: {one.evidence['quote']}" for one in queries.faults(play.stage.history, play.job.id)]
        return "\n".join([*seen, play.log()])

    wait_until(lambda: queries.newest_fault(play.stage.history, play.job.id, [kind]), seconds=60, explain=explain)
    found = queries.newest_fault(play.stage.history, play.job.id, [kind])
    assert found is not None
    return found


def gets_on(play: Play) -> None:
    """Wait until the last incident is over and the job has stepped on."""
    wait_until(lambda: play.incidents() and play.incidents()[-1].outcome == "recovered", seconds=60, explain=play.log)
    play.steps_to(play.chaos.step() + 5)


def test_absent_and_misplaced_ranks_are_named_and_replaced_and_a_bad_loss_is_reported(stage: Stage) -> None:
    """The hang: rank, collective, who waits, and the line; the wrong collective: both sides. The survivors stay in their processes."""
    play = begun(stage, "hang")
    node = nodes_of(play)
    trouble(play, 1, "stuck_in_user_code()")
    hang = the_fault(play, "job-hang")
    assert (hang.rank, hang.node) == (1, node[1])
    words = rf"rank 1 on {node[1]} did not arrive at allreduce #\d+ of group 0 \(ranks 0, 2 wait since [\d.]+ s\); rank 1 is at "
    assert re.match(words + r"train_troubled.py:\d+ in stuck_in_user_code; no rank made progress for", hang.evidence["quote"])
    assert f"rank 0 on {node[0]} waits (gradients)" in hang.evidence["detail"]
    gets_on(play)
    node = nodes_of(play)
    trouble(play, 2, "dist.broadcast(torch.zeros(4), 0)")
    mismatch = the_fault(play, "collective-mismatch")
    assert (mismatch.rank, mismatch.node, mismatch.attributed_to) == (2, node[2], "user_code")
    assert mentions(mismatch.evidence["quote"], "rank 2", "broadcast of 4 float32")
    gets_on(play)
    assert [one.action for one in play.incidents()] == ["replace-ranks", "replace-ranks"]
    trouble(play, 0, "poison = math.nan")
    loss = the_fault(play, "loss-not-finite")
    assert (loss.rank, loss.incident_id, loss.recommended_action) == (0, None, "monitor")
    assert mentions(loss.evidence["quote"], "rank 0", "nan", f"step {loss.step}", "this rank")
    assert any(mentions(one.text, "NaN or infinite") for one in queries.job_events(stage.history, play.job.id))
    assert play.kinds()[2:] in ([], ["loss-diverged"]), "the loss that stays none is an incident of its own"


def test_a_rank_that_hangs_while_the_others_meet_at_a_checkpoint_is_named_as_soon_as_in_a_step(stage: Stage) -> None:
    """What the others wait in is no section of theirs, which would be given half an hour."""
    play = begun(stage, "meeting", checkpoint={"interval": 1})
    node = nodes_of(play)
    trouble(play, 1, "optimizer.zero_grad = stuck_in_user_code")  # the gradients of this step have been averaged by then
    hang = the_fault(play, "job-hang")
    assert (hang.rank, hang.node) == (1, node[1])
    assert "rank 1 is at train_troubled.py" in hang.evidence["quote"]
    assert f"rank 0 on {node[0]} waits (collective)" in hang.evidence["detail"]
    assert "_leave_to_writer" in hang.evidence["detail"]
    gets_on(play)
    assert [one.action for one in play.incidents()] == ["replace-ranks"], play.incidents()[0].reason


def test_a_slow_rank_is_moved_if_that_pays_and_one_with_a_flipped_bit_is_replaced(stage: Stage) -> None:
    """The slow one moves to a spare node, and the sum is on record; a rank whose parameters differ from its copies' leaves its node."""
    stage.widen({f"node-{number}": f"rack-{number}" for number in range(5)})
    play = begun(stage, "copies", **THREE, spare_nodes=2, hot_spares=0, checks={"replicas": 16, "straggler": "auto"})
    slowly = nodes_of(play)[1]
    trouble(play, 1, "slow = 0.08")
    slow = the_fault(play, "straggler-gpu")
    assert (slow.rank, slow.node, slow.incident_id) == (1, slowly, None)
    assert mentions(slow.evidence["quote"], "computing is slow")
    wait_until(lambda: nodes_of(play).get(1, slowly) != slowly and play.state() == "RUNNING", seconds=60, explain=play.log)
    assert play.incidents() == []
    weighed = next(one for one in queries.straggler_decisions(stage.history, play.job.id) if one.rank == 1)
    assert (weighed.act, weighed.node, weighed.kind) == ("move", slowly, "straggler-gpu")
    assert re.match(rf"rank 1 on {slowly}: .* x [\d,]+ .* = .*: migrated$", weighed.reason)
    wait_until(lambda: queries.finished_migrations(stage.history, play.job.id)[-1].done, seconds=60, explain=play.log)
    assert (queries.finished_migrations(stage.history, play.job.id)[-1].facts or {})["pause"] > 0
    liar = nodes_of(play)[2]
    trouble(play, 2, "flip()")
    wrong = the_fault(play, "silent-corruption")
    assert (wrong.rank, wrong.node) == (2, liar)
    assert wrong.step is not None
    assert wrong.step % 16 == 0
    assert mentions(wrong.evidence["quote"], f"rank 2 on {liar}", 2, "'2.weight'")
    gets_on(play)
    play.steps_to(play.chaos.step() + 40)
    assert play.kinds() == ["silent-corruption"]
    assert liar not in nodes_of(play).values()


def test_under_torchs_own_groups_the_stack_names_the_culprit(stage: Stage) -> None:
    """Nothing counts operations there: who stands in the script's own code while all others are in backward is the one."""
    play = begun(stage, "stock", "--stock-groups", groups="stock")
    node = nodes_of(play)[2]
    trouble(play, 2, "stuck_in_user_code()")
    hang = the_fault(play, "job-hang")
    assert (hang.rank, hang.node) == (2, node)
    words = (
        rf"rank 2 on {node} does not wait for other ranks, while ranks 0, 1 wait for others; rank 2 is at train_troubled.py:\d+ in stuck"
    )
    assert re.match(words, hang.evidence["quote"])


def test_an_evaluation_and_a_save_that_nobody_declared_are_remarked_on_and_no_fault(stage: Stage) -> None:
    """Rank 0 is away for fifty steps' time while the others wait for it in a collective, then all are for a hundred."""
    play = begun(stage, "pauses", timeouts={})
    before = nodes_of(play)
    usual = sorted(one.seconds for one in queries.steps(stage.history, play.job.id))[5]
    trouble(play, 0, f"time.sleep({50 * usual + 2})\nwhile not (folder / 'seen').exists(): time.sleep(0.05)")
    wait_until(
        lambda: "rank 0 on " in "".join(one["target"] for one in view_job(stage.history, play.job).as_record()["warnings"]), seconds=30
    )
    assert {one["rank"]: one["pid"] for one in view_job(stage.history, play.job).as_record()["ranks"]} == play.pids()
    (stage.home / "jobs" / "pauses" / "checkpoints" / "seen").touch()
    play.steps_to(play.chaos.step() + 5)
    wait_until(lambda: view_job(stage.history, play.job).pause is None, seconds=60)
    for rank in range(3):
        trouble(play, rank, f"time.sleep({100 * usual + 2})")
    play.steps_to(play.chaos.step() + 5)
    wait_until(lambda: [one for one in queries.job_events(stage.history, play.job.id) if "no rank made progress" in one.text], seconds=60)
    first = next(one.text for one in queries.job_events(stage.history, play.job.id) if "no rank made progress" in one.text)
    assert re.search(r"rank 0 on node-\d did not arrive at allreduce #\d+ of group 0 \(ranks 1, 2 wait", first), first
    assert mentions(first, "300 s")
    assert (play.incidents(), nodes_of(play)) == ([], before)
    assert [one.kind for one in queries.faults(stage.history, play.job.id) if one.kind.startswith(("job-", "collective-"))] == []
