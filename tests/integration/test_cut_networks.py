"""Hosts whose network breaks under a running job: cut off from the orchestrator, from everybody, in one direction, and healing in between.

One job on four real hosts, with a spare one, goes through all of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.watching import request_stop
from holdfast.history import queries
from tests.hosts.fixture import rack_of
from tests.hosts.host import Direction
from tests.hosts.job import HostJob, set_up
from tests.hosts.rack import Rack
from tests.integration.conftest import PrefectServer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

UNHEARD = 60
"""Steps of 50 ms and more that go by meanwhile: longer than it takes an agent's silence as a sign, `limits.agent_silence`."""
EVERY = 20
"""Steps between two checkpoints; the agent of rank 0 tells of them."""


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    """Give four hosts with Holdfast."""
    with rack_of(4, tmp_path_factory) as rack:
        set_up(rack)
        yield rack


@contextmanager
def started(rack: Rack, place: Path, environment: Mapping[str, str], checkpoint: dict[str, Any], **given: Any) -> Iterator[HostJob]:
    """Give a job that trains, with a checkpoint now and then."""
    job = HostJob(rack, place, environment, checkpoint={"directory": str(place / "checkpoints"), **checkpoint}, **given)
    try:
        job.start()
        job.until(lambda: job.step() >= 1, "the first step", 300)
        yield job
    finally:
        job.close()


@pytest.fixture(scope="module")
def job(rack: Rack, prefect_server: PrefectServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostJob]:
    """Give a job on all four hosts."""
    with started(rack, tmp_path_factory.mktemp("j") / "job", prefect_server.environment, {"every": EVERY}) as job:
        yield job


