"""Jobs on nodes that a real Slurm lends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from holdfast import exit_codes
from holdfast.history import cordons, holder_of, queries
from holdfast.history.cordons import CordonTable
from holdfast.policies.nodes.cordons import Answer, CordonChanged, Node, OperatorRequest, Owner
from holdfast.policies.nodes.quarantine import cordon, uncordon
from holdfast.spec import SlurmCluster
from holdfast.testing.chaos import Chaos
from tests.integration.conftest import PrefectServer
from tests.integration.flow_server import Flows
from tests.integration.stage import PACED, Play
from tests.integration.test_takeover_flow import goes_on, newest
from tests.mentions import mentions, one_line_mentions
from tests.slurm.slurm_server import MISSING, SlurmServer, is_installed
from tests.slurm.slurm_stage import SlurmStage, job_events
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
TWO = {"nnodes": 2, "nproc_per_node": 1}
TOGETHER = """
def other():
    try:
        with open(f"{os.environ['HOLDFAST_CHECKPOINT_DIR']}/rank-{1 - rank}") as file:
            return int(file.read())
    except OSError:
        return 0
while other() < step - 1:
    time.sleep(0.01)
"""
"""What has each of two ranks wait for the other one, as a collective would: a job whose steps advance has lost nobody."""


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmServer]:
    """Give a Slurm of four nodes; without the packages the tests fail, so that half of the claims is not dropped in silence."""
    if not is_installed():
        pytest.fail(MISSING)
    server = SlurmServer(4, silence=5)
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture
def stage(
    slurm: SlurmServer, prefect_server: PrefectServer, flows: Flows, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmStage]:
    """Give an empty stage on all four nodes, and see to it that a job that has ended left neither processes nor allocations."""
    slurm.mend()
    home = tmp_path_factory.mktemp("s")
    words = {**prefect_server.environment, **slurm.environment, "HOLDFAST_HOME": str(home), "PYTHONPATH": str(ROOT)}
    stage = SlurmStage(home, words, flows, slurm=slurm)
    yield stage
    ended = all(play.process.poll() is not None for play in stage.plays)
    stage.close()
    slurm.run("scancel", "--quiet", "--partition=train")
    assert not ended or not stage.left()


def holdfast(stage: SlurmStage, *words: str) -> str:
    """Return what a command prints."""
    done = subprocess.run([sys.executable, "-m", "holdfast", *words], env=stage.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def said(stage: SlurmStage, node: str, verb: Callable[[Node, OperatorRequest], Answer], reason: str) -> None:
    """Say a person's word about a node to the history alone, as somebody who has no Slurm at hand would."""
    word = OperatorRequest(owner=Owner(name="ann@desk", person=True), reason=reason, at=time.time())
    place = CordonTable(cluster="slurm", names=stage.slurm.names, rules=SlurmCluster(kind="slurm").quarantine.rules)
    answer = cordons.apply(stage.history, place, node, lambda node, _ward: verb(node, word), now=word.at)
    assert isinstance(answer, CordonChanged), answer


def recovered(play: Play, number: int = 1) -> None:
    """Wait until incident *number* is closed: on a busy machine torch alone takes half a minute to be imported."""
    wait_until(
        lambda: len(play.incidents()) >= number and all(one.outcome for one in play.incidents()), seconds=150, explain=lambda: story(play)
    )


def story(play: Play) -> str:
    """Return what became of a job until now."""
    moves = [f"{move.after}: {move.reason}" for move in queries.transitions(play.stage.history, play.job.id)]
    return "\n".join([*moves, job_events(play), play.log()])


def is_drained(slurm: SlurmServer, node: str) -> bool:
    """Return whether Slurm gives *node* to no further job."""
    return slurm.state(node).startswith("drain")


@pytest.mark.long
def test_a_job_asks_for_nodes_recovers_on_them_is_put_back_into_the_queue_and_leaves_nothing(stage: SlurmStage) -> None:
    """A killed rank is restarted in place; what Slurm requeues goes on in the same allocation, when that begins anew."""
    play = stage.play("plain-in-slurm", args=["--steps", "100000"], **TWO)
    play.steps_to(5)
    (number,) = stage.allocations("plain-in-slurm")
    assert one_line_mentions(job_events(play), "2 nodes", f"job {number}")
    assert f"Slurm job {number} has " in holdfast(stage, "status", "plain-in-slurm")
    cluster = stage.home / "cluster.json"
    cluster.write_text(json.dumps(stage.described()))
    seen = json.loads(holdfast(stage, "node", "ls", "--cluster", str(cluster), "--json"))["nodes"]
    mine = newest(play).ranks
    assert {one["name"]: one["allocation"] for one in seen} == {name: number if name in mine else None for name in stage.slurm.names}
    play.chaos.kill(1)
    recovered(play)
    goes_on(play)
    assert (play.kinds(), [one.action for one in play.incidents()]) == (["worker-sigkill"], ["restart-workers"]), play.log()

    stage.slurm.run("scontrol", "requeue", number)
    wait_until(lambda: play.saw(2), seconds=60, explain=play.log)
    recovered(play, 2)
    goes_on(play)
    assert [one.kind for one in play.incidents()] == ["worker-sigkill", "node-leaving"], story(play)
    assert stage.allocations("plain-in-slurm") == [number], story(play)
    assert "Restarts=1" in stage.slurm.run("scontrol", "show", "job", number), job_events(play)
    play.stops()
    assert stage.allocations("plain-in-slurm") == []


