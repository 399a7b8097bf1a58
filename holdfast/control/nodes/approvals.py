"""What a job's flow asks persons, and what they answer: through the history, by a thread, as no recovery may wait for a database.

A question has an end. When nobody has answered by then it is answered as it says itself (`otherwise`), whether the history is there or not.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from detectors.codec import packed
from holdfast.errors import OperatorError
from holdfast.history import History, approvals, queries
from holdfast.history.approvals import ISOLATE, KEEP, WITHDRAWN, ApprovalAnswer
from holdfast.history.models import ApprovalRequest, Job
from holdfast.history.retry import RetryingHistory
from policies.node_faults import NodeFault

EVERY: Final = 1.0
"""Seconds between two looks for answers."""
LAST: Final = 5.0
"""Seconds that the end of a job may wait until its questions are withdrawn."""
SHARE: Final = "share"
LEAST: Final = "least"

Tell = Callable[[str, dict[str, Any]], None]


@dataclass(slots=True)
class Approvals:
    """The questions of one job."""

    history: History
    job: Job
    seconds: float
    """How long a question stays open; 0: nobody is asked."""
    record_event: Callable[[str], None]
    tell: Tell
    _wanted: deque[ApprovalRequest] = field(default_factory=deque)
    _open: dict[int, ApprovalRequest] = field(default_factory=dict)
    _answered: list[ApprovalRequest] = field(default_factory=list)
    _withdraw: set[tuple[str, frozenset[str]]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _wake: threading.Event = field(default_factory=threading.Event)
    _over: threading.Event = field(default_factory=threading.Event)
    _ended: bool = False
    """The job is over: its questions need no answer any more."""
    _thread: threading.Thread | None = None
    _try: RetryingHistory = field(default_factory=lambda: RetryingHistory("approvals"))

    # -- asking -------------------------------------------------------------------------------------------------------

    def ask(self, about: str, against: Iterable[NodeFault], reason: str, *, otherwise: str) -> None:
        """Ask whether nodes may be isolated, for what speaks *against* them; a question about the same nodes is put once."""
        nodes = {
            one.node: {
                "reason": one.reason,
                "seen": one.seen,
                "evidence": list(one.evidence),
                "faults": packed(one.faults),
            }
            for one in against
        }
        now = time.time()
        with self._lock:
            if any(one.about == about and one.nodes.keys() == nodes.keys() for one in (*self._wanted, *self._open.values())):
                return
            self._withdraw.discard((about, frozenset(nodes)))
            self._wanted.append(
                ApprovalRequest(
                    number=0,
                    cluster=self.job.cluster["name"],
                    job_id=self.job.id,
                    job=self.job.name,
                    about=about,
                    nodes=nodes,
                    reason=reason,
                    otherwise=otherwise,
                    at=now,
                    until=now + self.seconds,
                )
            )
        self._wake.set()

    def answers(self, about: str) -> list[ApprovalRequest]:
        """Return the answers to questions of that kind that came since this was last asked."""
        with self._lock:
            found = [one for one in self._answered if one.about == about]
            self._answered = [one for one in self._answered if one.about != about]
        return found

    def is_open(self, about: str) -> bool:
        """Tell whether a question of that kind waits for its answer."""
        with self._lock:
            return any(one.about == about for one in (*self._wanted, *self._open.values()))

    def withdraw(self, about: str) -> None:
        """Ask no more what is open of that kind: it has come about otherwise, or cannot any more."""
        with self._lock:
            self._wanted = deque(one for one in self._wanted if one.about != about)
            self._withdraw |= {(one.about, frozenset(one.nodes)) for one in self._open.values() if one.about == about}
        self._wake.set()

    # -- the history --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Take up the questions that a flow before left open, and follow them from now on."""
        self._thread = threading.Thread(target=self._follow, name="approvals", daemon=True)
        self._thread.start()

    def close(self, *, ended: bool) -> None:
        """Look no more; withdraw what is open when the job has *ended*."""
        self._ended = ended
        self._over.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(LAST)

    def _follow(self) -> None:
        self._try(self._adopt)
        while not self._over.is_set():
            self._wake.wait(EVERY)
            self._wake.clear()
            self._try(self._look)
            self._run_out()
        if self._ended:
            self._try(self._withdraw_all)

    def _adopt(self) -> None:
        decided = max((one.at for one in queries.decisions(self.history, self.job.id)), default=0.0)
        known = approvals.of_job(self.history, self.job.id)
        with self._lock:
            self._open |= {one.number: one for one in known if one.answered_at is None}
            self._answered += [one for one in known if one.answer not in {"", WITHDRAWN} and (one.answered_at or 0.0) > decided]

    def _look(self) -> None:
        while self._wanted:
            put = approvals.ask(self.history, self._wanted[0])
            with self._lock:
                if self._wanted and self._wanted[0].nodes == put.nodes:
                    self._wanted.popleft()
                self._open[put.number] = put
            self.record_event(f"question {put.number}: {put.reason}. {how_to_answer(put)}")
            self.tell("asked", {"question": put})
        for number in [one.number for one in self._open.values() if (one.about, frozenset(one.nodes)) in self._withdraw]:
            self._reply(number, ApprovalAnswer(answer=WITHDRAWN, words="it need not be answered any more"))
        self._withdraw.clear()
        for number, row in approvals.by_number(self.history, list(self._open)).items():
            if row.answered_at is not None:
                self._take(number, row)

    def _take(self, number: int, row: ApprovalRequest) -> None:
        with self._lock:
            del self._open[number]
            if row.answer != WITHDRAWN:
                self._answered.append(row)
        self.record_event(f"question {number} is answered: {approvals.describe(row)}")
        self.tell("answered", {"question": row})

    def _run_out(self) -> None:
        """Answer what nobody has answered in time, as the question itself says; with no history at hand, for this flow alone."""
        now = time.time()
        for number, one in list(self._open.items()):
            if one.until > now:
                continue
            said = ApprovalAnswer(answer=one.otherwise, words="nobody answered in time")
            try:
                self._reply(number, said)
            except Exception:  # noqa: BLE001 (the history is away: the job goes on by what would have been written)
                picked = list(one.nodes) if one.otherwise == ISOLATE else []
                told = {"answered_at": now, "answer": one.otherwise, "picked": picked, "words": said.words}
                self._take(number, one.model_copy(update=told))

    def _reply(self, number: int, said: ApprovalAnswer) -> None:
        with suppress(OperatorError):  # somebody was first: the next look finds the answer
            self._take(number, approvals.reply(self.history, number, said, now=time.time()))

    def _withdraw_all(self) -> None:
        for number in list(self._open):
            self._reply(number, ApprovalAnswer(answer=WITHDRAWN, words="the job has ended"))


def how_to_answer(question: ApprovalRequest) -> str:
    """Say what a person can do, and what happens when nobody does."""
    what = {KEEP: "they stay", ISOLATE: "they are isolated"}[question.otherwise]
    when = time.strftime("%H:%M:%S", time.localtime(question.until))
    return f"`holdfast approve {question.number}` or `holdfast approve {question.number} --refuse`; if nobody answers by {when}, {what}"
