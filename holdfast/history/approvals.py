"""Approvals that a person has to give before a program may isolate nodes: requested, read, and answered once, by whoever is first."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import func
from sqlmodel import col, select

from holdfast.errors import OperatorError
from holdfast.history.models import ApprovalRequest
from holdfast.history.store import History

ISOLATE: Final = "isolate"
KEEP: Final = "keep"
WITHDRAWN: Final = "withdrawn"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalAnswer:
    """An answer, by whom and why."""

    answer: str
    picked: tuple[str, ...] = ()
    """The nodes to isolate."""
    by: str = ""
    comment: str = ""


class UnknownApproval(OperatorError):
    """There is no approval request with that number."""

    def __init__(self, number: int, pending: tuple[int, ...]) -> None:
        super().__init__(number, pending)
        self.number, self.pending = number, pending

    def __str__(self) -> str:
        numbers = ", ".join(map(str, self.pending))
        return f"there is no approval {self.number}. " + (f"Open: {numbers}." if numbers else "None is open.")


class AlreadyAnswered(OperatorError):
    """The request has an answer."""

    def __init__(self, number: int, answer: str) -> None:
        super().__init__(number, answer)
        self.number, self.answer = number, answer

    def __str__(self) -> str:
        return f"approval {self.number} is answered already: {self.answer}. `holdfast node ls` shows the nodes and their cordons."


class NodeNotRequested(OperatorError):
    """The answer names a node that the request is not about."""

    def __init__(self, number: int, node: str, nodes: tuple[str, ...]) -> None:
        super().__init__(number, node, nodes)
        self.number, self.node, self.nodes = number, node, nodes

    def __str__(self) -> str:
        return f"approval {self.number} is not about {self.node}. Pick of: {', '.join(self.nodes)}."


def request(history: History, approval: ApprovalRequest) -> ApprovalRequest:
    """Add *approval* and return it with its number; return the pending one if there is one about the same nodes."""
    pending = (col(ApprovalRequest.job_id) == approval.job_id, col(ApprovalRequest.answered_at).is_(None))
    with history.session(immediate=True) as session:
        for one in session.exec(select(ApprovalRequest).where(*pending)):
            if one.about == approval.about and one.nodes.keys() == approval.nodes.keys():
                return one
        approval.number = (session.exec(select(func.max(col(ApprovalRequest.number)))).one() or 0) + 1
        session.add(approval)
        session.flush()
        return approval


def pending_approvals(history: History) -> list[ApprovalRequest]:
    """Return the requests without an answer, oldest first."""
    query = select(ApprovalRequest).where(col(ApprovalRequest.answered_at).is_(None))
    with history.session() as session:
        return list(session.exec(query.order_by(col(ApprovalRequest.number))))


def of_job(history: History, job_id: str) -> list[ApprovalRequest]:
    """Return all requests of one job, oldest first."""
    query = select(ApprovalRequest).where(col(ApprovalRequest.job_id) == job_id)
    with history.session() as session:
        return list(session.exec(query.order_by(col(ApprovalRequest.number))))


def by_number(history: History, numbers: Collection[int]) -> Mapping[int, ApprovalRequest]:
    """Return the requests with these *numbers*."""
    with history.session() as session:
        return {one.number: one for one in session.exec(select(ApprovalRequest).where(col(ApprovalRequest.number).in_(numbers)))}


def answer(history: History, number: int, answered: ApprovalAnswer, *, now: float) -> ApprovalRequest:
    """Record the answer to request *number*.

    Raise `UnknownApproval`, `AlreadyAnswered`, or `NodeNotRequested` for an answer that names other nodes.
    """
    with history.session(immediate=True) as session:
        approval = session.exec(select(ApprovalRequest).where(col(ApprovalRequest.number) == number)).first()
        if approval is None:
            pending = session.exec(select(col(ApprovalRequest.number)).where(col(ApprovalRequest.answered_at).is_(None))).all()
            raise UnknownApproval(number, tuple(sorted(pending)))
        if approval.answered_at is not None:
            raise AlreadyAnswered(number, describe(approval))
        for node in answered.picked:
            if node not in approval.nodes:
                raise NodeNotRequested(number, node, tuple(approval.nodes))
        approval.answered_at, approval.answer, approval.by, approval.comment = now, answered.answer, answered.by, answered.comment
        approval.picked = list(answered.picked or approval.nodes) if answered.answer == ISOLATE else []
        session.add(approval)
        return approval


def set_flow_run(history: History, number: int, flow_run: str) -> None:
    """Record the paused flow run in which the request can be answered."""
    with history.session(immediate=True) as session:
        approval = session.exec(select(ApprovalRequest).where(col(ApprovalRequest.number) == number)).one()
        approval.flow_run = flow_run
        session.add(approval)


def describe(approval: ApprovalRequest) -> str:
    """Return the answer as text: what, by whom and why."""
    kept, isolated = ", ".join(approval.nodes), ", ".join(approval.picked)
    what = {ISOLATE: f"isolate {isolated}", KEEP: f"keep {kept}"}.get(approval.answer, approval.answer)
    by = f" by {approval.by}" if approval.by else ""
    return f"{what}{by}{f': {approval.comment}' if approval.comment else ''}"


def facts(approval: ApprovalRequest) -> dict[str, Any]:
    """Return the request as JSON."""
    return approval.model_dump(mode="json", exclude={"id"})
