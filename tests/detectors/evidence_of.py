"""Evidence with what a test does not care about filled in."""

from __future__ import annotations

from typing import Any

from holdfast.detectors.catalogue import Fault
from holdfast.detectors.diagnosis import see
from holdfast.detectors.evidence import AgentUnreachable, Evidence, HangLimits, RankProgress, WorkerException, WorkerExit


def an_end(node: str = "n0", rank: int = 0, at: float = 0.0, **facts: Any) -> WorkerExit:
    """Return the end of a worker at step 7."""
    facts.setdefault("step", 7)
    return WorkerExit(node=node, rank=rank, at=at, **facts)


def a_killed(node: str = "n0", rank: int = 0, at: float = 0.0, **facts: Any) -> WorkerExit:
    """Return the end of a worker by SIGKILL."""
    return an_end(node, rank, at, signal=9, **facts)


def an_error(node: str = "n0", rank: int = 0, at: float = 0.0, *, type: str = "ValueError", line: int = 3, **facts: Any) -> WorkerExit:  # noqa: A002
    """Return the end of a worker by an exception of *type* that its script raised in *line*."""
    exception = WorkerException(
        type=type,
        message=facts.pop("message", "bad shape"),
        traceback=f'  File "train.py", line {line}, in step\n',
        errno=facts.pop("errno", None),
        peer_lost=facts.pop("peer_lost", False),
    )
    return an_end(node, rank, at, code=1, raised=exception, **facts)


def an_echo(node: str = "n1", rank: int = 1, at: float = 0.1, **facts: Any) -> WorkerExit:
    """Return the end of a worker that lost a peer."""
    return an_error(node, rank, at, type="RuntimeError", message="Connection closed by peer", peer_lost=True, **facts)


def a_silence(node: str = "n0", at: float = 0.0, **facts: Any) -> AgentUnreachable:
    """Return the silence of an agent whose node does not answer either."""
    return AgentUnreachable(**{"node": node, "at": at, "why": "its connection ended", "node_answers": False, **facts})


def a_rank(node: str = "n0", step: int = 40, age: float = 0.1, **facts: Any) -> RankProgress:
    """Return how far a rank is."""
    return RankProgress(node=node, step=step, age=age, **facts)


def seen(*evidence: Evidence, **limits: Any) -> list[Fault]:
    """Return the faults in *evidence* under *limits*."""
    return see(evidence, HangLimits(**limits))


def the_fault(*evidence: Evidence, **limits: Any) -> Fault:
    """Return the one fault in *evidence*."""
    (fault,) = seen(*evidence, **limits)
    return fault
