"""Hosts whose network breaks under a running job: cut off from the orchestrator, from everybody, in one direction, and healing in between.

One job on four real hosts, with a spare one, goes through all of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from holdfast.cli.watch import request_stop
from holdfast.history import FaultRecord, queries
from holdfast.plurals import plural
from holdfast.policies.recovery.policy import PolicyTimeouts
from holdfast.testing.chaos import Placed
from tests.hosts.fixture import rack_of
from tests.hosts.host import Direction, Host, Whom
from tests.hosts.job import HostJob, set_up
from tests.hosts.rack import Rack
from tests.integration.conftest import PrefectServer
from tests.mentions import mentions, one_line_mentions
from tests.monitors import is_read

pytestmark = [pytest.mark.long, pytest.mark.cluster, pytest.mark.timeout(600)]

PACE = 0.1
"""Seconds of a step, at least: ranks that train faster leave little of two cores to who is looked at."""
UNHEARD = 45
"""Steps that go by meanwhile, 4.5 s at least: longer than it takes an agent's silence as a sign, `timeouts.heartbeat`."""
SILENT = 6.5
"""Seconds: longer than `timeouts.heartbeat`, and less than twice as long, after which nodes count as lost of which another one answers."""
Begin = Callable[..., AbstractContextManager[HostJob]]
DETACHED = 6
"""Exit status of a flow that detached from its job."""
EVERY = 10
"""Steps between two checkpoints; the agent of rank 0 reports them."""


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    """Give four hosts with Holdfast."""
    with rack_of(4, tmp_path_factory) as rack:
        set_up(rack)
        yield rack


@contextmanager
def started(rack: Rack, place: Path, environment: Mapping[str, str], checkpoint: dict[str, Any], **given: Any) -> Iterator[HostJob]:
    """Give a job that trains, with a checkpoint now and then.

    A hang takes 6 s: longer than ranks stand for want of a core on a busy machine, and less than what is to be found lasts.
    """
    given["timeouts"] = {"hang": "6s", **given.get("timeouts", {})}
    job = HostJob(rack, place, environment, pace=PACE, checkpoint={"directory": str(place / "checkpoints"), **checkpoint}, **given)
    try:
        job.start()
        job.until(lambda: job.step() >= 1, "the first step", 300)
        yield job
    finally:
        job.close()


@pytest.fixture(scope="module")
def job(rack: Rack, prefect_server: PrefectServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostJob]:
    """Give a job on all four hosts."""
    with started(rack, tmp_path_factory.mktemp("j") / "job", prefect_server.environment, {"interval": EVERY}) as job:
        yield job


def checkpoints_after(job: HostJob, step: int) -> list[int]:
    """Return the checkpoints after *step* that the history knows of: those that were written, as any rank may report a trouble."""
    return [
        one.step for one in queries.checkpoints(job.history, job.row.id) if one.step is not None and one.step > step and not one.problem
    ]


@pytest.mark.parametrize("direction", ["both", "in", "out"])
def test_a_host_that_only_the_orchestrator_misses_trains_on(job: HostJob, direction: Direction) -> None:
    """Nothing is killed and nothing is an incident; once the way is mended, the history has all that it missed."""
    job.settles()
    before, host, number = job.chaos.ranks(), job.host_of(0), job.generation().number
    host.cut("orchestrator", direction)
    begun = job.step() + EVERY  # what was on its way
    try:
        job.until(lambda: job.step() >= begun + UNHEARD, "steps meanwhile")
        assert host.lost() > 0, "the cut took nothing"
        if direction != "in":
            assert not checkpoints_after(job, begun), "the controller got it all the same"
    finally:
        host.heal()
    job.until(lambda: checkpoints_after(job, begun), f"the checkpoints after step {begun} in the history")
    assert job.incidents() == [], job.log()
    assert "replica-lost" not in {one.kind for one in queries.faults(job.history, job.row.id)}, "it keeps what it kept"
    assert job.generation().number == number
    assert job.chaos.ranks() == before


