"""What persons are asked before a program may isolate nodes: put, read, and answered once, whoever answers first."""

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
    """What is answered, by whom and why."""

    answer: str
    picked: tuple[str, ...] = ()
    """The nodes that are to be isolated."""
    by: str = ""
    words: str = ""


class UnknownApproval(OperatorError):
    """There is no question of that number."""

    def __init__(self, number: int, pending_approvals: tuple[int, ...]) -> None:
        super().__init__(number, pending_approvals)
        self.number, self.pending_approvals = number, pending_approvals

    def __str__(self) -> str:
        present = ", ".join(map(str, self.pending_approvals))
        return f"there is no question {self.number}. " + (f"Open: {present}." if present else "None is open.")


class AlreadyAnswered(OperatorError):
    """Somebody answered before."""

    def __init__(self, number: int, how: str) -> None:
        super().__init__(number, how)
        self.number, self.how = number, how

    def __str__(self) -> str:
        return f"question {self.number} is answered already: {self.how}. `holdfast nodes` shows what is held, and how to change it."


class NodeNotRequested(OperatorError):
    """A node was picked that the question is not about."""

    def __init__(self, number: int, node: str, asked: tuple[str, ...]) -> None:
        super().__init__(number, node, asked)
        self.number, self.node, self.asked = number, node, asked

    def __str__(self) -> str:
        return f"question {self.number} is not about {self.node}. Pick of: {', '.join(self.asked)}."


def ask(history: History, question: ApprovalRequest) -> ApprovalRequest:
    """Put *question*, and return it with its number; one about the same nodes that is open already is the one."""
    with history.session(immediate=True) as session:
        present = session.exec(
            select(ApprovalRequest).where(col(ApprovalRequest.job_id) == question.job_id, col(ApprovalRequest.answered_at).is_(None))
        ).all()
        same = next((one for one in present if one.about == question.about and one.nodes.keys() == question.nodes.keys()), None)
        if same is not None:
            return same
        question.number = (session.exec(select(func.max(col(ApprovalRequest.number)))).one() or 0) + 1
        session.add(question)
        session.flush()
        return question


def pending_approvals(history: History) -> list[ApprovalRequest]:
    """Return the questions that nobody has answered yet, oldest first."""
    with history.session() as session:
        return list(
            session.exec(select(ApprovalRequest).where(col(ApprovalRequest.answered_at).is_(None)).order_by(col(ApprovalRequest.number)))
        )


def of_job(history: History, job_id: str) -> list[ApprovalRequest]:
    """Return all questions of one job, oldest first."""
    with history.session() as session:
        return list(
            session.exec(select(ApprovalRequest).where(col(ApprovalRequest.job_id) == job_id).order_by(col(ApprovalRequest.number)))
        )


def by_number(history: History, numbers: Collection[int]) -> Mapping[int, ApprovalRequest]:
    """Return the questions of these *numbers*."""
    with history.session() as session:
        return {one.number: one for one in session.exec(select(ApprovalRequest).where(col(ApprovalRequest.number).in_(numbers)))}


def reply(history: History, number: int, said: ApprovalAnswer, *, now: float) -> ApprovalRequest:
    """Take the answer to question *number*; raise where it is answered already, or the answer is none to it."""
    with history.session(immediate=True) as session:
        question = session.exec(select(ApprovalRequest).where(col(ApprovalRequest.number) == number)).first()
        if question is None:
            left = session.exec(select(col(ApprovalRequest.number)).where(col(ApprovalRequest.answered_at).is_(None))).all()
            raise UnknownApproval(number, tuple(sorted(left)))
        if question.answered_at is not None:
            raise AlreadyAnswered(number, describe(question))
        for node in said.picked:
            if node not in question.nodes:
                raise NodeNotRequested(number, node, tuple(question.nodes))
        question.answered_at, question.answer, question.by, question.words = now, said.answer, said.by, said.words
        question.picked = list(said.picked or question.nodes) if said.answer == ISOLATE else []
        session.add(question)
        return question


def set_flow_run(history: History, number: int, flow_run: str) -> None:
    """Note the paused flow run in which the question is asked."""
    with history.session(immediate=True) as session:
        question = session.exec(select(ApprovalRequest).where(col(ApprovalRequest.number) == number)).one()
        question.flow_run = flow_run
        session.add(question)


def describe(question: ApprovalRequest) -> str:
    """Return what was answered, by whom and why."""
    kept, isolated = ", ".join(question.nodes), ", ".join(question.picked)
    what = {ISOLATE: f"isolate {isolated}", KEEP: f"keep {kept}"}.get(question.answer, question.answer)
    who = f" by {question.by}" if question.by else ""
    return f"{what}{who}{f': {question.words}' if question.words else ''}"


def facts(question: ApprovalRequest) -> dict[str, Any]:
    """Return the question for programs."""
    return question.model_dump(mode="json", exclude={"id"})
