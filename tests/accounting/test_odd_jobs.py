"""Histories of odd jobs: each can be accounted for, shown and drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.accounting.bill import bill
from holdfast.accounting.ledger import SECOND, TimeCategory
from holdfast.report import cost_table
from holdfast.report.pages.configuration import configuration
from holdfast.report.pages.cost_page import drawn
from holdfast.report.text.wording import visible
from tests.report import filled, odd
from tests.report.parsed import Page


@pytest.mark.parametrize("name", sorted(odd.ODD))
def test_an_odd_job_is_accounted_for_and_drawn(name: str, tmp_path: Path) -> None:
    """No step, no loss, no end, a failure, sixty incidents, three hundred nodes: the parts add up, and the page shows them."""
    history = filled.open_history(tmp_path)
    job = odd.ODD[name](history)
    found = bill(history, job, now=filled.BEGAN + 90_000)
    history.close()
    end = found.jobs[0].job.end if found.jobs else job.at
    assert found.ledger.sum().wall == round(end * SECOND) - round(job.at * SECOND)
    assert sum(one.hours for one in found.losses) == pytest.approx(found.hours(TimeCategory.LOST))
    page = Page(drawn(found, job.name, "html", configuration(job, "")).decode()).root
    assert cost_table.counted(found) in page.words
    assert all(
        visible(" ".join(row[0].split())) in page.words
        for _, rows in (cost_table.categories(found), cost_table.kinds(found))
        for row in rows[:50]
    )


def test_words_of_strangers_cannot_alter_the_page(tmp_path: Path) -> None:
    """A job and a kind of fault from another version are text."""
    history = filled.open_history(tmp_path)
    on = filled.launched(history, name="<script>alert(1)</script>")
    on.train(20)
    root = on.fault("<b>kind</b>", "node x", node="<i>n</i>", root=True)
    on.suffer(1, [root], detect=1.0, reason="strange")
    job = on.write()
    found = bill(history, job, now=filled.BEGAN + 90_000)
    history.close()
    page = drawn(found, job.name, "html", configuration(job, "")).decode()
    assert "<script>" not in page
    assert "<b>kind" not in page
    assert "&lt;b&gt;kind" in page