def test_hosts_of_all_ranks_that_fall_silent_while_the_spare_one_answers_train_on(job: HostJob) -> None:
    """That no step comes in is no second sign: what would tell of steps is silent too."""
    job.settles()
    before, known = job.chaos.ranks(), len(job.incidents())
    hosts = list({job.host_of(rank).name: job.host_of(rank) for rank in before}.values())
    assert job.spare() not in hosts
    for host in hosts:
        host.cut("orchestrator")
    begun, since = job.step(), time.monotonic()
    try:
        job.until(lambda: time.monotonic() > since + SILENT and job.step() > begun, "steps meanwhile")
        assert all(host.lost() > 0 for host in hosts), "the cuts took nothing"
    finally:
        for host in hosts:
            host.heal()
    all_steps_recorded(job)
    assert len(job.incidents()) == known, job.log()
    assert job.chaos.ranks() == before


@contextmanager
def deaf(rack: Rack, job: HostJob, direction: Direction = "both") -> Iterator[None]:
    """Cut all hosts off from the orchestrator, which says so; mended at the end, which it says too."""
    silences, ends = said(job, "no message from any node"), said(job, "nodes can be reached again")
    for host in rack:
        host.cut("orchestrator", direction)
    try:
        yield
        job.until(lambda: said(job, "no message from any node") == silences + 1, "a controller that knows that it is cut off")
    finally:
        for host in rack:
            host.heal()
    job.until(lambda: said(job, "nodes can be reached again") == ends + 1, "a controller that reaches them again")


def test_a_partitioned_controller_is_replaced_by_a_standby_that_reaches_hosts(
    rack: Rack, job: HostJob, prefect_server: PrefectServer
) -> None:
    """Nobody has died, and nothing is an incident: who reaches the hosts runs the job and recovers it. Then it goes back."""
    job.settles()
    before, known, flow, host = job.chaos.ranks(), len(job.incidents()), job.flows[-1], job.spare()
    with standby_on(rack, job, host, prefect_server) as standby:
        for one in rack:
            one.cut("orchestrator")
        try:
            assert flow.wait(120) == DETACHED, job.log()
            job.until(lambda: said(job, f"the standby controller on {host.name} controls"), "a standby that controls")
            assert sum(mentions(one.text, f"on {host.name}", "3 of 3") for one in queries.job_events(job.history, job.row.id)) == 1
            all_steps_recorded(job)
        finally:
            for one in rack:
                one.heal()
        assert job.chaos.ranks() == before
        assert len(job.incidents()) == known, job.log()
        job.host_of(1).run("kill", "-KILL", str(before[1].pid))
        job.until(lambda: [one.outcome for one in job.incidents()[known:]] == ["recovered"], "the end of the incident")

        job.start(standby=True)
        job.until(lambda: job.stands_by(len(job.flows) - 1), "a standby on the first machine")
        job.person("detach", job.name)
        assert standby.wait(60) == DETACHED, job.log()
    job.runs()


@contextmanager
def standby_on(rack: Rack, job: HostJob, host: Host, prefect: PrefectServer) -> Iterator[subprocess.Popen[bytes]]:
    """Have a standby on *host*, which reaches the Prefect server by a tunnel that no cut from the orchestrator is about."""
    port, home = urlsplit(prefect.url).port, job.place / "elsewhere"
    home.mkdir()
    own = {"HOLDFAST_HOME": str(home), "HOLDFAST_HISTORY": f"sqlite:///{job.place / 'home' / 'history.db'}", "HOME": str(host.home)}
    words = [f"{name}={value}" for name, value in (job.environment | own).items()]
    flow = [sys.executable, "-m", "holdfast.flows.training_job", str(job.standby_spec())]
    with (job.place / "flow-elsewhere.log").open("wb") as log:
        tunnel = subprocess.Popen([*rack.login, "-b", rack.second_address(), "-NR", f"{port}:127.0.0.1:{port}", host.address], stderr=log)
        standby = host.start("env", "-i", *words, *flow, log=log)
    try:
        job.until(lambda: "standby.waits" in Path(log.name).read_text(), f"a standby on {host.name}")
        yield standby
    finally:
        for one in (standby, tunnel):
            one.kill()
            one.wait()


