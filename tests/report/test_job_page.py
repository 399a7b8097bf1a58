"""The job page: where the job is and what to do, in the words that people use; and that strangers' text stays text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.history.models import ApprovalRequest
from holdfast.report.job_page import MOST_INCIDENTS, MOST_NODES, JobFacts, description, job_page, progress_text
from holdfast.report.text.incident_text import short, with_time
from holdfast.report.text.markdown import plain
from tests.mentions import mentions, one_line_mentions
from tests.report.test_incident_markdown import shape
from tests.report.test_notifications import ended


def facts(**more: Any) -> JobFacts:
    """Return what is known of a job that trains."""
    known: dict[str, Any] = {
        "job": "gpt", "cluster": "lab", "host": "head", "began": 1000.0, "state": "RUNNING", "reason": "all ranks are at work",
        "step": 120, "until": 400, "loss": 0.00833, "step_time": 2.2, "ranks": {"node-0": (0,), "node-2": (1,)}, "spares": ("node-3",),
        "hot_spares": {"node-3": 1}, "run_link": "http://ui/run", "incident_link": lambda number: f"http://ui/{number}",
    }  # fmt: skip
    return JobFacts(**{**known, **more})


def test_it_says_where_the_job_is() -> None:
    """State, step, time left, loss, nodes, and that there is nothing to do."""
    page = job_page(facts(), 4600.0)
    for line in (
        "# gpt: RUNNING",
        "**Action:** nothing to do.",
        "| State | RUNNING: all ranks are at work |",
        "| Step | 120 of 400 ██████░░░░░░░░░░░░░░ 30.0% |",
        "| Time left | about 10 min |",
        "| Loss | 0.00833 |",
        "| Nodes | 2 nodes with 2 ranks, 1 spare node, 1 hot spare |",
        "| node-0 | rank 0 |",
        "| node-3 | spare node, 1 hot spare |",
    ):
        assert line in page.splitlines()
    assert "[Flow run](http://ui/run)" in page
    assert mentions(progress_text(facts()), "step 120 of 400", "loss 0.00833", "10 min")
    assert progress_text(facts(step=None)) == "no step yet"


def test_incidents_are_a_sentence_each_the_newest_first() -> None:
    """With a link; of many the newest."""
    page = job_page(facts(cases=[ended(number) for number in range(1, 20)], incidents=19), 4600.0)
    lines = [line for line in page.splitlines() if line.startswith("- [Incident ")]
    assert lines[0] == f"- [Incident 19](http://ui/19): {plain(with_time(ended(19)))}"
    assert len(lines) == MOST_INCIDENTS
    assert one_line_mentions(page, 9, "holdfast incidents gpt")
    assert description(facts(cases=[ended()])).endswith(short(ended()))


QUESTION = ApprovalRequest(
    number=7, cluster="lab", job_id="j", job="gpt", about="share", nodes={"node-1": {}}, reason="may it go?", otherwise="keep", at=0.0,
    until=60.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"isolated": {"node-1": "quarantined by job gpt: Xid 79"}}, ("node-1", "quarantined by job gpt: Xid 79")),
        ({"approval": QUESTION}, ("may it go?", "holdfast node approve 7")),
        ({"state": "WAITING", "reason": "no node is free"}, ("no node is free",)),
        ({"state": "FAILED", "cases": [ended(outcome="failed")]}, ("holdfast run gpt.yaml",)),
        ({"state": "FAILED", "reason": "no nodes"}, ("no nodes",)),
        ({"state": "CANCELLED"}, ("holdfast run gpt.yaml",)),
    ],
)
def test_it_says_what_a_person_should_do(more: dict[str, Any], named: tuple[str, ...]) -> None:
    """One line, by what is the matter: the node, the reason, the command."""
    line = next(line for line in job_page(facts(**more), 4600.0).splitlines() if line.startswith("**Action:**"))
    assert all(name in line for name in named)


def test_a_large_job_has_a_page_of_a_bounded_size() -> None:
    """Nodes are counted, and the first ones listed."""
    page = job_page(facts(ranks={f"node-{number}": (number,) for number in range(10_000)}), 4600.0)
    assert one_line_mentions(page, "10,000 nodes", "10,000 ranks")
    assert one_line_mentions(page, f"{10_001 - MOST_NODES:,} more", "holdfast status gpt")
    assert len(page) < 10_000


@given(text=st.text(st.characters(), min_size=1, max_size=30))
def test_no_text_changes_the_shape_of_the_page(text: str) -> None:
    """Reasons and names come from strangers."""
    hostile = (facts(reason=one, isolated={one: one}, ranks={one: (0,)}, host=one) for one in (f"x{text}", "word"))
    shapes = [shape(job_page(one, 4600.0)) for one in hostile]
    assert shapes[0] == shapes[1]
