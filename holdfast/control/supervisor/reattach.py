"""Adopt a job that runs without a flow: from the history, and from the journals of its agents."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from detectors.catalogue import CATALOGUE, Fault
from detectors.codec import unpacked
from detectors.diagnosis import PastFailure
from detectors.evidence import InterruptedRecovery
from holdfast.control.backup.outbox import OutboxCollector
from holdfast.control.config.worker_env import keep_token
from holdfast.control.state.incidents import IncidentInWork, RecoveryAttempt
from holdfast.control.state.rank_table import RankTable
from holdfast.control.supervisor.controller import PROGRESSED, JobController
from holdfast.errors import CommandRejected, NodeLost, ProtocolMismatch, VersionMismatch, WorldError
from holdfast.history import models, queries
from holdfast.log import note
from holdfast.paths import outbox_file
from holdfast.protocol import Message
from holdfast.report.wording import plural
from policies.case import IN_PROCESS, Decision, RecoveryAction
from policies.states import Event, State

log = logging.getLogger("holdfast.control")

LOOK: Final = 3.0
"""Seconds that a node may take to say whether it is a spare one of the job: what runs there is found later too, when spares are missing."""


def reattach(run: JobController) -> None:
    """Take up *run* where the flow before left it; faults that happened in between are in the agents' journals."""
    last = queries.state_of(run.history, run.job.id)
    if last is not None and last.after == State.SUSPENDED:
        _take_up_suspended(run, last)
        return
    told, away = _reach_all(run)
    run.machine.state = State(last.after) if last is not None else State.LAUNCHING
    _remember(run)
    row = queries.newest_generation(run.history, run.job.id)
    generation = row.number if row else 0
    membership = {node: list(ranks) for node, ranks in row.ranks.items()} if row else {}
    _take_token(run, told)
    newest: Message = max(told.values(), key=lambda one: one["generation"], default={"generation": 0, "membership": {}})
    if newest["generation"] > generation:  # the flow died between its order and its note of it
        generation, membership = newest["generation"], _membership(told.values(), newest["generation"], membership)
    _continue(run, generation, membership, row)
    _take_standbys(run, told)
    run.checkpoints.replicas.reattach(told)
    for node, ranks in membership.items():
        if node in away:
            run.agents.wait_for(node)
            run.generations.state.unseen.update(ranks)
        elif node not in told:
            run.agents.without_agent[node] = "no agent was there to adopt"
    _let_go_of_strays(run, told, membership, generation)
    run.pump(0.0)
    run.generations.managed = run.generations.managed or run.generations.state.managed()
    alive = sum(len(one["workers"]) for one in told.values() if one["generation"] == generation)
    run.log.record_event(
        f"a new flow adopted the job in state {run.state}: {alive} worker(s) of generation {generation} live on {len(told)} node(s)"
    )
    _reenter(run)


def _take_up_suspended(run: JobController, last: models.JobTransition) -> None:
    """Take up a job that holds no nodes: it knows its past, and begins its next generation as if it had just been launched."""
    run.machine.state, run.machine.reason = State.SUSPENDED, last.reason
    _remember(run)
    row = queries.newest_generation(run.history, run.job.id)
    run.generations.newest = row.number if row is not None else 0