def said(job: HostJob, words: str) -> int:
    """Return how many remarks with these *words* are on record."""
    return sum(words in one.text for one in queries.job_events(job.history, job.row.id))


def all_steps_recorded(job: HostJob) -> None:
    """Wait until the history has all steps that were made until now."""
    newest = job.step()
    job.until(lambda: {one.step for one in queries.curve(job.history, job.row.id)} >= set(range(1, newest + 1)), "all steps in the history")


@pytest.mark.parametrize("direction", ["both", "in", "out"])
def test_an_orchestrator_that_reaches_no_host_leaves_the_job_alone(rack: Rack, job: HostJob, direction: Direction) -> None:
    """It cannot know whether ranks have stopped, and could not restart them. Training goes on; the history gets all of it later."""
    job.settles()
    before, known, begun = job.chaos.ranks(), len(job.incidents()), job.step()
    with deaf(rack, job, direction):
        job.until(lambda: job.step() >= begun + 2 * UNHEARD, "steps meanwhile")
        job.until(lambda: "it reaches no node of the job" in job.person("status", job.name), "a status that says so")
    all_steps_recorded(job)
    assert {one.kind for one in queries.faults(job.history, job.row.id)} & {"controller-partitioned", "replica-lost"} == {
        "controller-partitioned"
    }
    assert len(job.incidents()) == known, job.log()
    assert job.chaos.ranks() == before


def test_what_a_partitioned_host_logs_is_reported_later_of_it_alone(job: HostJob) -> None:
    """Its kernel's words wait in the agent's journal, with the time at which they were said."""
    job.settles()
    known, host = len(job.incidents()), job.host_of(1)
    host.log("Linux version 6.8.0", level=5)
    job.until(lambda: is_read(host.kernel_log, host.name), "a lookout that follows the kernel's log")
    host.cut("orchestrator")
    begun, at = job.step() + EVERY, time.time()
    try:
        host.log("CPU3: Core temperature above threshold, cpu clock throttled (total events = 1)")
        job.until(lambda: job.step() >= begun + UNHEARD, "steps meanwhile")
        later = time.time()
    finally:
        host.heal()
    job.until(lambda: logged(job), "the line in the history")
    (fault,) = logged(job)
    assert (fault.node, fault.evidence["source"]) == (host.name, f"kernel log on {host.name}")
    assert at <= fault.at <= later
    assert len(job.incidents()) == known, job.log()


def logged(job: HostJob) -> list[FaultRecord]:
    """Return what came of lines about a hot CPU."""
    return [one for one in queries.faults(job.history, job.row.id) if one.kind == "cpu-hot"]


def test_a_flow_that_takes_over_while_it_can_reach_no_host_waits_for_them(rack: Rack, job: HostJob) -> None:
    """It knows from the history alone who trains, and learns the rest once the path is restored."""
    job.settles()
    before, known, begun = job.chaos.ranks(), len(job.incidents()), job.step()
    with deaf(rack, job):
        job.flows[-1].kill()
        job.flows[-1].wait()
        flow = job.start()
        job.until(lambda: job.step() >= begun + 2 * UNHEARD, "steps meanwhile")
    assert flow.poll() is None, job.log()
    all_steps_recorded(job)
    assert len(job.incidents()) == known, job.log()
    assert job.chaos.ranks() == before


def test_a_recovery_that_comes_to_its_deadline_unheard_is_waited_for(rack: Rack, job: HostJob) -> None:
    """The take-over was ordered and may have begun; who reaches nobody does not decide anew."""
    job.settles()
    known, before = len(job.incidents()), job.chaos.ranks()
    (job.place / "hang-1").touch()  # the rank, and then the hot spare that takes its place
    number = job.generation().number + 1
    job.until(lambda: job.state() == "RESUMING" and taken_over(job, number, before), "a replacement of ranks that has been ordered")
    during = job.chaos.ranks()
    deadline = time.time() + PolicyTimeouts().replace_ranks
    with deaf(rack, job):
        (job.place / "hang-1").unlink()
        begun = job.step()
        job.until(lambda: job.step() >= begun + UNHEARD and time.time() > deadline, "steps meanwhile")
        assert job.state() == "RESUMING", job.log()
    job.until(lambda: job.state() == "RUNNING" and all(one.outcome for one in job.incidents()), "the end of the recovery")
    (incident,) = job.incidents()[known:]
    assert (incident.kind, incident.action, incident.outcome) == ("job-hang", "replace-ranks", "recovered"), incident.reason
    assert job.generation().number == number, job.log()
    assert job.chaos.ranks() == during
    assert {rank: during[rank] for rank in (0, 2)} == {rank: before[rank] for rank in (0, 2)}, "survivors stay in their processes"


