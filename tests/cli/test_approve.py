"""`holdfast node approve`: pending approvals, and one answer to each."""

from __future__ import annotations

import json
import time

import pytest

from holdfast.history import History, approvals
from holdfast.history.models import ApprovalRequest
from tests.cli.conftest import Command
from tests.mentions import mentions, one_line_mentions


def asked(book: History, *nodes: str, about: str = "share") -> int:
    """Have a job request approval for nodes; return the number of the request."""
    against = {node: {"reason": f"gpu-off-bus: Xid 79 on {node}", "seen": 1.0, "evidence": []} for node in nodes}
    now = time.time()
    question = ApprovalRequest(
        number=0,
        cluster="lab",
        job_id="j1",
        job="gpt",
        about=about,
        nodes=against,
        reason=f"may {', '.join(nodes)} be isolated?",
        otherwise="keep",
        at=now,
        until=now + 600,
    )
    return approvals.request(book, question).number


def test_pending_approvals_are_listed_and_answered(here: Command, book: History) -> None:
    """A part of the nodes may be picked; the answer is signed."""
    assert here("node", "approve").stdout == "No approval is pending.\n"
    assert (asked(book, "n1", "n2"), asked(book, "n7")) == (1, 2)
    assert asked(book, "n2", "n1") == 1, "the same is asked once"
    listed = here("node", "approve").stdout
    assert one_line_mentions(listed, "Approval 1", "gpt", "lab")
    assert one_line_mentions(listed, "n2", "gpu-off-bus", "Xid 79")
    assert [one["number"] for one in json.loads(here("node", "approve", "--json").stdout)] == [1, 2]
    said = here("node", "approve", "1", "--node", "n2", "--reason", "smells burnt")
    assert said.returncode == 0
    assert mentions(said.stdout, "approval 1", "gpt", "n2")
    assert not mentions(said.stdout, "n1")
    output = json.loads(here("node", "approve", "2", "--deny", "--json").stdout)
    assert (output["answer"], output["picked"]) == ("keep", [])
    assert here("node", "approve").stdout == "No approval is pending.\n"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("node", "approve", "9"), ("approval 9", "Open: 1")),
        (("node", "approve", "1", "--node", "n5"), ("approval 1", "n5", "n1, n2")),
        (("node", "approve", "2"), ("approval 2", "answered", "n7", "ann")),
        (("node", "approve", "--deny"), ("approval",)),
        (("node", "approve", "1", "--deny", "--node", "n1"), ("--node",)),
    ],
)
def test_an_invalid_answer_is_refused_with_the_cure(here: Command, book: History, words: tuple[str, ...], why: tuple[str, ...]) -> None:
    """And changes nothing."""
    asked(book, "n1", "n2")
    approvals.answer(book, asked(book, "n7"), approvals.ApprovalAnswer(answer="keep", by="ann"), now=time.time())
    refused = here(*words)
    assert refused.returncode == 2
    assert mentions(refused.stderr, *why)
    assert [one.number for one in approvals.pending_approvals(book)] == [1]
