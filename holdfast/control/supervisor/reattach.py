"""Reattach to a job that runs without a controller: from the history, and from the event logs of its agents."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from holdfast.control.backup.outbox import OutboxCollector
from holdfast.control.config.worker_env import keep_token
from holdfast.control.state.incidents import IncidentInWork, RecoveryAttempt
from holdfast.control.state.rank_table import RankTable
from holdfast.control.supervisor.controller import PROGRESSED, JobController
from holdfast.detectors.catalogue import CATALOGUE, Fault
from holdfast.detectors.codec import unpacked
from holdfast.detectors.diagnosis import PastFailure
from holdfast.detectors.evidence import InterruptedRecovery
from holdfast.errors import CommandRejected, NodeLost, ProtocolMismatch, VersionMismatch, WorldError
from holdfast.history import models, queries
from holdfast.log import note
from holdfast.paths import outbox_file
from holdfast.plurals import plural
from holdfast.policies.recovery.case import IN_PROCESS, Decision, RecoveryAction
from holdfast.policies.states import Event, State
from holdfast.protocol import Message

log = logging.getLogger("holdfast.control")

SURVEY_SECONDS: Final = 3.0
"""How long a node may take to answer whether it is a spare node of the job; a late one is found when spare nodes are missing."""


def reattach(run: JobController) -> None:
    """Continue the job where its former controller left it; faults that happened meanwhile are in the agents' event logs."""
    last = queries.state_of(run.history, run.job.id)
    if last is not None and last.after == State.SUSPENDED:
        _reattach_suspended(run, last)
        return
    statuses, silent = _attach_all(run)
    run.machine.state = State(last.after) if last is not None else State.LAUNCHING
    _read_past(run)
    row = queries.newest_generation(run.history, run.job.id)
    generation = row.number if row else 0
    membership = {node: list(ranks) for node, ranks in row.ranks.items()} if row else {}
    _take_over_token(run, statuses)
    newest: Message = max(statuses.values(), key=lambda one: one["generation"], default={"generation": 0, "membership": {}})
    if newest["generation"] > generation:  # the controller died between sending and recording it
        generation, membership = newest["generation"], _membership(statuses.values(), newest["generation"], membership)
    _continue(run, generation, membership, row)
    _take_over_roles(run, statuses)
    run.checkpoints.replicas.reattach(statuses)
    for node, ranks in membership.items():
        if node in silent:
            run.agents.wait_for(node)
            run.generations.state.unseen.update(ranks)
        elif node not in statuses:
            run.agents.without_agent[node] = "no agent ran there"
    _release_returned_nodes(run, statuses, membership, generation)
    run.pump(0.0)
    run.generations.managed = run.generations.managed or run.generations.state.managed()
    alive = sum(len(one["workers"]) for one in statuses.values() if one["generation"] == generation)
    if not run.handed_over:
        running = plural(alive, f"worker of generation {generation} runs", f"workers of generation {generation} run")
        run.log.record_event(f"a new flow reattached to the job in state {run.state}: {running} on {plural(len(statuses), 'node')}")
    _choose_state(run)


def _reattach_suspended(run: JobController, last: models.JobTransition) -> None:
    """Reattach to a job that holds no nodes: its next generation begins as in a launch."""
    run.machine.state, run.machine.reason = State.SUSPENDED, last.reason
    _read_past(run)
    row = queries.newest_generation(run.history, run.job.id)
    run.generations.newest = row.number if row is not None else 0