def test_a_flow_that_takes_over_while_a_host_is_cut_off_waits_for_it(job: HostJob) -> None:
    """The host trains on with the others, so its silence is no fault; once the way is mended its agent is taken up."""
    job.settles()
    before, host, known, taken_up = job.chaos.ranks(), job.host_of(0), len(job.incidents()), len(reattached(job))
    others = sum(one.node != host.name for one in before.values())  # earlier tests may have left the host two
    host.cut("orchestrator")
    try:
        job.flows[-1].kill()
        job.flows[-1].wait()
        flow = job.start()
        job.until(lambda: len(reattached(job)) > taken_up, "a flow that knows of the other ranks")
        assert f"in state RUNNING: {plural(others, 'worker')} of" in reattached(job)[-1], job.log()
        begun = job.step()
        job.until(lambda: job.step() >= begun + 2 * UNHEARD, "steps meanwhile")
        assert flow.poll() is None, job.log()
    finally:
        host.heal()
    job.until(lambda: job.has_event(f"the agent of {host.name} is reachable again"), "the agent of the host")
    all_steps_recorded(job)
    assert len(job.incidents()) == known, job.log()
    assert job.chaos.ranks() == before


def test_a_flow_that_takes_over_after_a_host_was_lost_gives_its_rank_to_another(job: HostJob) -> None:
    """Nobody has ever spoken with that host's agent: that the others have stopped is what shows that it is gone."""
    job.settles()
    host, known = job.host_of(2), len(job.incidents())
    job.flows[-1].kill()
    job.flows[-1].wait()
    host.strand()
    try:
        job.start()
        job.until(lambda: len(job.incidents()) > known and all(one.outcome for one in job.incidents()), "the end of the incident")
        (incident,) = job.incidents()[known:]
        facts = (incident.kind, incident.action, incident.outcome, incident.steps_lost)
        assert facts == ("node-lost", "replace-ranks", "recovered", 0), incident.reason
        job.runs()
    finally:
        host.heal()


@pytest.mark.parametrize(("way", "kind"), [("cut", "job-hang"), ("lost", "node-lost")])
def test_a_recovery_that_a_dead_flow_had_ordered_goes_on_while_a_host_cannot_be_reached(job: HostJob, way: str, kind: str) -> None:
    """The next flow presumes of its rank what the others do; when it turns out to be gone another takes its place, and no rank restarts."""
    job.settles()
    known, before, taken_up = len(job.incidents()), job.chaos.ranks(), len(reattached(job))
    (job.place / "hang-1").touch()  # the rank, and then the hot spare that takes its place: the replacement of ranks comes to no step
    number = job.generation().number + 1
    job.until(lambda: job.state() == "RESUMING" and taken_over(job, number, before), "a replacement of ranks that has been ordered")
    job.flows[-1].kill()
    job.flows[-1].wait()
    assert job.state() == "RESUMING"
    during = job.chaos.ranks()
    assert (during[0], during[2]) == (before[0], before[2])
    assert during[1] != before[1]
    host = job.host_of(2)
    stay = {rank for rank, one in during.items() if one.node != host.name}  # earlier tests may have left it two
    if way == "cut":
        host.cut("orchestrator")
    else:
        host.strand()
    try:
        (job.place / "hang-1").unlink()
        job.start()
        job.until(lambda: len(reattached(job)) > taken_up, "a flow that knows of the other ranks")
        assert f"in state RESUMING: {plural(len(stay), 'worker')} of" in reattached(job)[-1], job.log()
        job.until(lambda: job.state() == "RUNNING" and all(one.outcome for one in job.incidents()), "the end of the recovery")
        job.runs()
        seen = job.chaos.ranks()  # as far as their hosts can be asked
    finally:
        host.heal()
    (incident,) = job.incidents()[known:]
    assert (incident.kind, incident.action, incident.outcome) == (kind, "replace-ranks", "recovered"), incident.reason
    assert {rank: seen[rank] for rank in stay} == {rank: during[rank] for rank in stay}, "survivors stay in their processes"
    if way == "cut":
        assert job.generation().number == number, job.log()
        job.until(lambda: job.has_event(f"the agent of {host.name} is reachable again"), "the agent of the host")
        assert job.chaos.ranks() == during
    else:
        assert job.generation().number == number + 1, job.log()
        assert seen.keys() == during.keys()
        assert host.name not in {one.node for one in seen.values()}


