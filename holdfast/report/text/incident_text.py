"""An incident in plain sentences: what happened, what was done, what it cost, and what a person should do.

The incident page, the job page, notifications and the log of the flow run use the same sentences.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from holdfast.detectors.catalogue import CATALOGUE, RecommendedAction
from holdfast.history.models import DecisionRecord
from holdfast.plurals import plural
from holdfast.policies.recovery.case import RecoveryAction
from holdfast.report.case import IncidentCase
from holdfast.report.text import wording

NOTHING_TO_DO: Final = "nothing to do"
MOST_QUOTED: Final = 160
"""Characters of a quote in a sentence."""
_PATH: Final = re.compile(r"(?<![\w.:/])/(?:[^\s/:'\"(),]+/)+(?=[^\s/:'\"(),])")
_SIGNAL: Final = re.compile(r"worker-(sig[a-z0-9]+)")

HAPPENED: Final[Mapping[str, str]] = {
    "worker-sigkill": "was killed (SIGKILL)",
    "worker-oom-killed": "was killed by the kernel: out of memory",
    "worker-exit-code": "exited with an error status",
    "worker-exit-early": "exited before its work was done",
    "worker-exception": "raised an exception",
    "worker-peer-lost": "failed because another rank went away",
    "worker-gpu-out-of-memory": "ran out of GPU memory",
    "worker-abort-timed-out": "ended itself: its communicators did not abort",
    "worker-disk-full": "failed: no space left on a disk",
    "worker-storage-failed": "failed: a storage error",
    "worker-service-unreachable": "failed: a service that the script uses did not answer",
    "worker-stopped": "was stopped by a signal",
    "worker-start-failed": "could not start its workers",
    "worker-command-not-runnable": "could not run the workers' command",
    "rank-silent": "made no progress while other ranks did",
    "job-hang": "hung: no rank made progress",
    "job-never-stepped": "never reached its first step",
    "job-output-silent": "printed nothing for too long",
    "collective-stuck": "hung in a collective",
    "agent-lost": "lost its agent; the node still answers",
    "node-lost": "is unreachable",
    "node-unknown": "lost its agent, and the node could not be checked",
    "node-leaving": "is about to be taken away",
    "node-partitioned": "is cut off from the other nodes",
    "loss-not-finite": "had a loss that is not finite",
    "loss-diverged": "had a loss that stayed not finite",
}
"""Fault kind to what happened to its target; other kinds have the title of the catalogue."""

QUOTED: Final = frozenset({"worker-exception", "worker-start-failed", "worker-command-not-runnable"})
"""Kinds that need the message of the error."""

RULES: Final[Mapping[str, str]] = {
    "StopForUserError": "fail the job because the script is at fault",
    "StopWithoutProgress": "fail the job after recoveries without a new step",
    "StopWhenSpent": "fail the job after too many recoveries",
    "ExcuseWhenCorrelated": "attribute the fault to no node, because many nodes have it",
    "LeaveWhenRecurring": "leave the node, because it had this fault often",
    "LeaveWhenFlapping": "leave the node, because the fault comes and goes",
    "RollBack": "go back to an earlier checkpoint",
    "RetryStep": "retry the step",
    "ReplaceRanks": "replace the lost ranks and keep the others running",
    "ShrinkLive": "go on with fewer copies of the model",
    "RestartWorkers": "restart the workers on the same nodes",
    "ReplaceNode": "replace the node with a spare",
    "ShrinkRestart": "restart on fewer nodes",
    "RequestApproval": "ask a person for approval",
    "WaitForCapacity": "wait for nodes",
    "RestartAgain": "restart once more, each rank on another node",
    "FailTheJob": "fail the job",
}
"""Rule of a policy to what it would have done."""


def what(case: IncidentCase) -> str:
    """Return what happened to what: ``rank 1 on node-1 was killed (SIGKILL)``."""
    kind, target = case.incident.kind, case.incident.target.removeprefix("node ")
    happened = HAPPENED.get(kind)
    if happened is None and (signal := _SIGNAL.fullmatch(kind)) is not None:
        happened = f"was ended by {signal[1].upper()}"
    if happened is None:
        return f"{target}: {_title(kind)}"
    subject = "the job" if target == "job" else target
    quote = root_quote(case) if kind in QUOTED else ""
    return f"{subject} {happened}" + (f": {quote}" if quote else "")


def _title(kind: str) -> str:
    entry = CATALOGUE.get(kind)
    title = entry.title if entry is not None else kind
    return title if title[1:2].isupper() else title[:1].lower() + title[1:]


def root_quote(case: IncidentCase) -> str:
    """Return the message of the root cause on one short line, without folders of files; empty if there is none."""
    root = next((one for one in case.faults if one.root), None)
    quote = str(root.evidence.get("quote") or "") if root is not None else ""
    for name in (case.incident.target, case.incident.kind):
        quote = quote.removeprefix(f"{name}: ").removeprefix(f"{name} ")
    return brief(quote)


def brief(text: str, limit: int = MOST_QUOTED) -> str:
    """Return *text* on one line of at most *limit* characters, with file names instead of paths."""
    line = _PATH.sub("", " ".join(wording.visible(text).split()))
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def done(case: IncidentCase) -> str:
    """Return what was done about it; empty before a decision."""
    acts = [one for one in case.decisions if one.action != RecoveryAction.REQUEST_APPROVAL]
    if not acts:
        return ""
    describe = DONE.get(acts[-1].action)
    text = describe(acts[-1], case.incident.target) if describe is not None else f"{acts[-1].action} was tried"
    return f"{text} (attempt {len(acts)})" if len(acts) > 1 and acts[-1].action != RecoveryAction.FAIL else text


def _replaced(decision: DecisionRecord, target: str) -> str:
    return "; ".join(_seat(one, target) for one in decision.act.get("seats") or ()) or "the lost ranks were replaced"


def _restarted(decision: DecisionRecord, _target: str) -> str:
    return "all workers were restarted" + (", each on another node" if decision.act.get("rotate") else " on the same nodes")


def _went_back(decision: DecisionRecord, _target: str) -> str:
    skipped = ", and the batches in question were left out" if decision.act.get("skip") else ""
    return f"all ranks went back to a checkpoint from before step {wording.count(decision.act.get('before'))}{skipped}"


def _replaced_node(decision: DecisionRecord, _target: str) -> str:
    drop, add = (wording.listing(decision.act.get(name) or ()) for name in ("drop", "add"))
    return f"{add or 'a spare node'} replaced {drop or 'the node'}"


def _shrunk(decision: DecisionRecord, _target: str) -> str:
    drop = wording.listing(decision.act.get("drop") or ())
    return "all workers were restarted on fewer nodes" + (f", without {drop}" if drop else "")


DONE: Final[Mapping[str, Callable[[DecisionRecord, str], str]]] = {
    RecoveryAction.RETRY_STEP: lambda _decision, _target: "process groups were rebuilt and the step was run again",
    RecoveryAction.REPLACE_RANKS: _replaced,
    RecoveryAction.SHRINK_LIVE: lambda decision, _target: (
        f"training went on without rank {wording.ranks(decision.act.get('vacate') or ())}"
    ),
    RecoveryAction.RESTART_WORKERS: _restarted,
    RecoveryAction.ROLLBACK: _went_back,
    RecoveryAction.REPLACE_NODE: _replaced_node,
    RecoveryAction.SHRINK_RESTART: _shrunk,
    RecoveryAction.WAIT_FOR_CAPACITY: lambda _decision, _target: "the job waited for nodes",
    RecoveryAction.FAIL: lambda _decision, _target: "no recovery was possible",
}
"""Recovery action to what it did, from the decision and the target of the incident."""


def _seat(seat: Mapping[str, Any], target: str) -> str:
    process = "a new process" if seat.get("hot_spare") is None else "hot spare"
    rank = f"rank {seat.get('rank')}"
    took = "took over" if target.startswith(f"{rank} ") or target == rank else f"took over {rank}"
    return f"{process} on {seat.get('node')} {took}"


def cost(case: IncidentCase) -> str:
    """Return how it ended and what it cost; empty while it is open."""
    incident = case.incident
    match incident.outcome:
        case "recovered":
            again = "all processes started again" if incident.until_started else "training again"
            facts = [] if incident.downtime_s is None else [f"{again} after {wording.duration(incident.downtime_s)}"]
            facts += [] if incident.steps_lost is None else [f"{plural(incident.steps_lost, 'step')} lost"]
            return ", ".join(facts) or again
        case "passed":
            return "it passed by itself"
        case "stopped":
            return "the job was stopped before it recovered"
        case "failed":
            return "the job failed"
    return ""


def sentence(case: IncidentCase) -> str:
    """Return the whole incident in one sentence, without the time: what happened; what was done; what it cost."""
    return "; ".join(part for part in (what(case), done(case), cost(case) or "recovery is under way") if part)


def with_time(case: IncidentCase, zone: str = "") -> str:
    """Return the sentence after the time of day (UTC) and the name of the *zone*."""
    return f"{time_of_day(case.incident.fault_at)}{zone} {sentence(case)}"


def time_of_day(at: float) -> str:
    """Return the time of day in UTC."""
    return datetime.fromtimestamp(at, tz=UTC).strftime("%H:%M:%S")


def headline(case: IncidentCase) -> str:
    """Return the incident in a few words: ``Incident 1: rank 1 on node-1 killed (SIGKILL), recovered in 260 ms``."""
    return f"Incident {case.incident.number}: {short(case)}"


def short(case: IncidentCase) -> str:
    """Return what happened to what, and how it ended."""
    happened = brief(what(case), 100).replace(" was ", " ", 1)
    return f"{happened}, {outcome(case)}"


def outcome(case: IncidentCase) -> str:
    """Return how the incident ended, in a few words."""
    incident = case.incident
    match incident.outcome:
        case "recovered":
            return "recovered" + ("" if incident.downtime_s is None else f" in {wording.duration(incident.downtime_s)}")
        case "passed":
            return "passed by itself"
        case "stopped":
            return "job stopped"
        case "failed":
            return "job failed"
    return "recovery under way" if incident.closed_at is None else "closed"


def to_do(case: IncidentCase, job: str, quarantined: Mapping[str, str]) -> str:
    """Return what a person should do about an incident; *quarantined* are the nodes that it took out of service, and why."""
    actions = [of_quarantine(node, reason) for node, reason in quarantined.items()]
    if case.incident.outcome == "failed":
        actions.insert(
            0, f"{fix(case.incident.kind)}; then run the job again: `holdfast run {job}.yaml` goes on from its newest checkpoint"
        )
    return ". ".join(actions) or NOTHING_TO_DO


def fix(kind: str) -> str:
    """Return what a person should do about a root cause of this *kind* that failed a job."""
    entry = CATALOGUE.get(kind)
    if entry is None:
        return "see what was found"
    return "fix the script, the traceback is in the incident" if entry.recommended_action is RecommendedAction.USER_ERROR else entry.action


def why_failed(case: IncidentCase) -> str:
    """Return why no recovery was possible; empty if there was one."""
    return brief(case.incident.reason, 400) if case.incident.outcome == "failed" else ""


def of_quarantine(node: str, reason: str) -> str:
    """Return that a node is out of service, and what returns it to service."""
    why = f": {brief(reason)}" if reason else ""
    return f"{node} is quarantined{why}. It returns once it passes a burn-in (deployment `node-repair`, or `holdfast node burn-in`)"


def rule_text(rule: str) -> str:
    """Return what a policy's rule would have done; *rule* is its name, with or without its settings."""
    name = rule.partition("(")[0].strip()
    return RULES.get(name) or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()


def all_nodes(case: IncidentCase) -> Sequence[str]:
    """Return the nodes that the faults of an incident name, in order."""
    return list(dict.fromkeys(one.node for one in case.faults if one.node))
