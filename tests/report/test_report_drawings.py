"""The drawings: what they say in words, and that they hold whatever a job can be."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.control.state.incidents import PHASES
from holdfast.history.models import Phase
from holdfast.history.store import History
from holdfast.report.pages.charts.axes import time_ticks
from holdfast.report.pages.job_history import read_history
from holdfast.report.pages.report_page import page
from holdfast.report.phases import KINDS, OTHER, kind_of, parts
from tests.mentions import mentions
from tests.report import filled, odd
from tests.report.parsed import Element, Page

Parsed = Callable[[str], Element]


def drawing(root: Element, name: str) -> Element:
    """Return the drawing called *name*."""
    (found,) = [one for one in root.find("svg", class_="drawing") if one.attributes["aria-labelledby"].startswith(f"{name}-title ")]
    return found


def letters(drawn: Element) -> list[str]:
    """Return the words that are written in a drawing."""
    return [one.words for one in drawn.find("text")]


def tips(drawn: Element) -> list[str]:
    """Return the words that show when the mouse rests on something."""
    groups = [*drawn.find("g"), *drawn.find("a")]
    return [one.words for group in groups for one in group.inside if isinstance(one, Element) and one.tag == "title"]


@pytest.mark.parametrize("name", ["time-wide", "time-narrow", "steps-wide", "steps-narrow"])
def test_the_loss_is_drawn_with_its_incidents_and_generations(parsed: Parsed, name: str) -> None:
    """Numbers of incidents and generations are written, and an incident says what it was."""
    drawn = drawing(parsed("three_incidents"), name)
    written = letters(drawn)
    assert {"1", "2", "3"} <= set(written)
    assert {"g2", "g3"} <= set(written)
    assert any(mentions(tip, "incident 3", "node-lost", "node-1") for tip in tips(drawn))
    assert mentions(drawn.find("desc")[0].text, "5.576", "1.411", "3 incidents", "71 steps")


def test_the_downtime_of_each_incident_is_drawn_over_time(parsed: Parsed) -> None:
    """An open incident is down until now."""
    said = tips(drawing(parsed("three_incidents"), "time-wide"))
    assert "incident 1: down for 1.12 s" in said
    assert any(words.startswith("incident 2: down for") for words in tips(drawing(parsed("recovering"), "time-wide")))


def test_steps_that_were_given_up_are_drawn_apart_from_those_that_count(parsed: Parsed) -> None:
    """Both lines are there, in both plots; without a rollback there is one."""
    for name, again in (("three_incidents", True), ("broken_losses", False)):
        for plot in ("time-wide", "steps-wide"):
            strokes = {
                style for one in drawing(parsed(name), plot).find("path") if "stroke: var" in (style := one.attributes.get("style", ""))
            }
            assert any("var(--loss)" in style for style in strokes)
            assert any("var(--again)" in style for style in strokes) is again


def test_each_bar_says_each_phase_and_its_whole(parsed: Parsed) -> None:
    """With its term, its time and its share."""
    drawn = drawing(parsed("three_incidents"), "bars-wide")
    said = tips(drawn)
    assert len(said) == 3 * (8 + 1), "eight phases and a badge"
    assert "T2 communication: 310 ms (10.0%)" in said
    assert {"worker-sigkill", "worker-stopped", "node-lost", "3.10 s", "5.42 s", "3.08 s", "902 ms"} <= set(letters(drawn))


def test_one_very_long_recovery_is_cut_so_that_the_others_can_be_seen(parsed: Parsed) -> None:
    """A day of waiting among seconds: it is drawn to the edge, and says its length."""
    drawn = drawing(parsed("many_incidents"), "bars-wide")
    assert "→ 1 d 00 h" in letters(drawn)
    assert "40 s" in letters(drawn)


def test_the_timeline_has_a_lane_for_the_job_and_for_each_node(parsed: Parsed) -> None:
    """States say why, bars say which ranks, a lost node is marked."""
    drawn = drawing(parsed("three_incidents"), "lanes-wide")
    assert {"job", "node-0", "node-1", "node-2", "g1 · 0–1", "g4 · 2–3"} <= set(letters(drawn))  # noqa: RUF001 (ranges)
    said = tips(drawn)
    assert any(words.startswith("resuming for") and words.endswith(": node-2 for node-1") for words in said)
    assert "node-2 held ranks 2–3 in generation 4" in said  # noqa: RUF001 (a range)
    assert any(words.startswith("node-1 lost: ") for words in said)


def test_of_many_nodes_those_that_changed_are_drawn(parsed: Parsed) -> None:
    """Sixteen lanes, and the one that was lost and the one that came are among them."""
    said = tips(drawing(parsed("many_nodes"), "lanes-wide"))
    nodes = {words.split(" ", maxsplit=1)[0] for words in said if " held ranks " in words}
    assert len(nodes) == 16
    assert {"gpu-cluster-a-rack-00-node-0000", "gpu-cluster-a-rack-99-node-9999"} <= nodes


def test_incidents_too_near_each_other_share_a_badge(parsed: Parsed) -> None:
    """Every incident is in one badge and in one only, in order."""
    written = drawing(parsed("many_incidents"), "steps-wide").find("text")
    badges = [one.words for one in written if "var(--on-incident)" in one.attributes["style"]]
    covered = [number for words in badges for ends in [words.split("–")] for number in range(int(ends[0]), int(ends[-1]) + 1)]  # noqa: RUF001
    assert covered == list(range(1, 61))
    assert 4 < len(badges) < 60


def test_a_close_up_is_drawn_for_each_incident_that_cost_steps(parsed: Parsed) -> None:
    """Before and after lie on each other; there is none where no step has a loss."""
    root = parsed("three_incidents")
    assert mentions(drawing(root, "near-1").find("desc")[0].text, "step 122", "step 100")
    assert not parsed("unmanaged_steps").find("div", class_="inside")[0].find("svg", class_="drawing")


def test_a_long_run_is_a_small_page_that_shows_its_one_spike(history: History) -> None:
    """The spike, one step of many thousands, is the highest point of the line; steps around the incident are drawn one by one."""
    job = odd.long_run(history, 60_000)
    story = read_history(history, job, now=filled.BEGAN)
    assert story.steps.loss.max() == odd.SPIKE
    source = page(story)
    assert len(source.encode()) < 500_000
    drawn = drawing(Page(source).root, "steps-wide")
    lines = [one.attributes["d"] for one in drawn.find("path") if "opacity: 0.4" in one.attributes.get("style", "")]
    heights = [float(y) for line in lines for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", line)]
    assert len(heights) > 1000
    assert heights.count(min(heights)) == 1, "up is small in a drawing"


LETTER_PIXELS = 6.8
TIME_OF_DAY_PIXELS = 68
"""What the label below a tick takes: `23:59:59` in letters a little wider."""


@given(seconds=st.floats(1e-5, 1e10), pixels=st.integers(200, 2000))
def test_a_time_axis_is_neither_crowded_nor_ambiguous(seconds: float, pixels: int) -> None:
    """It starts at 0, no two marks say the same, and each has its room."""
    ticks = time_ticks(seconds, pixels)
    places, words = zip(*ticks, strict=True)
    assert words[0] == "0"
    assert len(set(words)) == len(words)
    assert list(places) == sorted(places)
    assert places[-1] <= seconds * 1.000001
    gaps = [(after - before) / seconds * pixels for before, after in pairwise(places)]
    assert all(gap * 1.000001 >= LETTER_PIXELS * len(word) for gap in gaps for word in words)
    assert all(gap * 1.000001 >= TIME_OF_DAY_PIXELS for gap in gaps)


def test_every_phase_that_a_controller_records_has_a_kind() -> None:
    """The names are written in one place and explained in another."""
    assert {kind.name for kind in KINDS} == set(PHASES)


@pytest.mark.parametrize(("recorded", "name"), [("detect", "detect"), ("warm-up", "warm-up"), ("coffee", "other"), ("", "other")])
def test_a_phase_that_is_not_known_keeps_its_name(recorded: str, name: str) -> None:
    """It is drawn as something else."""
    assert kind_of(recorded).name == name
    (part,) = parts([Phase(job_id="j", incident_id="i", position=0, name=recorded, seconds=2.0)])
    assert part.label == (recorded if part.kind is OTHER else part.kind.label)
    assert part.share == 1.0


def test_the_terms_of_recovery_time_are_each_there_once() -> None:
    """T = T0 + T1 + T2 + T3 + T4."""
    assert sorted(kind.term for kind in KINDS if kind.term) == ["T0", "T1", "T2", "T3", "T4"]