def reattached(job: HostJob) -> list[str]:
    """Return what flows said that reattached to the job."""
    return [one.text for one in queries.job_events(job.history, job.row.id) if "reattached to the job" in one.text]


def taken_over(job: HostJob, number: int, before: Mapping[int, Placed]) -> bool:
    """Return whether all agents know of that generation, and another process has the place of rank 1."""
    known = {job.chaos.ask(node)["generation"] for node in job.generation().ranks}
    return known == {number} and job.chaos.ranks().get(1, before[1]) != before[1]


@pytest.mark.parametrize(("share", "whom"), [(0.2, "orchestrator"), (0.01, "peers")])
def test_loss_and_delay_are_no_fault(job: HostJob, share: float, whom: Whom) -> None:
    """Some of what goes between a host and the others is lost, and all that it sends is held back for a while."""
    job.settles()
    before, host, known = job.chaos.ranks(), job.host_of(1), len(job.incidents())
    host.lose(share, whom)
    host.delay(0.01, jitter=0.005)
    begun = job.step()
    try:
        job.until(lambda: job.step() >= begun + UNHEARD and host.lost() > 0, "steps, and losses, meanwhile")
    finally:
        host.heal()
    assert len(job.incidents()) == known, job.log()
    assert job.chaos.ranks() == before


def test_a_host_that_is_given_up_and_comes_back_has_no_say_any_more(job: HostJob) -> None:
    """Another takes its rank, and no step is lost; what runs there still is ended as soon as somebody reaches it."""
    job.settles()
    before, host = job.chaos.ranks(), job.host_of(0)
    old = host.pid_here(before[0].pid)
    known, number = len(job.incidents()), job.generation().number
    host.strand()
    job.until(lambda: len(job.incidents()) > known and all(one.outcome for one in job.incidents()), "the end of the incident")
    incident = job.incidents()[known]
    assert (incident.kind, incident.outcome, incident.steps_lost) == ("node-lost", "recovered", 0), incident.reason
    job.runs()
    after = job.chaos.ranks()
    assert after[0].node != host.name
    assert {rank: after[rank] for rank in (1, 2)} == {rank: before[rank] for rank in (1, 2)}, "survivors stay in their processes"
    assert old in host.processes(), "nobody could reach it: whatever ran there does so still"
    written = [one for one in job.done()[0] if one.pid == before[0].pid]
    host.heal()
    job.until(lambda: old not in host.processes(), f"the end of process {old} on {host.name}")
    job.runs()
    assert [one for one in job.done()[0] if one.pid == before[0].pid] == written or after[0].pid == before[0].pid
    assert job.generation().number == number + 1
    assert len(job.incidents()) == known + 1, job.log()