@pytest.mark.long
def test_a_lost_node_gives_way_to_the_spare_one_and_a_further_allocation_to_the_next(stage: SlurmStage) -> None:
    """A missing node is requested anew at once; a node that is cordoned is drained in Slurm, and given back when it is uncordoned."""
    play = stage.play("lost-in-slurm", args=["--steps", "100000", "--each", TOGETHER], **TWO, spare_nodes=1)
    play.steps_to(5)
    (first,) = stage.allocations("lost-in-slurm")
    lost = play.chaos.ranks()[1].node
    stage.take_node(lost)
    recovered(play)
    goes_on(play)
    assert (play.kinds(), [one.action for one in play.incidents()]) == (["node-lost"], ["replace-node"]), play.log()

    wait_until(lambda: len(stage.allocations("lost-in-slurm")) == 2, seconds=60, explain=lambda: job_events(play))
    further = next(number for number in stage.allocations("lost-in-slurm") if number != first)
    spare = next(name for name in stage.slurm.names if name != lost and name not in newest(play).ranks)
    wait_until(lambda: stage.nodes._view(spare).job == play.job.id, seconds=60, explain=lambda: job_events(play))
    second = play.chaos.ranks()[0].node
    stage.take_node(second)
    recovered(play, 2)
    goes_on(play)
    assert set(newest(play).ranks) == set(stage.slurm.names) - {lost, second}
    assert further in stage.allocations("lost-in-slurm")
    assert not any(is_drained(stage.slurm, name) for name in stage.slurm.names), "a node that is lost may come back"

    said(stage, second, cordon, "its fan is loud")
    stage.slurm.start_node(lost)
    stage.slurm.start_node(second)
    wait_until(lambda: is_drained(stage.slurm, second), seconds=60, explain=lambda: job_events(play))
    assert "holdfast root/slurm: " in stage.slurm.run("sinfo", "-h", "-n", second, "-o", "%E")
    said(stage, second, uncordon, "a new fan")
    wait_until(lambda: not is_drained(stage.slurm, second), seconds=60, explain=lambda: job_events(play))
    play.stops()
    assert stage.allocations("lost-in-slurm") == []