def told_after(job: HostJob, step: int) -> list[int]:
    """Return the checkpoints after *step* that the history knows of: those that were written, as any rank may tell of a trouble."""
    return [
        one.step for one in queries.checkpoints(job.history, job.row.id) if one.step is not None and one.step > step and not one.trouble
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
            assert not told_after(job, begun), "the flow heard of it all the same"
    finally:
        host.heal()
    job.until(lambda: told_after(job, begun), f"the checkpoints after step {begun} in the history")
    assert job.incidents() == [], job.log()
    assert job.generation().number == number
    assert job.chaos.ranks() == before


def test_a_flow_that_takes_over_while_a_host_is_cut_off_waits_for_it(job: HostJob) -> None:
    """The host trains on with the others, so its silence is no fault; once the way is mended its agent is taken up."""
    job.settles()
    before, host, known = job.chaos.ranks(), job.host_of(0), len(job.incidents())
    host.cut("orchestrator")
    try:
        job.flows[-1].kill()
        job.flows[-1].wait()
        flow = job.start()
        job.until(lambda: job.told("adopted the job in state RUNNING: 2 worker(s)"), "a flow that knows of the other two ranks")
        begun = job.step()
        job.until(lambda: job.step() >= begun + 2 * UNHEARD, "steps meanwhile")
        assert flow.poll() is None, job.log()
    finally:
        host.heal()
    job.until(lambda: job.told(f"the agent of {host.name} could be reached again"), "the agent of the host")
    newest = job.step()
    job.until(lambda: {one.step for one in queries.curve(job.history, job.row.id)} >= set(range(1, newest + 1)), "all steps in the history")
    assert len(job.incidents()) == known, job.log()
    assert job.chaos.ranks() == before


def test_a_flow_that_takes_over_after_a_host_was_lost_gives_its_rank_to_another(job: HostJob) -> None:
    """Nobody has ever spoken with that host's agent: that the others stand still is what tells that it is gone."""
    job.settles()
    host, known = job.host_of(2), len(job.incidents())
    job.flows[-1].kill()
    job.flows[-1].wait()
    host.strand()
    try:
        job.start()
        job.until(lambda: len(job.incidents()) > known and all(one.outcome for one in job.incidents()), "the end of the incident")
        (incident,) = job.incidents()[known:]
        told = (incident.kind, incident.rung, incident.outcome, incident.steps_lost)
        assert told == ("node-lost", "take-over", "recovered", 0), incident.because
        job.runs()
    finally:
        host.heal()


def test_loss_and_delay_are_no_fault(job: HostJob) -> None:
    """A fifth of what goes between a host and the orchestrator is lost, and all that it sends is held back for a while."""
    job.settles()
    before, host, known = job.chaos.ranks(), job.host_of(1), len(job.incidents())
    host.lose(0.2, "orchestrator")
    host.delay(0.01, jitter=0.005)
    begun = job.step()
    try:
        job.until(lambda: job.step() >= begun + UNHEARD, "steps meanwhile")
        assert host.lost() > 0, "nothing was lost"
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
    assert (incident.kind, incident.outcome, incident.steps_lost) == ("node-lost", "recovered", 0), incident.because
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


@pytest.mark.parametrize("direction", ["both", "in"])
def test_a_host_that_only_its_peers_miss_is_named_by_them_and_gives_way(job: HostJob, direction: Direction) -> None:
    """Its agent speaks all the time and its process lives; the others find by connections of their own who is cut off. No step is lost."""
    job.settles()
    before, host, known = job.chaos.ranks(), job.host_of(1), len(job.incidents())
    there = {rank for rank, one in before.items() if one.node == host.name}  # earlier tests may have left it two
    old = [host.pid_here(before[rank].pid) for rank in there]
    host.cut("peers", direction)
    try:
        job.until(lambda: len(job.incidents()) > known and all(one.outcome for one in job.incidents()), "the end of the incident")
        assert host.lost() > 0, "the cut took nothing"
        (incident,) = job.incidents()[known:]
        told = (incident.kind, incident.subject, incident.rung, incident.outcome, incident.steps_lost)
        assert told == ("node-severed", f"node {host.name}", "take-over", "recovered", 0), f"{incident.because}\n{job.log()}"
        job.runs()
        after = job.chaos.ranks()
        assert host.name not in {one.node for one in after.values()}
        stay = before.keys() - there
        assert {rank: after[rank] for rank in stay} == {rank: before[rank] for rank in stay}, "survivors stay in their processes"
        job.until(lambda: not host.processes().keys() & set(old), f"the end of {old} on {host.name}, which can be asked for")
    finally:
        host.heal()
    job.person("nodes", "readmit", host.name, "--because", "its cable was plugged in again", "--cluster", "cluster.yaml")
    job.until(lambda: job.told(f"{host.name} taken in to be spare"), "a spare node again")


def test_ranks_that_were_given_up_and_need_nobody_else_train_on_and_save_nothing(
    rack: Rack, job: HostJob, prefect_server: PrefectServer, tmp_path: Path
) -> None:
    """All ranks are on the host that was cut off, and their agent gives them leave: it is the storage that says that their time is over."""
    request_stop(job.history, job.row)
    job.flows[-1].wait(120)
    nodes = {"wanted": 1, "ranks": 2, "spare": 1, "standbys": 1}
    saves = {"every": 5, "memory": {"every": 0}}  # by the ranks themselves
    with started(rack, tmp_path / "lone", prefect_server.environment, saves, name="lone", nodes=nodes) as lone:
        lone.settles()
        host, old = lone.host_of(0), lone.chaos.ranks()[0].pid
        lone.until(lambda: steps(lone), "a checkpoint")
        host.strand()
        try:
            lone.until(lambda: [one.outcome for one in lone.incidents()] == ["recovered"], "the end of the incident")
            begun = max(steps(lone))

            def goes_on() -> int:
                return max(one.step for one in lone.done()[0] if one.pid == old)

            until = goes_on() + 20
            lone.until(lambda: goes_on() >= until, "further steps of who was given up")
            lone.until(lambda: max(steps(lone)) > begun + 20, "further checkpoints")
        finally:
            host.heal()
        told = (host.home / "hf/jobs/lone/logs/rank-0.log").read_text()
        assert "generation 1 is over: generation 2 has begun" in told
        assert {lone.generation().number, *(number for step, number in steps(lone).items() if step > begun)} == {2}


def steps(job: HostJob) -> dict[int, int]:
    """Return the generation of each checkpoint that lies in place, by its step."""
    found = {}
    for path in (job.place / "checkpoints").glob("step-*/manifest.json"):
        facts = json.loads(path.read_text())
        found[int(facts["step"])] = int(facts["generation"])
    return found