def test_a_network_that_heals_while_a_recovery_is_under_way_leaves_one_job(job: HostJob) -> None:
    """Whichever way it was decided: every rank is there once, and all go on together."""
    job.settles()
    host, known = job.host_of(2), len(job.incidents())
    host.strand()
    try:
        job.until(lambda: job.state() != "RUNNING", "a recovery")
    finally:
        host.heal()
    job.until(lambda: job.state() == "RUNNING" and all(one.outcome for one in job.incidents()), "the end of the recovery")
    job.settles()
    assert all(one.outcome in {"recovered", "passed"} for one in job.incidents()[known:]), job.log()
    placed = job.chaos.ranks()
    assert placed.keys() == {0, 1, 2}
    lively = {rank: job.done()[rank][-1] for rank in placed}
    assert {rank: one.pid for rank, one in lively.items()} == {rank: one.pid for rank, one in placed.items()}


@pytest.mark.parametrize("direction", ["both", "in", "out"])
def test_a_host_that_only_its_peers_miss_is_named_by_them_and_gives_way(job: HostJob, direction: Direction) -> None:
    """Its agent speaks all the time and its process lives; the others find by connections of their own who is cut off. No step is lost."""
    job.settles()
    before, host, known = job.chaos.ranks(), job.host_of(1), len(job.incidents())
    there = {rank for rank, one in before.items() if one.node == host.name}  # earlier tests may have left it two
    old = [host.pid_here(before[rank].pid) for rank in there]
    taken_in = said(job, f"{host.name} added as spare")
    host.cut("peers", direction)
    try:
        job.until(lambda: len(job.incidents()) > known and all(one.outcome for one in job.incidents()), "the end of the incident")
        assert host.lost() > 0, "the cut took nothing"
        (incident,) = job.incidents()[known:]
        facts = (incident.kind, incident.target, incident.action, incident.outcome, incident.steps_lost)
        assert facts == ("node-partitioned", f"node {host.name}", "replace-ranks", "recovered", 0), f"{incident.reason}\n{job.log()}"
        job.runs()
        after = job.chaos.ranks()
        assert host.name not in {one.node for one in after.values()}
        stay = before.keys() - there
        assert {rank: after[rank] for rank in stay} == {rank: before[rank] for rank in stay}, "survivors stay in their processes"
        job.until(lambda: not host.processes().keys() & set(old), f"the end of {old} on {host.name}, which can be asked for")
    finally:
        host.heal()
    job.person("node", "return", host.name, "--reason", "its cable was plugged in again", "--cluster", "cluster.yaml")
    job.until(lambda: said(job, f"{host.name} added as spare") > taken_in, "a spare node again")


@pytest.mark.parametrize("direction", ["in", "out"])
def test_a_host_that_is_cut_off_from_all_in_one_direction_gives_way(job: HostJob, direction: Direction) -> None:
    """It receives nothing and is received, or the other way round: no connection lives long either way. Another takes its rank."""
    job.settles()
    before, host, known = job.chaos.ranks(), job.host_of(1), len(job.incidents())
    there = {rank for rank, one in before.items() if one.node == host.name}  # earlier tests may have left it two
    taken_in = said(job, f"{host.name} added as spare")
    host.cut("all", direction)
    try:
        job.until(lambda: len(job.incidents()) > known and all(one.outcome for one in job.incidents()), "the end of the incident")
        assert host.lost() > 0, "the cut took nothing"
        (incident,) = job.incidents()[known:]
        assert (incident.action, incident.outcome, incident.steps_lost) == ("replace-ranks", "recovered", 0), (
            f"{incident.reason}\n{job.log()}"
        )
        assert incident.target == f"node {host.name}", incident.reason
        job.runs()
        after = {rank: one for rank, one in job.chaos.ranks().items() if one.node != host.name}
        assert after.keys() == before.keys()
        stay = before.keys() - there
        assert {rank: after[rank] for rank in stay} == {rank: before[rank] for rank in stay}, "survivors stay in their processes"
    finally:
        host.heal()
    job.until(lambda: said(job, f"{host.name} added as spare") > taken_in, "a spare node again")