def _membership(told: Iterable[Message], generation: int, before: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return who holds which ranks in *generation*, as agents remember it: some all of it, the others what is their own.

    Ranks of which none remembers anything stay where they were *before*: their nodes are gone.
    """
    known: dict[str, list[int]] = {}
    for one in sorted((one["membership"] for one in told if one["generation"] == generation), key=len, reverse=True):
        known |= {node: ranks for node, ranks in one.items() if ranks and node not in known}
    seen = {rank for ranks in known.values() for rank in ranks}
    for node, ranks in before.items():
        if node not in known and (left := [rank for rank in ranks if rank not in seen]):
            known[node] = left
    return known


def _take_standbys(run: JobController, told: dict[str, Message]) -> None:
    """Learn from the agents which groups can be mended, which standbys wait, and what the job's roles are."""
    newest = next((row.facts for row in reversed(queries.generations(run.history, run.job.id)) if row.facts and row.facts.get("roles")), {})
    roles = next((one["roles"] for one in told.values() if one.get("roles")), newest) or {}
    run.generations.roles, run.generations.recordings = (
        tuple(tuple(ranks) for ranks in roles.get("roles") or ()),
        str(roles.get("recordings") or ""),
    )
    run.generations.copies = tuple(tuple(ranks) for ranks in roles.get("copies") or ())
    for node, one in told.items():
        run.take_in(node, one)


def _ours(run: JobController) -> list[str]:
    return [view.name for view in run.agents.source.survey(LOOK) if view.job == run.job.id]


def _reach_all(run: JobController) -> tuple[dict[str, Message], set[str]]:
    """Attach to the agents of the job, which take no orders of the flow before from then on, and take in what that has left with them."""
    told, away = _reach(run, sorted(_members(run)))
    others, _ = _reach(run, sorted({*_ours(run)} - told.keys() - away))
    told |= others
    collector = OutboxCollector(
        fleet=run.agents,
        history=run.history,
        lease=run.lease.lease,
        outbox_path=outbox_file(run.job.name),
        record_event=run.log.record_event,
    )
    collected = collector.collect(told)
    run.lease.settle(0)
    if collected:
        more, silent = _reach(run, sorted(_members(run) - told.keys() - away))
        told, away = {**told, **more}, away | silent
    return told, away


def _members(run: JobController) -> set[str]:
    row = queries.newest_generation(run.history, run.job.id)
    return {*row.ranks} if row else set()


def _take_token(run: JobController, told: dict[str, Message]) -> None:
    """Have the job's secret from the agents of its members: it may have been made on another host."""
    members = _members(run) or {*told}  # the flow before may have died before it could say who they are
    answers = run.agents.send_command(sorted(members & told.keys()), "token")
    given = [str(one["token"]) for one in answers.values() if not isinstance(one, WorldError) and one["token"]]
    known = token_of_members(run.token, given)
    if given and given.count(known) < len(given):
        run.log.record_event(
            f"{plural(len(given) - given.count(known), 'agent')} of {len(given)} told another secret of the job than the one that is used"
        )
    if known != run.token:
        run.agents.plan["environment"]["HOLDFAST_TOKEN"] = keep_token(run.job, known)


def token_of_members(kept: str, given: Sequence[str]) -> str:
    """Return the job's secret: the one *kept* here as long as any member knows it, else the one *given* by more than half of them.

    A single node in the wrong hands must not choose the secret by which all others know each other.
    """
    if kept in given or not given:
        return kept
    most, times = Counter(given).most_common(1)[0]
    return most if 2 * times > len(given) else kept


def _reach(run: JobController, nodes: list[str]) -> tuple[dict[str, Message], set[str]]:
    """Attach to the agents of *nodes*; return what they say of themselves, and the nodes that did not answer."""
    answers = run.agents.reattach_all(nodes)
    refuse_another_version(run.job.name, answers)
    for node, answer in answers.items():
        if isinstance(answer, WorldError):
            note(log, "agent.not-adopted", node=node, why=answer)
    told = {node: answer for node, answer in answers.items() if not isinstance(answer, WorldError)}
    return told, {node for node, answer in answers.items() if isinstance(answer, NodeLost)} if run.agents.source.remote else set()


def refuse_another_version(job: str, answers: Mapping[str, Message | WorldError]) -> None:
    """Raise `VersionMismatch` where agents live with whom this flow cannot speak: to take their nodes for lost would end what they run."""
    for node, answer in answers.items():
        if isinstance(answer, ProtocolMismatch) or (isinstance(answer, CommandRejected) and "speaks protocol" in answer.why):
            raise VersionMismatch(job, node, answer.why)


def _let_go_of_strays(run: JobController, told: dict[str, Message], membership: dict[str, list[int]], generation: int) -> None:
    """End what runs on nodes that were given up while nobody could reach them: the flow before died before it could."""
    for node, one in told.items():
        if node not in membership and one["workers"] and one["generation"] < generation:
            run.agents.drop(node)
            run.log.record_event(
                f"{node} came back with ranks of generation {one['generation']}, which is over: they are ended, it may be used again"
            )


def _continue(run: JobController, generation: int, membership: dict[str, list[int]], row: models.Generation | None) -> None:
    """Replay what the agents told into the board of the generation that runs."""
    steps = queries.steps(run.history, run.job.id, generation=generation)
    saved = [one.step or 0 for one in queries.checkpoints(run.history, run.job.id) if one.generation == generation and not one.problem]
    facts = row.facts if row is not None and row.number == generation and row.facts else None
    rank_table = (
        RankTable.from_record(facts) if facts else RankTable()
    )  # not on record: its processes cannot be kept, as nobody knows since when they are
    run.generations.begin(generation, membership, rank_table=rank_table)
    run.handlers.begin(recorded=max((one.step for one in steps), default=0), saved=max(saved, default=0))
    run.handlers.remember(*run.generations.recorded_before(run.history))
    run.generations.state.durations.extend((one.step, one.seconds) for one in steps)


def _remember(run: JobController) -> None:
    """Take the job's past from the history: recoveries, failures, the newest step, and the incident in work."""
    last = queries.last_step(run.history, run.job.id)
    run.generations.best = last.step if last else 0
    run.generations.managed = last is not None
    known = queries.incidents(run.history, run.job.id)
    run.incidents.count = max((one.number for one in known), default=0)
    faults = queries.faults(run.history, run.job.id)
    run.faults.history.remember(faults)
    run.stragglers.remember(queries.finished_migrations(run.history, run.job.id))
    run.checkpoints.snapshots.reattach(queries.newest_snapshots(run.history, run.job.id))
    run.checkpoints.replicas.remember((one.kind, one.node, one.at) for one in faults)
    run.handlers.node_faults.remember((one.kind, one.node, one.at) for one in faults)
    decided = set[str]()
    for decision in queries.decisions(run.history, run.job.id):
        if decision.action in {RecoveryAction.GIVE_UP, RecoveryAction.ASK_A_PERSON}:
            continue
        incident = next((one for one in known if one.id == decision.incident_id), None)
        root = next((one for one in faults if one.incident_id == decision.incident_id and one.root), None)
        run.incidents.attempts.append(
            RecoveryAttempt(
                at=decision.at,
                action=RecoveryAction(decision.action),
                node=root.node if root else None,
                best=(incident.step_before or 0) if incident else 0,
                incident=decision.incident_id,
                kind=root.kind if root else "",
                step=root.step if root else None,
                generation=incident.generation_before if incident else 0,
                progressed=bool(incident and (incident.facts or {}).get(PROGRESSED)) and decision.incident_id not in decided,
            )
        )
        decided.add(decision.incident_id)
        if root:
            signature, device = (str(root.evidence.get(name, "")) for name in ("signature", "device"))
            run.incidents.failures_before.append(
                PastFailure(node=root.node, step=root.step, signature=signature, kind=root.kind, at=root.at, device=device)
            )
    opened = queries.open_incident(run.history, run.job.id)
    if opened is not None:
        run.incidents.current = _incident(run, opened, [one for one in faults if one.incident_id == opened.id])


def _incident(run: JobController, row: models.Incident, faults: list[models.FaultRecord]) -> IncidentInWork:
    decided = queries.decisions(run.history, incident_id=row.id)
    incident = IncidentInWork(row=row, lap_at=row.fault_at, board=run.generations.state)
    incident.lap("detect", row.detected_at)
    incident.faults = [_fault(one) for one in faults if one.kind in CATALOGUE]
    if decided:
        incident.decision, incident.action_at = _decided(decided[-1]), decided[-1].at
        incident.replacement_attempts = sum(one.action in IN_PROCESS for one in decided)
        incident.lap("diagnose", decided[-1].at)
    return incident


def _fault(row: models.FaultRecord) -> Fault:
    text = {name: str(row.evidence.get(name, "")) for name in ("quote", "signature", "detail", "source", "device")}
    return Fault(kind=row.kind, at=row.at, node=row.node, rank=row.rank, step=row.step, **text)


def _decided(row: models.DecisionRecord) -> Decision:
    return unpacked(Decision, {**row.act, "action": row.action, "reason": row.reason})


def _reenter(run: JobController) -> None:
    """Choose where to go on: a recovery that was cut short is decided anew, on what is known now."""
    whole = run.generations.state.all_started()
    halfway = sorted(
        node for node in run.generations.members if run.generations.sent_to.get(node, run.generations.number) < run.generations.number
    )
    recovering = run.state in (State.DECIDING, State.ISOLATING, State.RESCHEDULING) or (run.state is State.RESUMING and not whole)
    if halfway or run.generations.state.is_ahead() or run.generations.state.cut_short() or (recovering and _was_take_over(run)):
        run.generations.state.evidence.append(InterruptedRecovery(at=time.time(), state=run.state))
    if recovering and _was_take_over(run):
        assert run.incidents.current is not None
        run.incidents.current.blocked_reason = "the flow died in the middle of one in this incident"
        run.incidents.current.tried.append(RecoveryAction.TAKE_OVER)
    if run.state is State.MIGRATING:
        _end_move(run)
    elif recovering or (halfway and run.state is State.RESUMING):
        run.move(Event.FAULTED, "the flow died in the middle of this recovery")


def _end_move(run: JobController) -> None:
    """End a planned move that a flow did not live to finish: it is asked for still, and begins anew once nothing speaks against it."""
    run.generations.newest += 1  # the number it was to get
    run.nodes.hot_spares.drop(list(run.nodes.hot_spares.standbys))  # some may be ready for a rank that is not theirs any more
    if run.generations.state.evidence:
        run.move(Event.FAULTED, "the flow died in the middle of a planned move")
        return
    for node, ranks in run.generations.state.membership.items():
        run.agents.send_command_async(
            node, "tell", ranks=list(ranks), standbys=[], message={"do": "forget", "generation": run.generations.newest}
        )
    run.move(Event.MOVE_FAILED, "the flow died in the middle of this move; it is tried again")


def _was_take_over(run: JobController) -> bool:
    decision = run.incidents.current.decision if run.incidents.current is not None else None
    return decision is not None and decision.action in IN_PROCESS
