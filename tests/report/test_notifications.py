"""One message an incident as a rule, news of the same thing under the same name, and never a storm."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast.history.models import Incident, Question
from holdfast.report.messages import MOST, PATIENCE, WINDOW, Desk, Message


def an_incident(number: int = 1, **facts: Any) -> Incident:
    """Return an incident as the history has it."""
    told = {"id": f"i{number}", "kind": "gpu-off-bus", "subject": "node-2", "fault_at": 0.0, "detected_at": 0.1, "because": "Xid 79"}
    return Incident(job_id="j", number=number, generation_before=1, **{**told, **facts})


def ended(number: int = 1, outcome: str = "recovered") -> Incident:
    """Return one that is over."""
    return an_incident(number, outcome=outcome, rung="take-over", downtime_s=0.8, steps_lost=1)


def test_what_is_over_soon_is_one_message() -> None:
    """It tells what was the matter, what was done, and what it cost."""
    desk = Desk("gpt")
    desk.opened(an_incident(), 0.0)
    assert desk.tick(PATIENCE - 1) == []
    (told,) = desk.closed(ended(), 1.0)
    assert (told.id, told.state, told.attention) == ("incident i1", "over", False)
    assert told.subject == "[gpt] incident 1, gpu-off-bus of node-2: recovered"
    assert told.text.splitlines() == [
        "Xid 79",
        "",
        "take-over: training again after 800 ms, 1 step computed again",
        "",
        "`holdfast show 1 --job gpt` tells all of it.",
    ]
    assert desk.tick(1e6) == []


def test_what_lasts_is_told_once_while_it_does_and_its_end_takes_that_messages_place() -> None:
    """Whatever was tried in between."""
    desk = Desk("gpt")
    desk.opened(an_incident(), 0.0)
    assert desk.moved("WAITING", "no node is free", 2.0) == []
    (told,) = desk.tick(PATIENCE)
    assert (told.state, told.attention) == ("open", True)
    assert told.text.endswith("Now: no node is free")
    assert desk.tick(1e5) == []
    (over,) = desk.closed(ended(outcome="gave-up"), 2e5)
    assert (over.id, over.state, over.attention) == (told.id, "over", True)


def test_a_question_and_the_jobs_end_are_told_at_once() -> None:
    """A job that failed needs a person, one that completed does not."""
    desk = Desk("gpt")
    question = Question(
        number=7, cluster="c", job_id="j", job="gpt", about="share", nodes={"n1": {}, "n2": {}}, because="may they go?", otherwise="keep",
        at=0.0, until=60.0,
    )  # fmt: skip
    (told,) = desk.asked(question, "`holdfast approve 7`")
    assert (told.attention, told.subject) == (True, "[gpt] question 7: may n1, n2 be isolated?")
    assert "`holdfast approve 7`" in told.text
    (answered,) = desk.answered(question, "keep n1, n2 by ann")
    assert (answered.id, answered.attention, answered.text) == (told.id, False, "Answered: keep n1, n2 by ann")
    assert [one.attention for after in ("RUNNING", "COMPLETED", "CANCELLED", "FAILED") for one in desk.moved(after, "so", 1.0)] == [
        False,
        False,
        True,
    ]


@given(st.lists(st.floats(0.1, 400.0), max_size=60))
def test_no_storm_and_nothing_lost(gaps: list[float]) -> None:
    """However many incidents come and go, few messages are sent in any window, and every incident is in one."""
    desk, now, sent = Desk("gpt"), 0.0, list[tuple[float, Message]]()
    for number, gap in enumerate(gaps, 1):
        now += gap
        sent += [(now, one) for one in desk.tick(now)]
        desk.opened(an_incident(number), now)
        sent += [(now, one) for one in desk.closed(ended(number), now)]
    sent += [(now, one) for one in desk.moved("COMPLETED", "done", now)]
    assert sent[-1][1].state == "ended"
    news = sent[:-1]
    for at, _ in news[:-1]:
        assert sum(at <= other < at + WINDOW for other, _ in news[:-1]) <= MOST + 1
    words = "\n".join(one.subject + "\n" + one.text for _, one in news)
    assert all(f"incident {number}, gpu-off-bus" in words for number in range(1, len(gaps) + 1))