@pytest.mark.long
@pytest.mark.timeout(600)  # torch is imported six times, which a busy machine takes minutes for
def test_what_an_allocation_leaves_undone_is_done_in_the_next_one_to_the_bit(
    stage: SlurmStage, alone: Callable[..., None], tmp_path: Path
) -> None:
    """Nothing else is free: what ranks have is saved, the job waits, and goes on in an allocation that begins when the first is over."""
    stage.cluster = {"exclude": stage.slurm.names[2:], "time": "1h"}
    script, steps = Path(__file__).with_name("copies.py"), 600
    results = stage.home / "here.json"
    play = stage.play(
        "long",
        script=str(script),
        args=[str(steps), str(results), "0.05"],
        **TWO,
        groups="stock",
        checkpoint={"directory": str(stage.home / "checkpoints"), "interval": 0, "memory": {"when_late": "pause"}},
        timeouts={"final_checkpoint": "5s"},
        env={"OMP_NUM_THREADS": "1"},
    )
    play.steps_to(20, seconds=200)
    (first,) = stage.allocations("long")
    stage.slurm.run("scontrol", "update", f"JobId={first}", f"EndTime={datetime.now() + timedelta(seconds=25):%Y-%m-%dT%H:%M:%S}")  # noqa: DTZ005
    wait_until(lambda: play.saw(1), seconds=90, explain=play.log)
    recovered(play)
    assert play.kinds() == ["node-leaving"], play.log()
    assert one_line_mentions(job_events(play), "memory", "saved out")
    (second,) = stage.allocations("long")
    assert second != first
    assert play.ends(seconds=300) == 0, play.log()
    assert stage.allocations("long") == []
    (incident,) = play.incidents()
    assert (incident.steps_lost or 0) <= 1
    alone(script, steps, tmp_path / "alone.json", 0)
    assert json.loads(results.read_text()) == json.loads((tmp_path / "alone.json").read_text())


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_job_that_gives_way_to_a_more_urgent_one_is_saved_and_goes_on_when_that_is_over(stage: SlurmStage) -> None:
    """Slurm signals every process of it to end, at once, and leaves it ten seconds: nothing is lost, though nothing was saved before."""
    stage.cluster = {"exclude": stage.slurm.names[2:]}
    play = stage.play(
        "modest",
        script=str(Path(__file__).with_name("copies.py")),
        args=["100000", str(stage.home / "here.json"), "0.05"],
        **TWO,
        groups="stock",
        checkpoint={"directory": str(stage.home / "checkpoints"), "interval": 0, "memory": {"when_late": "pause"}},
        timeouts={"final_checkpoint": "5s"},
        env={"OMP_NUM_THREADS": "1"},
    )
    play.steps_to(20, seconds=200)
    wants = ["--partition=urgent", "--nodes=2", f"--exclude={','.join(stage.slurm.names[2:])}", "--exclusive"]
    urgent = stage.slurm.run("sbatch", "--parsable", *wants, "--output=/dev/null", "--wrap", "sleep 1000")
    wait_until(lambda: "JobState=RUNNING" in shown(stage, urgent), seconds=60, explain=lambda: job_events(play))
    play.reaches("WAITING")
    stage.slurm.run("scancel", urgent)
    recovered(play)
    goes_on(play)
    (incident,) = play.incidents()
    assert (incident.kind, incident.action) == ("node-leaving", "wait-for-capacity"), f"{incident.reason}\n{job_events(play)}"
    # Slurm reports when the allocation ends before the signal has come, or after it.
    reasons = ("preemption notice" in incident.reason, "its allocation, Slurm job" in incident.reason)
    assert any(reasons), incident.reason
    assert one_line_mentions(job_events(play), "memory", "saved out")
    assert (incident.steps_lost or 0) <= 1
    play.stops()


@pytest.mark.long
def test_a_job_that_is_run_inside_of_an_allocation_uses_it_and_ends_saved_before_it(stage: SlurmStage) -> None:
    """Who made the allocation ends it, and learns by a status of its own that the job is to go on. A machine that goes down leaves all."""
    sleep = ["--parsable", "--nodes=2", "--exclusive", "--job-name=mine", "--output=/dev/null", "--wrap", "sleep 1000"]
    number = stage.slurm.run("sbatch", *sleep)
    wait_until(lambda: stage.slurm.run("squeue", "-h", "-j", number, "-o", "%T") == "RUNNING", seconds=60, explain=stage.slurm.logs)
    program(stage, "systemctl", "echo stopping")
    stage.environment["SLURM_JOB_ID"] = number
    play = stage.play("inside", args=["--steps", "100000"], **TWO, timeouts={"final_checkpoint": "5s", "termination_grace": "2s"})
    play.steps_to(5)
    before = play.pids()
    play.process.send_signal(signal.SIGTERM)
    assert play.process.wait(60) == exit_codes.DETACHED, play.log()
    assert one_line_mentions(job_events(play), "detaches", "shuts down")
    again = stage.again("inside", play.spec)
    wait_until(lambda: "a new flow reattached to the job" in job_events(again), seconds=60, explain=again.log)
    goes_on(again)
    assert again.pids() == before
    assert stage.allocations("inside") == []
    ends(stage, number, within=30)
    assert again.ends() == 5, again.log()
    assert (again.state(), again.kinds()) == ("CANCELLED", [])
    assert mentions(again.reason(), "allocation")
    assert "JobState=CANCELLED" not in stage.slurm.run("scontrol", "show", "job", number)


def program(stage: SlurmStage, name: str, does: str) -> None:
    """Have *stage* find a program of that name first, which runs the shell command *does*."""
    programs = stage.home / "bin"
    programs.mkdir(exist_ok=True)
    (programs / name).write_text(f"#!/bin/sh\n{does}\n")
    (programs / name).chmod(0o755)
    stage.environment["PATH"] = f"{programs}:{stage.environment['PATH'].removeprefix(f'{programs}:')}"


