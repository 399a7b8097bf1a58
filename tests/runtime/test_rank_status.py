"""Where real ranks say that they stand, and what follows from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast.control.faults.rank_status import parse_rank_status
from holdfast.detectors.evidence import RankProgress
from holdfast.detectors.training.hang_analysis import explain
from holdfast.runtime.groups.operations import MAX_PENDING, InFlightOperations
from holdfast.runtime.telemetry.rank_status import QUERIES, answer_queries
from tests.runtime.flow_double import FlowDouble, Job


def standings(flow: FlowDouble) -> dict[int, dict[str, Any]]:
    """Query all ranks; return the status of each."""
    before = len(flow.of("status"))
    for rank in range(flow.ranks):
        flow.send(rank, {"do": "roll-call"})
    flow.until(lambda: len(flow.of("status")) == before + flow.ranks, "the standings of all")
    messages = flow.of("status")[before:]
    return {next(rank for rank in range(flow.ranks) if flow.pids[rank] == one["pid"]): one for one in messages}


def test_ranks_report_their_status_while_they_wait_and_while_they_are_slow(job: Job) -> None:
    """The one that did not come is named with the line in which it sleeps; once it has come nothing is in work any more."""
    flow = job(script="rank_status", ranks=3)
    for rank in range(3):
        flow.receive("here", rank)
    flow.until(lambda: all(standings(flow)[rank]["groups"][0]["counts"] == {"": 2} for rank in (0, 2)), "the waits of ranks 0 and 2")
    messages = standings(flow)
    assert messages[1]["groups"][0]["counts"] == {"": 1}
    assert messages[1]["groups"][0]["pending"] == []
    assert messages[1]["place"].endswith("in dawdle")
    waiting = messages[0]["groups"][0]["pending"][0]
    assert {**waiting, "seconds": 0} == {"way": "", "number": 2, "name": "allreduce", "size": 5, "kind": "float32", "seconds": 0}
    assert messages[0]["waits"] == "gradients"
    finding = explain({rank: RankProgress(node="n", step=0, age=1.0, status=parse_rank_status(one)) for rank, one in messages.items()})
    assert finding is not None
    assert (finding.kind, finding.rank) == ("", 1)
    flow.pass_gate()
    assert [flow.receive("done", rank)["summed"] for rank in range(3)] == [[3.0] * 5] * 3


def test_operations_are_counted_by_way_and_dropped_when_nothing_waits_for_them() -> None:
    """Sends that are never waited for would fill the memory."""
    in_flight, one = InFlightOperations(), [torch.ones(4, dtype=torch.bfloat16)]
    marks = [in_flight.enter(name, one) for name in ("allreduce", "send>1", "send>1", "recv<2", "broadcast")]
    assert in_flight.counts == {"": 2, "send>1": 2, "recv<2": 1}
    assert [(mark.channel, mark.number, mark.size, mark.dtype) for mark in marks][-1] == ("", 2, 4, torch.bfloat16)
    for mark in marks:
        in_flight.leave(mark)
    assert in_flight.pending == {}
    for _ in range(3 * MAX_PENDING):
        in_flight.enter("send>1", one)
    assert len(in_flight.pending) == MAX_PENDING
    assert in_flight.counts["send>1"] == 2 + 3 * MAX_PENDING
    assert in_flight.enter("barrier", []).size == 0


def test_a_query_that_fails_does_not_end_the_receiving_of_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong in an answer, the next command must be received."""
    asked: list[Any] = []
    monkeypatch.setitem(QUERIES, "sums", lambda question: asked.append(1 // question["step"]))
    receive = answer_queries(asked.append)
    for order in ({"do": "sums", "step": 0}, {"do": "sums", "step": 1}, {"do": "abandon"}):
        receive(order)
    assert asked == [1, {"do": "abandon"}]


def test_torch_has_the_files_that_identify_a_wait_by_its_stack() -> None:
    """For groups that are torch's own: its functions live where they are looked for."""
    assert "/torch/distributed/" in dist.all_reduce.__wrapped__.__code__.co_filename  # type: ignore[attr-defined]
    assert torch.autograd.graph.__file__.endswith("/torch/autograd/graph.py")