def _membership(statuses: Iterable[Message], generation: int, before: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return node to ranks in *generation*, as the agents report it: some know all ranks, others only their own.

    Ranks that no agent reports stay where they were *before*: their nodes are lost.
    """
    known: dict[str, list[int]] = {}
    for one in sorted((one["membership"] for one in statuses if one["generation"] == generation), key=len, reverse=True):
        known |= {node: ranks for node, ranks in one.items() if ranks and node not in known}
    seen = {rank for ranks in known.values() for rank in ranks}
    for node, ranks in before.items():
        if node not in known and (left := [rank for rank in ranks if rank not in seen]):
            known[node] = left
    return known


def _take_over_roles(run: JobController, statuses: dict[str, Message]) -> None:
    """Take over what the agents report of managed groups, hot spares and roles."""
    recorded = [row.facts for row in reversed(queries.generations(run.history, run.job.id)) if row.facts]
    newest = next((facts for facts in recorded if facts.get("roles")), {})
    roles = next((one["roles"] for one in statuses.values() if one.get("roles")), newest) or {}
    run.generations.roles, run.generations.recordings = (
        tuple(tuple(ranks) for ranks in roles.get("roles") or ()),
        str(roles.get("recordings") or ""),
    )
    run.generations.copies = tuple(tuple(ranks) for ranks in roles.get("copies") or ())
    run.generations.integration = next((str(facts["integration"]) for facts in recorded if facts.get("integration")), "")
    for node, one in statuses.items():
        run.take_in(node, one)


def _ours(run: JobController) -> list[str]:
    return [view.name for view in run.agents.source.survey(SURVEY_SECONDS) if view.job == run.job.id]


def _attach_all(run: JobController) -> tuple[dict[str, Message], set[str]]:
    """Attach to the agents of the job, which then refuse the former controller's commands, and collect what that left in their outboxes.

    Return the status of each node's agent, and the nodes that did not answer.
    """
    statuses, silent = _attach(run, sorted(_members(run)))
    others, _ = _attach(run, sorted({*_ours(run)} - statuses.keys() - silent))
    statuses |= others
    collector = OutboxCollector(
        agents=run.agents,
        history=run.history,
        lease=run.lease.lease,
        outbox_path=outbox_file(run.job.name),
        record_event=run.log.record_event,
    )
    collected = collector.collect(statuses)
    run.lease.settle(0)
    if collected:
        more, late = _attach(run, sorted(_members(run) - statuses.keys() - silent))
        statuses, silent = {**statuses, **more}, silent | late
    return statuses, silent


def _members(run: JobController) -> set[str]:
    row = queries.newest_generation(run.history, run.job.id)
    return {*row.ranks} if row else set()


def _take_over_token(run: JobController, statuses: dict[str, Message]) -> None:
    """Get the job's secret from the agents of its members: it may have been made on another host."""
    members = _members(run) or {*statuses}  # the former controller may have died before it recorded them
    answers = run.agents.send_command(sorted(members & statuses.keys()), "token")
    given = [str(one["token"]) for one in answers.values() if not isinstance(one, WorldError) and one["token"]]
    known = token_of_members(run.token, given)
    if given and given.count(known) < len(given):
        run.log.record_event(
            f"{plural(len(given) - given.count(known), 'agent')} of {len(given)} have another secret of the job than the one that is used"
        )
    if known != run.token:
        run.agents.plan["environment"]["HOLDFAST_TOKEN"] = keep_token(run.job, known)


def token_of_members(kept: str, given: Sequence[str]) -> str:
    """Return the job's secret: the one *kept* here if any member has it, else the one *given* by more than half of them.

    A single compromised node must not choose the secret that all others accept.
    """
    if kept in given or not given:
        return kept
    most, times = Counter(given).most_common(1)[0]
    return most if 2 * times > len(given) else kept


def _attach(run: JobController, nodes: list[str]) -> tuple[dict[str, Message], set[str]]:
    """Attach to the agents of *nodes*; return the status of each, and the nodes that did not answer."""
    answers = run.agents.reattach_all(nodes)
    refuse_another_version(run.job.name, answers)
    for node, answer in answers.items():
        if isinstance(answer, WorldError):
            note(log, "agent.not-reattached", node=node, why=answer)
    statuses = {node: answer for node, answer in answers.items() if not isinstance(answer, WorldError)}
    return statuses, {node for node, answer in answers.items() if isinstance(answer, NodeLost)} if run.agents.source.remote else set()


def refuse_another_version(job: str, answers: Mapping[str, Message | WorldError]) -> None:
    """Raise `VersionMismatch` for agents with another protocol: to treat their nodes as lost would end the workers that run there."""
    for node, answer in answers.items():
        if isinstance(answer, ProtocolMismatch) or (isinstance(answer, CommandRejected) and "speaks protocol" in answer.why):
            raise VersionMismatch(job, node, answer.why)


def _release_returned_nodes(run: JobController, statuses: dict[str, Message], membership: dict[str, list[int]], generation: int) -> None:
    """End what runs on nodes that were given up while they were unreachable, and that the former controller could not clear."""
    for node, one in statuses.items():
        if node not in membership and one["workers"] and one["generation"] < generation:
            run.agents.drop(node)
            run.log.record_event(
                f"{node} came back with ranks of generation {one['generation']}, which is over: "
                "they are terminated, and the node may be used again"
            )


def _continue(run: JobController, generation: int, membership: dict[str, list[int]], row: models.Generation | None) -> None:
    """Begin with the generation that runs, as the history has it."""
    steps = queries.steps(run.history, run.job.id, generation=generation)
    saved = [one.step or 0 for one in queries.checkpoints(run.history, run.job.id) if one.generation == generation and not one.problem]
    facts = row.facts if row is not None and row.number == generation and row.facts else None
    # an empty one where none is on record: its processes cannot be kept, as nobody knows since which generation they run
    rank_table = RankTable.from_record(facts) if facts else RankTable()
    run.generations.begin(generation, membership, rank_table=rank_table)
    run.handlers.begin(recorded=max((one.step for one in steps), default=0), saved=max(saved, default=0))
    run.handlers.remember(*run.generations.recorded_before(run.history), queries.checkpoints(run.history, run.job.id))
    run.generations.state.durations.extend((one.step, one.seconds) for one in steps)


def _read_past(run: JobController) -> None:
    """Read the job's past from the history: recoveries, failures, the newest step, and the incident in work."""
    last = queries.last_step(run.history, run.job.id)
    run.generations.best = last.step if last else 0
    run.generations.managed = run.generations.trained = last is not None
    known = queries.incidents(run.history, run.job.id)
    run.incidents.count = max((one.number for one in known), default=0)
    faults = queries.faults(run.history, run.job.id)
    run.faults.history.remember(faults)
    run.stragglers.remember(queries.finished_migrations(run.history, run.job.id))
    run.checkpoints.snapshots.reattach(queries.newest_snapshots(run.history, run.job.id))
    run.checkpoints.replicas.remember((one.kind, one.node, one.at) for one in faults)
    run.handlers.node_faults.remember(faults)
    decided = set[str]()
    for decision in queries.decisions(run.history, run.job.id):
        if decision.action in {RecoveryAction.FAIL, RecoveryAction.REQUEST_APPROVAL}:
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
    incident = IncidentInWork(row=row, lap_at=row.fault_at, state=run.generations.state)
    incident.lap("detect", row.detected_at)
    incident.faults = [_fault(one) for one in faults if one.kind in CATALOGUE]
    if decided:
        incident.decision, incident.action_at = _decided(decided[-1]), decided[-1].at
        incident.replacement_attempts = sum(one.action in IN_PROCESS for one in decided)
        incident.lap("diagnose", decided[-1].at)
    return incident


def _fault(row: models.FaultRecord) -> Fault:
    names = ("quote", "signature", "detail", "source", "device", "contradicted", "supported")
    text = {name: str(row.evidence.get(name, "")) for name in names}
    return Fault(kind=row.kind, at=row.at, node=row.node, rank=row.rank, step=row.step, idle=row.evidence.get("idle") is True, **text)


def _decided(row: models.DecisionRecord) -> Decision:
    return unpacked(Decision, {**row.act, "action": row.action, "reason": row.reason})


def _choose_state(run: JobController) -> None:
    """Choose the state to continue in: an interrupted recovery is decided anew, on what is known now."""
    all_started = run.generations.state.all_started()
    halfway = sorted(
        node for node in run.generations.members if run.generations.sent_to.get(node, run.generations.number) < run.generations.number
    )
    recovering = run.state in (State.DECIDING, State.ISOLATING, State.RESCHEDULING) or (run.state is State.RESUMING and not all_started)
    if halfway or run.generations.state.is_ahead() or run.generations.state.cut_short() or (recovering and _was_in_process(run)):
        run.generations.state.evidence.append(InterruptedRecovery(at=time.time(), state=run.state))
    if recovering and _was_in_process(run):
        assert run.incidents.current is not None
        run.incidents.current.blocked_reason = "the controller died during an in-process recovery in this incident"
        run.incidents.current.tried.append(RecoveryAction.REPLACE_RANKS)
    if run.state is State.MIGRATING:
        _end_migration(run)
    elif recovering or (halfway and run.state is State.RESUMING):
        run.move(Event.FAULTED, "the flow took the job over" if run.handed_over else "the controller died during this recovery")


def _end_migration(run: JobController) -> None:
    """End a planned migration that the former controller began: its request is still open, so it begins again if nothing prevents it."""
    run.generations.newest += 1  # the number that it was to get
    run.nodes.hot_spares.drop(list(run.nodes.hot_spares.spares))  # some may be ready for a rank that they will not get
    if run.generations.state.evidence:
        run.move(Event.FAULTED, "the controller died during a planned migration")
        return
    for node, ranks in run.generations.state.membership.items():
        run.agents.send_command_async(
            node, "forward", ranks=list(ranks), hot_spares=[], message={"do": "forget", "generation": run.generations.newest}
        )
    run.move(Event.MOVE_FAILED, "the controller died during this migration; it is tried again")


def _was_in_process(run: JobController) -> bool:
    decision = run.incidents.current.decision if run.incidents.current is not None else None
    return decision is not None and decision.action in IN_PROCESS