def submitted(stage: SlurmStage, *words: str) -> str:
    """Submit a batch script with what *stage* has set, and return the number of its Slurm job."""
    done = subprocess.run(["sbatch", "--parsable", *words], env=stage.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().partition(";")[0]


def ends(stage: SlurmStage, number: str, *, within: int) -> None:
    """Have the time of a Slurm job end in so many seconds."""
    end = datetime.now() + timedelta(seconds=within)  # noqa: DTZ005 (Slurm's own is the local one)
    stage.slurm.run("scontrol", "update", f"JobId={number}", f"EndTime={end:%Y-%m-%dT%H:%M:%S}")


def shown(stage: SlurmStage, number: str) -> str:
    """Return all that Slurm says of a Slurm job."""
    return stage.slurm.run("scontrol", "show", "job", number)


@pytest.mark.long
@pytest.mark.parametrize(("status", "restarts"), [(5, 1), (3, 0)])
def test_a_script_queues_itself_again_after_the_end_of_its_time_and_not_after_a_stop(status: int, restarts: int, stage: SlurmStage) -> None:
    """As the status of `holdfast run` shows it; what gives which is seen above."""
    text = (ROOT / "deployments" / "slurm" / "inside.sh").read_text()
    script = stage.home / "inside.sh"
    script.write_text(text.replace("#SBATCH --gpus-per-node=8\n", ""))
    program(stage, "holdfast", f"exit {status}")
    number = submitted(stage, "--nodes=1", f"--output={stage.home}/inside.log", str(script))
    over = "JobState=PENDING" if restarts else f"ExitCode={status}:0"
    wait_until(
        lambda: over in shown(stage, number) and f"Restarts={restarts} " in shown(stage, number), seconds=60, explain=stage.slurm.logs
    )
    assert restarts or "JobState=FAILED" in shown(stage, number)


@pytest.mark.long
def test_an_orchestrator_that_is_a_batch_job_hands_over_before_its_time_ends_and_no_rank_notices(stage: SlurmStage) -> None:
    """Its own node is none to train on; a second one goes on, and the first is queued again. Slurm's SIGTERM is no wish to stop the job."""
    program(stage, "holdfast", f'exec {sys.executable} -P -m holdfast "$@"')
    settings = stage.home / "orchestrator.env"
    settings.write_text(f"HOLDFAST_HOME={stage.home}/$SLURMD_NODENAME\nHOLDFAST_HISTORY=sqlite:///{stage.home}/history.db\n")
    stage.environment["HOLDFAST_SETTINGS"] = str(settings)
    job = {"name": "led", "script": str(PACED), "args": ["--steps", "100000"], **TWO, "workdir": str(stage.home)}
    checkpoint = {"directory": str(stage.home / "checkpoints")}
    (stage.home / "led.yaml").write_text(json.dumps({**job, "checkpoint": checkpoint, "cluster": stage.described()}))
    script = str(ROOT / "deployments" / "slurm" / "orchestrator.sbatch")
    words = ["--mem=100", "--time=60", f"--output={stage.home}/led-%j.log", script, str(stage.home / "led.yaml")]
    chaos = Chaos(stage.nodes, stage.history, "led")

    def logs() -> str:
        return "\n".join(path.read_text()[-3000:] for path in [*stage.home.glob("led-*.log"), *stage.home.glob("*/jobs/led/*.log")])

    first = submitted(stage, *words)
    wait_until(lambda: queries.jobs(stage.history, "led") and chaos.step() >= 5 and chaos.complete(), seconds=150, explain=logs)
    job_id = queries.newest_job(stage.history, "led").id
    before = {rank: placed.pid for rank, placed in chaos.ranks().items()}
    (allocation,) = stage.allocations("led")
    assert allocation != first
    second = submitted(stage, *words)
    wait_until(lambda: "standby.waits" in logs(), seconds=100, explain=logs)

    stage.slurm.run("scancel", "--batch", "--signal=USR1", first)  # as Slurm does before its time ends, of which it thinks twice a minute
    wait_until(lambda: "Restarts=1 " in shown(stage, first), seconds=60, explain=logs)
    wait_until(
        lambda: any(one.text.startswith("the standby controller on") for one in queries.job_events(stage.history, job_id)),
        seconds=60,
        explain=logs,
    )
    assert any(mentions(one.text, "detaches", "SIGUSR1") for one in queries.job_events(stage.history, job_id))
    step = chaos.step()
    wait_until(lambda: chaos.step() > step + 5, seconds=60, explain=logs)

    stage.slurm.run("scancel", first, second)
    wait_until(lambda: holder_of(stage.history, job_id) is None, seconds=60, explain=logs)
    assert {rank: placed.pid for rank, placed in chaos.ranks().items()} == before
    assert [move.after for move in queries.transitions(stage.history, job_id)] == ["LAUNCHING", "RUNNING"]
    assert queries.incidents(stage.history, job_id) == []
    assert stage.allocations("led") == [allocation]
    assert "ended: CANCELLED" in holdfast(stage, "stop", "led")
    assert stage.allocations("led") == []
