"""Jobs whose script reports no steps: what counts as progress, as silence, and as the end."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.history import queries
from holdfast.policies.uptime import LEAST
from tests.integration.stage import Play, Stage
from tests.mentions import mentions
from tests.waiting import wait_until

pytestmark = pytest.mark.long

TWO = {"nnodes": 2, "nproc_per_node": 1}
TICKING = "import time\nwhile True: print('tick', flush=True); time.sleep(0.2)"
FIRST_ENDS = """
import os, time
print('done', flush=True) if os.environ['RANK'] == '0' else time.sleep({seconds})
"""


def unmanaged(stage: Stage, name: str, code: str, **fields: Any) -> Play:
    """Start a job of a program that knows nothing of Holdfast."""
    return stage.play(name, command=[sys.executable, "-c", code], **{**TWO, **fields})


def runs_since(play: Play, generation: int) -> float:
    """Wait until all ranks of *generation*, or a later one, run; return when the last of them started, by their agents."""
    wait_until(
        lambda: play.state() == "RUNNING" and queries.generations(play.stage.history, play.job.id)[-1].number >= generation,
        seconds=60,
        explain=play.log,
    )
    return time.time()


def test_a_job_that_runs_between_its_faults_does_not_fail(stage: Stage) -> None:
    """Four kills, each after some seconds of good work: more than the recoveries without progress after which it would be over."""
    play = unmanaged(stage, "ticks", TICKING)
    for number in range(1, 5):
        since = runs_since(play, number)
        wait_until(lambda since=since: time.time() > since + LEAST + 2.0, seconds=60)  # type: ignore[misc]
        play.chaos.kill(number % 2)
        wait_until(lambda number=number: play.saw(number) and play.incidents()[-1].outcome, seconds=60, explain=play.log)  # type: ignore[misc]
    assert [(one.action, one.outcome) for one in play.incidents()] == [("restart-workers", "recovered")] * 4, play.reason()
    runs_since(play, 5)
    play.stops()


@pytest.mark.parametrize(
    ("code", "quote", "cure"),
    [
        ("import nosuchmodule", "ModuleNotFoundError", "Install"),
        ("import argparse; argparse.ArgumentParser().error('no --lr')", "--lr", "`args`"),
    ],
)
def test_an_error_that_every_start_meets_fails_the_job_without_a_restart(stage: Stage, code: str, quote: str, cure: str) -> None:
    """One incident, one generation, and a reason that says what to do; the policy may restart first nevertheless."""
    stage.count = 1
    play = unmanaged(stage, "lacks", code, nnodes=1, nproc_per_node=2)
    assert play.ends() == 1, play.log()
    assert (play.kinds(), len(queries.generations(stage.history, play.job.id))) == (["user-error"], 1)
    assert [one.action for one in queries.decisions(stage.history, play.job.id)] == ["fail"]
    assert mentions(play.reason(), quote, "All 2 ranks", "before the first step", cure)
    assert "no checkpoint" not in play.log()


def test_a_policy_may_restart_a_script_that_could_not_start(stage: Stage, tmp_path: Path) -> None:
    """Where a module may still be on its way, such as on a file system that is being mounted."""
    stage.count = 1
    policy = tmp_path / "policy.yaml"
    policy.write_text("fail_on_start_errors: false\n")
    play = unmanaged(stage, "restarts-allowed", "import nosuchmodule", nnodes=1, nproc_per_node=2, policy=str(policy))
    assert play.ends() == 1, play.log()
    assert next(one.action for one in queries.decisions(stage.history, play.job.id)) == "restart-workers"


def test_before_a_job_that_gets_nowhere_is_failed_its_spare_is_tried(stage: Stage) -> None:
    """The fault might have been the node's: another one runs it once."""
    stage.count = 2
    play = unmanaged(stage, "dies", "import os; os.kill(os.getpid(), 9)", nnodes=1, nproc_per_node=1, spare_nodes=1)
    assert play.ends() == 1, play.log()
    actions = [one.action for one in queries.decisions(stage.history, play.job.id)]
    assert actions == ["restart-workers", "restart-workers", "restart-workers", "replace-node", "fail"]
    assert mentions(play.reason(), "4 recoveries")


def test_the_silence_of_ranks_that_outlive_the_one_that_prints_is_no_hang(stage: Stage) -> None:
    """Rank 0 alone prints, and ends first: the job is not started again for what the others do meanwhile, nor before it has printed."""
    loads = "import time; time.sleep(2.5)\n"
    play = unmanaged(stage, "quiet-end", loads + FIRST_ENDS.format(seconds=2.5), timeouts={"log_silence": "1s"})
    assert play.ends() == 0, play.log()
    assert play.kinds() == []
    assert len(queries.generations(stage.history, play.job.id)) == 1


def test_a_job_whose_rank_0_has_ended_is_completed_though_others_do_not_end(stage: Stage) -> None:
    """They are given their time, and ended then: to run all of it again would lead to the same place."""
    works = "import time; time.sleep(4.0)\n"
    play = unmanaged(stage, "stuck", works + FIRST_ENDS.format(seconds=3600), timeouts={"exit_grace": "1s"})
    assert play.ends() == 0, play.log()
    assert mentions(play.reason(), "rank 0", "status 0", "rank 1 did not exit by itself")
    kinds = [one.kind for one in queries.faults(stage.history, play.job.id)]  # a busy machine is reported as well
    assert kinds.count("job-end-stuck") == 1
    assert (play.kinds(), len(queries.generations(stage.history, play.job.id))) == ([], 1)
    assert stage.left() == []


def test_a_job_whose_rank_0_has_left_at_once_is_not_completed(stage: Stage) -> None:
    """It ran for less than the others are given to end: they wait for it, and nothing was trained."""
    play = unmanaged(stage, "left-at-once", FIRST_ENDS.format(seconds=3600), timeouts={"exit_grace": "5s"})
    assert play.ends() == 1, play.log()
    assert [(one.kind, one.action) for one in play.incidents()] == [("job-end-stuck", "restart-workers"), ("job-end-stuck", "fail")]
    assert mentions(play.reason(), "rank 0", "status 0", "another restart")
    assert stage.left() == []


LEAVES = """
import datetime, os, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    dist.barrier()  # the other rank makes no such call
dist.destroy_process_group()
"""


def test_a_rank_that_leaves_without_an_error_is_named_when_others_lose_it(stage: Stage) -> None:
    """A collective that one rank alone makes: the rank that fails is not the one to look at."""
    play = unmanaged(stage, "leaves", LEAVES)
    assert play.ends() == 1, play.log()
    first = play.incidents()[0]
    assert (first.kind, first.target.split()[:2]) == ("worker-exit-early", ["rank", "1"]), play.log()
    lost = [one for one in queries.faults(stage.history, play.job.id) if one.kind == "worker-peer-lost"]
    assert {one.rank for one in lost} == {0}
    assert mentions(first.reason, "rank 1", "exited", "rank 0")


def test_a_job_whose_rank_0_does_not_end_is_started_again_once(stage: Stage) -> None:
    """The other ranks have ended; rank 0 may have been about to save: twice is enough."""
    other = FIRST_ENDS.format(seconds=3600).replace("'RANK'] == '0'", "'RANK'] == '1'")
    play = unmanaged(stage, "first", other, timeouts={"exit_grace": "1s"})
    assert play.ends() == 1, play.log()
    assert [(one.kind, one.action) for one in play.incidents()] == [("job-end-stuck", "restart-workers"), ("job-end-stuck", "fail")]
    assert mentions(play.reason(), "another restart")