def test_two_hosts_that_do_not_reach_each_other_train_no_longer_together(job: HostJob) -> None:
    """All others reach both, so nobody knows whose fault it is. One gives its place to the spare host, with no grave word against it."""
    job.settles()
    before, one, other, known = job.chaos.ranks(), job.host_of(0), job.host_of(1), len(job.incidents())
    one.cut([other])
    try:
        job.until(lambda: len(job.incidents()) > known and all(one.outcome for one in job.incidents()), "the end of the incident")
        assert one.lost() > 0, "the cut took nothing"
        (incident,) = job.incidents()[known:]
        facts = (incident.kind, incident.action, incident.outcome, incident.steps_lost)
        assert facts == ("pairwise-partition", "replace-ranks", "recovered", 0), f"{incident.reason}\n{job.log()}"
        job.runs()
        after = job.chaos.ranks()
        assert not {one.name, other.name} <= {placed.node for placed in after.values()}
        gone = {host.name for host in (one, other)} - {placed.node for placed in after.values()}
        stay = {rank for rank, placed in before.items() if placed.node not in gone}
        assert {rank: after[rank] for rank in stay} == {rank: before[rank] for rank in stay}, "survivors stay in their processes"
    finally:
        one.heal()


@pytest.fixture
def begun(rack: Rack, job: HostJob, prefect_server: PrefectServer, tmp_path: Path) -> Begin:
    """Give what begins another job, once that on all hosts has given them back; it has no spare host unless that is asked for."""
    if job.flows[-1].poll() is None:
        request_stop(job.history, job.row)
        job.flows[-1].wait(120)

    def begin(name: str, checkpoint: dict[str, Any], nodes: dict[str, int], **given: Any) -> AbstractContextManager[HostJob]:
        nodes = {"spare_nodes": 0, "hot_spares": 0, **nodes}
        return started(rack, tmp_path / name, prefect_server.environment, checkpoint, name=name, **nodes, **given)

    return begin


def test_a_slow_link_to_all_hosts_holds_up_no_step(rack: Rack, begun: Begin) -> None:
    """What agents send waits for its turn, and all of it comes in at last; nobody takes that for a fault, nor that it comes late."""
    with begun("slow-link", {"interval": EVERY}, {"nnodes": 3, "nproc_per_node": 1, "spare_nodes": 1, "hot_spares": 1}) as slow:
        for rate, more in (("64kbit", UNHEARD), ("8kbit", 4 * UNHEARD)):
            slow.settles()
            before, begun_at = slow.chaos.ranks(), slow.step()
            rack.limit(rate)
            try:
                slow.until(lambda until=begun_at + more: slow.step() >= until, "steps meanwhile")  # type: ignore[misc]
                assert rack.held_back() > 0, "the link held nothing back"
            finally:
                rack.limit(None)
            all_steps_recorded(slow)
            assert not slow.incidents(), slow.log()
            assert slow.chaos.ranks() == before
            assert not said(slow, f"spare {slow.spare().name} is lost"), "what is spare stays so"


def test_ranks_that_were_given_up_and_need_nobody_else_train_on_and_save_nothing(begun: Begin) -> None:
    """All ranks are on the host that was cut off, and their agent gives them leave: it is the storage that says that their time is over."""
    saves = {"interval": 5, "memory": {"interval": 0}}  # by the ranks themselves
    with begun("lone", saves, {"nnodes": 1, "nproc_per_node": 2, "spare_nodes": 1, "hot_spares": 1}) as lone:
        lone.settles()
        host, old = lone.host_of(0), lone.chaos.ranks()[0].pid
        lone.until(lambda: steps(lone), "a checkpoint")
        host.strand()
        try:
            lone.until(lambda: [one.outcome for one in lone.incidents()] == ["recovered"], "the end of the incident")
            known = max(steps(lone))

            def goes_on() -> int:
                return max(one.step for one in lone.done()[0] if one.pid == old)

            until = goes_on() + 10
            lone.until(lambda: goes_on() >= until, "further steps of who was given up")
            lone.until(lambda: max(steps(lone)) > known + 10, "further checkpoints")
        finally:
            host.heal()
        output = (host.home / "hf/jobs/lone/logs/rank-0.log").read_text()
        assert one_line_mentions(output, "generation 1", "generation 2")
        assert {lone.generation().number, *(number for step, number in steps(lone).items() if step > known)} == {2}


