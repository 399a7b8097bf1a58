"""Written scenarios of mixed evidence (scenarios.toml): each with the diagnosis that a person who knows the trade would come to."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from holdfast.detectors.catalogue import Fault
from holdfast.detectors.diagnosis import Diagnosis, PastFailure, diagnose, see
from holdfast.detectors.evidence import CheckpointFailure, HangLimits, LogLine, Progress, StartFailure
from holdfast.detectors.log_lines.outputs import said
from holdfast.detectors.nodes.gpu_readings import Xid, XidEvent
from holdfast.policies.recovery.escalation import Case
from tests.detectors.evidence_of import a_rank, a_silence, an_end, an_error
from tests.each import each

SCENARIOS: Final[dict[str, dict[str, Any]]] = tomllib.loads(Path(__file__).with_name("scenarios.toml").read_text())
scenarios = each("name", SCENARIOS)


def raised(lost: bool = False, **facts: Any) -> object:  # noqa: FBT001, FBT002 (a field of the file)
    """Return the end of a worker by an exception."""
    facts = {"type": "RuntimeError", "message": "Connection closed by peer"} | facts if lost else facts
    return an_error(peer_lost=lost, **facts)


def hang(at: float, age: float, ranks: list[str], behind: int) -> Progress:
    """Return that no rank has got on for *age* seconds, and that *behind* is a step behind the others."""
    states = {rank: a_rank(node, step=40 - (rank == behind), age=age) for rank, node in enumerate(ranks)}
    return Progress(at=at, ranks=states, step_seconds=(0.3,) * 8)


MAKE: Final[dict[str, Callable[..., Any]]] = {
    "killed": an_end,
    "raised": raised,
    "line": LogLine,
    "xid": lambda node, at, **xid: XidEvent(node=node, at=at, xid=Xid(**xid)),
    "silent": lambda node, at, answers: a_silence(node, at, node_answers=answers),
    "hang": hang,
    "start": lambda node, at, errno: StartFailure(node=node, at=at, why="[Errno 2] No such file or directory: 'trian'", errno=errno),
    "checkpoint": lambda **facts: CheckpointFailure(path="/ckpt/step-00000200", **facts),
    "fault": lambda kind, **facts: Fault(kind=kind, signature=kind, **facts),
}
"""What each word of the file stands for."""


def faults_of(name: str) -> list[Fault]:
    """Return the faults of a scenario, as the flow sees them: those of its evidence, and what its workers said."""
    rows = [dict(row) for row in SCENARIOS[name]["evidence"]]
    made = [MAKE[row.pop("what")](**row) for row in rows]
    evidence = [one for one in made if not isinstance(one, Fault)]
    faults = [one for one in made if isinstance(one, Fault)]
    return [*see(evidence, HangLimits()), *faults, *said(evidence)]


def assess_health(name: str, faults: list[Fault]) -> Diagnosis:
    """Return the diagnosis on a scenario."""
    past = tuple(PastFailure(signature=one["kind"], **one) for one in SCENARIOS[name].get("past", ()))
    members = SCENARIOS[name]["members"]
    ranks = {f"rank {one['rank']}": one["node"] for one in SCENARIOS[name]["evidence"] if "rank" in one and "node" in one}
    places = {f"n{number}": f"n{number}" for number in range(members)} | ranks
    return diagnose(faults, past, members, places)


@scenarios
def test_the_root_is_the_one_that_a_person_would_name(name: str) -> None:
    """By its kind, or by its family where several kinds say the same; and on its node."""
    scene, root = SCENARIOS[name], assess_health(name, faults_of(name)).root
    assert root.kind in scene.get("root_in", [scene.get("root", root.kind)])
    assert root.entry.component == scene.get("root_component", root.entry.component)
    assert {"root", "root_in", "root_component"} & scene.keys(), "the scenario expects nothing"
    assert (root.node or "") == scene["on"]
    assert root.entry.recommended_action == scene.get("recommended_action", root.entry.recommended_action)
    assert root.entry.attributed_to == scene.get("attributed_to", root.entry.attributed_to)


@scenarios
def test_secondary_faults_are_distinguished_from_independent_ones(name: str) -> None:
    """The secondary failures are explained by the root; a second cause, and noise, are not."""
    scene, first = SCENARIOS[name], assess_health(name, faults_of(name)).candidates[0]
    follow = {fault.kind for fault in (*first.explains, *first.evidence)}
    assert set(scene["secondary_failures"]) <= follow
    assert set(scene.get("unrelated", ())) <= {fault.kind for fault in first.unexplained}


@scenarios
def test_competing_explanations_are_kept_with_their_weight(name: str) -> None:
    """Behind the root, lighter than it; all weights are shares of one."""
    scene, diagnosis = SCENARIOS[name], assess_health(name, faults_of(name))
    first, *others = diagnosis.candidates
    assert first.fault == diagnosis.root
    assert set(scene["competing"]) <= {one.fault.kind for one in others}
    assert all(0.0 <= one.confidence <= first.confidence for one in others)
    assert first.confidence + sum(one.confidence for one in others) <= 1.001


@scenarios
def test_a_diagnosis_lists_its_evidence_with_time_and_source(name: str) -> None:
    """Each explanation says by what it was seen, when and by whom; no fault of the incident is left out by the root's."""
    faults = faults_of(name)
    diagnosis = assess_health(name, faults)
    for one in diagnosis.candidates:
        assert one.evidence
        assert all(fault.source and fault.quote for fault in one.evidence)
        assert [fault.at for fault in one.evidence] == sorted(fault.at for fault in one.evidence)
    first = diagnosis.candidates[0]
    accounted = {id(fault) for fault in (*first.evidence, *first.explains, *first.unexplained)}
    assert {id(fault) for fault in faults} <= accounted


@scenarios
def test_the_node_that_is_sick_is_the_one_that_leaves(name: str) -> None:
    """Whoever's process died first; and no node leaves for what another one did to it, or what all share."""
    members = tuple(f"n{number}" for number in range(SCENARIOS[name]["members"]))
    case = Case(now=0.0, diagnosis=assess_health(name, faults_of(name)), members=members, least=len(members))
    assert list(case.unfit) == SCENARIOS[name]["leave"]


@scenarios
def test_the_order_in_which_evidence_comes_in_changes_no_diagnosis(name: str) -> None:
    """Agents speak over connections of their own."""
    faults, dice = faults_of(name), random.Random(7)
    diagnosis = assess_health(name, faults)
    for _ in range(8):
        dice.shuffle(faults)
        again = assess_health(name, faults)
        assert (again.root.kind, again.root.target, again.root.at) == (diagnosis.root.kind, diagnosis.root.target, diagnosis.root.at)
        assert [one.confidence for one in again.candidates] == [one.confidence for one in diagnosis.candidates]


def test_there_are_enough_scenarios() -> None:
    """Of all that a cluster does to a job."""
    assert len(SCENARIOS) >= 25
