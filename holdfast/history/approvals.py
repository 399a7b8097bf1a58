"""What persons are asked before a program may isolate nodes: put, read, and answered once, whoever answers first."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import func
from sqlmodel import col, select

from holdfast.errors import OperatorError
from holdfast.history.models import Question
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

    def __init__(self, number: int, still_open: tuple[int, ...]) -> None:
        super().__init__(number, still_open)
        self.number, self.still_open = number, still_open

    def __str__(self) -> str:
        present = ", ".join(map(str, self.still_open))
        return f"there is no question {self.number}. " + (f"Open: {present}." if present else "None is open.")


class AnsweredAlready(OperatorError):
    """Somebody answered before."""

    def __init__(self, number: int, how: str) -> None:
        super().__init__(number, how)
        self.number, self.how = number, how

    def __str__(self) -> str:
        return f"question {self.number} is answered already: {self.how}. `holdfast nodes` shows what is held, and how to change it."


class NotAsked(OperatorError):
    """A node was picked that the question is not about."""

    def __init__(self, number: int, node: str, asked: tuple[str, ...]) -> None:
        super().__init__(number, node, asked)
        self.number, self.node, self.asked = number, node, asked

    def __str__(self) -> str:
        return f"question {self.number} is not about {self.node}. Pick of: {', '.join(self.asked)}."


def ask(history: History, question: Question) -> Question:
    """Put *question*, and return it with its number; one about the same nodes that is open already is the one."""
    with history.session(immediate=True) as session:
        present = session.exec(select(Question).where(col(Question.job_id) == question.job_id, col(Question.answered_at).is_(None))).all()
        same = next((one for one in present if one.about == question.about and one.nodes.keys() == question.nodes.keys()), None)
        if same is not None:
            return same
        question.number = (session.exec(select(func.max(col(Question.number)))).one() or 0) + 1
        session.add(question)
        session.flush()
        return question


def still_open(history: History) -> list[Question]:
    """Return the questions that nobody has answered yet, oldest first."""
    with history.session() as session:
        return list(session.exec(select(Question).where(col(Question.answered_at).is_(None)).order_by(col(Question.number))))


def of_job(history: History, job_id: str) -> list[Question]:
    """Return all questions of one job, oldest first."""
    with history.session() as session:
        return list(session.exec(select(Question).where(col(Question.job_id) == job_id).order_by(col(Question.number))))


def of_numbers(history: History, numbers: Collection[int]) -> Mapping[int, Question]:
    """Return the questions of these *numbers*."""
    with history.session() as session:
        return {one.number: one for one in session.exec(select(Question).where(col(Question.number).in_(numbers)))}


def reply(history: History, number: int, said: ApprovalAnswer, *, now: float) -> Question:
    """Take the answer to question *number*; raise where it is answered already, or the answer is none to it."""
    with history.session(immediate=True) as session:
        question = session.exec(select(Question).where(col(Question.number) == number)).first()
        if question is None:
            left = session.exec(select(col(Question.number)).where(col(Question.answered_at).is_(None))).all()
            raise UnknownApproval(number, tuple(sorted(left)))
        if question.answered_at is not None:
            raise AnsweredAlready(number, in_words(question))
        for node in said.picked:
            if node not in question.nodes:
                raise NotAsked(number, node, tuple(question.nodes))
        question.answered_at, question.answer, question.by, question.words = now, said.answer, said.by, said.words
        question.picked = list(said.picked or question.nodes) if said.answer == ISOLATE else []
        session.add(question)
        return question


def note_flow_run(history: History, number: int, flow_run: str) -> None:
    """Note the paused flow run in which the question is asked."""
    with history.session(immediate=True) as session:
        question = session.exec(select(Question).where(col(Question.number) == number)).one()
        question.flow_run = flow_run
        session.add(question)


def in_words(question: Question) -> str:
    """Return what was answered, by whom and why."""
    kept, isolated = ", ".join(question.nodes), ", ".join(question.picked)
    what = {ISOLATE: f"isolate {isolated}", KEEP: f"keep {kept}"}.get(question.answer, question.answer)
    who = f" by {question.by}" if question.by else ""
    return f"{what}{who}{f': {question.words}' if question.words else ''}"


def facts(question: Question) -> dict[str, Any]:
    """Return the question for programs."""
    return question.model_dump(mode="json", exclude={"id"})