def test_the_only_host_of_a_job_is_replaced_where_others_of_the_cluster_answer(begun: Begin) -> None:
    """No agent is left to be reached, but nodes that have nothing to do with the job show that the path to it is not cut."""
    with begun("sole", {"interval": 5}, {"nnodes": 1, "nproc_per_node": 2}) as sole:
        sole.settles()
        host = sole.host_of(0)
        host.strand()
        try:
            sole.until(lambda: [one.outcome for one in sole.incidents()] == ["recovered"], "the end of the incident")
            sole.runs()
        finally:
            host.heal()
        (incident,) = sole.incidents()
        assert (incident.kind, incident.target) == ("node-lost", f"node {host.name}"), incident.reason
        assert sole.host_of(0) is not host


def test_a_collective_that_is_held_up_for_a_while_goes_on_by_itself(begun: Begin) -> None:
    """All ranks have come to it, and both hosts answer: what is between them is given as long again as a hang takes at least."""
    with begun("held", {"interval": 0}, {"nnodes": 2, "nproc_per_node": 1}, timeouts={"hang_min": "8s"}) as held:
        held.settles()
        before, one, other = held.chaos.ranks(), held.host_of(0), held.host_of(1)
        one.cut([other])
        try:
            held.until(lambda: held.state() == "DIAGNOSING", "a standstill that was seen")
            assert one.lost() > 0, "the cut took nothing"
        finally:
            one.heal()
        held.until(lambda: held.state() == "RUNNING", "the end of it")
        held.runs()
        assert not held.incidents(), held.log()
        assert held.chaos.ranks() == before


def test_a_job_that_needs_two_hosts_which_do_not_reach_each_other_waits_until_they_do(begun: Begin) -> None:
    """Nothing can be had in the place of either: each start would come to nothing, and use up what the job may try."""
    with begun("hosts-apart", {"interval": 5}, {"nnodes": 4, "nproc_per_node": 1}) as apart:
        apart.settles()
        one, other = apart.host_of(1), apart.host_of(2)
        one.cut([other])
        try:
            apart.until(lambda: apart.state() == "WAITING", "a job that waits")
            assert one.lost() > 0, "the cut took nothing"
            apart.until(lambda: all(view.status == "up" for view in apart.nodes.survey()), "all hosts with an agent again")
            lost = one.lost()
            apart.until(lambda: one.lost() > lost, "a further try of the hosts to reach each other")
            assert apart.state() == "WAITING", apart.log()
        finally:
            one.heal()
        apart.until(lambda: [one.outcome for one in apart.incidents()] == ["recovered"], "the end of the incident")
        apart.runs()
        (incident,) = apart.incidents()
        assert (incident.kind, incident.action) == ("pairwise-partition", "wait-for-capacity"), incident.reason
        assert set(apart.generation().ranks) == {host.name for host in apart.rack}


def test_an_unreachable_job_counts_as_stopped_once_the_lease_of_its_agents_ends(rack: Rack, begun: Begin) -> None:
    """By then they have ended their ranks; the job goes on from its checkpoint as soon as a host can be reached."""
    with begun("brief", {"interval": 5}, {"nnodes": 1, "nproc_per_node": 2}, timeouts={"lease": "8s"}) as brief:
        brief.settles()
        host = brief.host_of(0)
        there = {host.pid_here(one.pid) for one in brief.chaos.ranks().values()}
        brief.until(lambda: steps(brief), "a checkpoint")
        with deaf(rack, brief):
            brief.until(lambda: brief.state() == "WAITING", "a flow that knows of the end of the lease")
            assert there.isdisjoint(host.processes())
        brief.until(lambda: [one.outcome for one in brief.incidents()] == ["recovered"], "the end of the incident")
        brief.runs()
        (incident,) = brief.incidents()
        assert (incident.kind, incident.action) == ("node-lost", "wait-for-capacity"), incident.reason


def steps(job: HostJob) -> dict[int, int]:
    """Return the generation of each checkpoint that lies in place, by its step."""
    found = {}
    for path in (job.place / "checkpoints").glob("step-*/manifest.json"):
        facts = json.loads(path.read_text())
        found[int(facts["step"])] = int(facts["generation"])
    return found
