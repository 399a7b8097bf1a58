"""Approvals that a job requests from people, and their answers.

Both go through the history in a thread of their own, as no recovery may wait for a database. A request has a deadline: when nobody has
answered by then it gets its default answer (`otherwise`), whether the history is reachable or not.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.detectors.codec import packed
from holdfast.errors import OperatorError
from holdfast.history import History, approvals, queries
from holdfast.history.approvals import ISOLATE, KEEP, WITHDRAWN, ApprovalAnswer
from holdfast.history.errors import RetryingHistory
from holdfast.history.models import ApprovalRequest, Job
from holdfast.policies.nodes.node_faults import NodeFault

INTERVAL: Final = 1.0
"""Seconds between two checks for answers."""
CLOSE_SECONDS: Final = 5.0
"""How long the end of a job may wait until its requests are withdrawn."""
SHARE: Final = "share"
"""A request to isolate more nodes than programs may."""
LEAST: Final = "least"
"""A request to isolate nodes although the job then has fewer than it needs."""

Publish = Callable[[str, dict[str, Any]], None]


@dataclass(slots=True)
class Approvals:
    """The approval requests of one job."""

    history: History
    job: Job
    seconds: float
    """How long a request stays open; 0: nothing is requested."""
    record_event: Callable[[str], None]
    publish: Publish
    _new: deque[ApprovalRequest] = field(default_factory=deque)
    _open: dict[int, ApprovalRequest] = field(default_factory=dict)
    _answered: list[ApprovalRequest] = field(default_factory=list)
    _withdraw: set[tuple[str, frozenset[str]]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _wake: threading.Event = field(default_factory=threading.Event)
    _closed: threading.Event = field(default_factory=threading.Event)
    _job_ended: bool = False
    _thread: threading.Thread | None = None
    _retry: RetryingHistory = field(default_factory=lambda: RetryingHistory("approvals"))

    # -- the job's side -----------------------------------------------------------------------------------------------

    def ask(self, about: str, against: Iterable[NodeFault], reason: str, *, otherwise: str) -> None:
        """Request approval to isolate the nodes with the faults *against*; one request at a time is open for the same nodes."""
        nodes = {
            one.node: {"reason": one.reason, "seen": one.seen, "evidence": list(one.evidence), "faults": packed(one.faults)}
            for one in against
        }
        now = time.time()
        with self._lock:
            if any(one.about == about and one.nodes.keys() == nodes.keys() for one in (*self._new, *self._open.values())):
                return
            self._withdraw.discard((about, frozenset(nodes)))
            self._new.append(
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
        """Return the requests of that kind that were answered since the last call."""
        with self._lock:
            found = [one for one in self._answered if one.about == about]
            self._answered = [one for one in self._answered if one.about != about]
        return found

    def is_open(self, about: str) -> bool:
        """Return whether a request of that kind waits for its answer."""
        with self._lock:
            return any(one.about == about for one in (*self._new, *self._open.values()))

    def withdraw(self, about: str) -> None:
        """Withdraw the open requests of that kind: they are settled otherwise, or cannot be carried out any more."""
        with self._lock:
            self._new = deque(one for one in self._new if one.about != about)
            self._withdraw |= {(one.about, frozenset(one.nodes)) for one in self._open.values() if one.about == about}
        self._wake.set()

    def begin(self) -> None:
        """Load the requests that an earlier controller left open, and follow the answers from now on."""
        self._thread = threading.Thread(target=self._follow, name="approvals", daemon=True)
        self._thread.start()

    def close(self, *, ended: bool) -> None:
        """Stop; withdraw the open requests if the job has *ended*."""
        self._job_ended = ended
        self._closed.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    # -- the history's side -------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        self._retry(self._load)
        while not self._closed.is_set():
            self._wake.wait(INTERVAL)
            self._wake.clear()
            self._retry(self._synchronize)
            self._answer_overdue()
        if self._job_ended:
            self._retry(self._withdraw_all)

    def _load(self) -> None:
        decided = max((one.at for one in queries.decisions(self.history, self.job.id)), default=0.0)
        known = approvals.of_job(self.history, self.job.id)
        with self._lock:
            self._open |= {one.number: one for one in known if one.answered_at is None}
            self._answered += [one for one in known if one.answer not in {"", WITHDRAWN} and (one.answered_at or 0.0) > decided]

    def _synchronize(self) -> None:
        while self._new:
            put = approvals.request(self.history, self._new[0])
            with self._lock:
                if self._new and self._new[0].nodes == put.nodes:
                    self._new.popleft()
                self._open[put.number] = put
            self.record_event(f"approval {put.number}: {put.reason}. {how_to_answer(put)}")
            self.publish("asked", {"approval": put})
        for number in [one.number for one in self._open.values() if (one.about, frozenset(one.nodes)) in self._withdraw]:
            self._reply(number, ApprovalAnswer(answer=WITHDRAWN, comment="no answer is needed any more"))
        self._withdraw.clear()
        for number, row in approvals.by_number(self.history, list(self._open)).items():
            if row.answered_at is not None:
                self._take_answer(number, row)

    def _take_answer(self, number: int, row: ApprovalRequest) -> None:
        with self._lock:
            del self._open[number]
            if row.answer != WITHDRAWN:
                self._answered.append(row)
        self.record_event(f"approval {number} is answered: {approvals.describe(row)}")
        self.publish("answered", {"approval": row})

    def _answer_overdue(self) -> None:
        """Give requests past their deadline the default answer; without the history, for this controller only."""
        now = time.time()
        for number, one in list(self._open.items()):
            if one.until > now:
                continue
            reply = ApprovalAnswer(answer=one.otherwise, comment="nobody answered in time")
            try:
                self._reply(number, reply)
            except Exception:  # noqa: BLE001 (the history is unreachable: the job continues by the default answer)
                picked = list(one.nodes) if one.otherwise == ISOLATE else []
                answer = {"answered_at": now, "answer": one.otherwise, "picked": picked, "comment": reply.comment}
                self._take_answer(number, one.model_copy(update=answer))

    def _reply(self, number: int, reply: ApprovalAnswer) -> None:
        with suppress(OperatorError):  # a person was faster: the next check finds the answer
            self._take_answer(number, approvals.answer(self.history, number, reply, now=time.time()))

    def _withdraw_all(self) -> None:
        for number in list(self._open):
            self._reply(number, ApprovalAnswer(answer=WITHDRAWN, comment="the job has ended"))


def how_to_answer(request: ApprovalRequest) -> str:
    """Return the commands that answer the request, and what happens when nobody does."""
    default = {KEEP: "they stay", ISOLATE: "they are isolated"}[request.otherwise]
    when = time.strftime("%H:%M:%S", time.localtime(request.until))
    answer = f"holdfast node approve {request.number}"
    return f"`{answer}` or `{answer} --deny`; if nobody answers by {when}, {default}"
