"""The page: what it holds, that it stands alone, and that nothing a stranger wrote can act in it."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from sqlmodel import select

from holdfast.accounting.bill import Bill, Mean, bill
from holdfast.accounting.ledger import Ledger, TimeCategory
from holdfast.accounting.losses import FailureCosts, losses
from holdfast.accounting.timeline_reader import COMPUTE
from holdfast.detectors.catalogue import CATALOGUE
from holdfast.errors import NotWritable
from holdfast.history.models import FaultRecord, Generation, Incident, IncidentDiagnosis, Job, JobEvent, JobTransition, NodeStatusChange
from holdfast.history.store import History
from holdfast.report import memory, write_cost, write_report
from holdfast.report.case import IncidentCase
from holdfast.report.cost_table import hours
from holdfast.report.next_steps import next_steps
from holdfast.report.pages.charts.drawing import SvgTheme
from holdfast.report.pages.charts.throughput import rate_changes
from holdfast.report.pages.charts.timeline import job_spans
from holdfast.report.pages.job_history import JobHistory, StepColumns, read_history
from holdfast.report.pages.report_page import page, tiles
from holdfast.report.phases import parts
from holdfast.report.text import wording
from holdfast.report.text.wording import count, duration, on_target, recovery_details, share
from tests.cli.written_history import an_incident_diagnosis
from tests.mentions import mentions
from tests.report import filled, odd
from tests.report.parsed import Element, Page

Parsed = Callable[[str], Element]
Pages = Callable[[str], str]
EVERY = ["three_incidents", *odd.ODD]


def sections(root: Element) -> dict[str, Element]:
    """Return the sections of a page by the id of their heading."""
    return {one.attributes["aria-labelledby"]: one for one in root.find("section")}


@pytest.mark.parametrize("name", EVERY)
def test_every_page_is_whole_and_stands_alone(pages: Pages, parsed: Parsed, name: str) -> None:
    """Well nested, each id once, each reference met; no script, and nothing fetched from anywhere."""
    root = parsed(name)
    ids = Counter(one.attributes["id"] for one in root.walk() if "id" in one.attributes)
    assert [one for one, times in ids.items() if times > 1] == []
    for one in root.walk():
        assert set(one.attributes.get("aria-labelledby", "").split()) <= ids.keys()
        assert not any(attribute.startswith("on") for attribute in one.attributes)
        for attribute in ("src", "href", "data", "action", "srcset", "poster"):
            target = one.attributes.get(attribute, "#")
            if (one.tag, attribute) == ("a", "href") and re.fullmatch(r"https?://[\w.:-]+/runs/flow-run/[\w-]+", target):
                continue  # the page of its flow run, which a person may follow; the page itself fetches nothing
            assert target == "data:," or (target.startswith("#") and (target == "#" or target[1:] in ids)), (one.tag, target)
    assert not {one.tag for one in root.walk()} & {"script", "iframe", "img", "object", "embed", "base", "form"}
    style = " ".join(one.attributes.get("style", "") for one in root.walk()) + pages(name).split("</style>", maxsplit=1)[0]
    assert "@import" not in style
    assert all(inner.startswith("#") and inner[1:] in ids for inner in re.findall(r"url\(['\"]?([^)'\"]*)", style))


@pytest.mark.parametrize("name", EVERY)
def test_every_page_is_small_and_every_drawing_is_described_and_themed(pages: Pages, parsed: Parsed, name: str) -> None:
    """A drawing has a title and a description, its words are text, and its colours are variables that the style sheet knows."""
    source, root = pages(name), parsed(name)
    assert len(source.encode()) < 2_000_000
    for drawn in root.find("svg", class_="drawing"):
        assert [child.tag for child in drawn.inside if isinstance(child, Element)][:2] == ["title", "desc"]
        assert all(one.text for one in drawn.inside[:2] if isinstance(one, Element))
        assert drawn.find("text")
    colours = re.findall(r"(?:fill|stroke): ?(#\w+|rgb\([^)]*\)|black)", source.split("</style>", maxsplit=1)[1])
    assert colours == [], "a colour of its own cannot follow the reader's theme"
    used = set(re.findall(r"var\((--[\w-]+)\)", source))
    for block in themes(source).values():
        assert used <= block.keys()


def themes(source: str) -> dict[str, dict[str, str]]:
    """Return the colours of the style sheet by theme; what the dark one does not say is as in the light one."""
    light, dark = re.findall(r":root \{(.*?)\}", source, re.DOTALL)[:2]
    read = [dict(re.findall(r"(--[\w-]+): (#\w{6})", block)) for block in (light, dark)]
    return {"light": read[0], "dark": read[0] | read[1]}


def test_the_page_shows_every_incident(parsed: Parsed, story_of: Callable[..., JobHistory]) -> None:
    """Kind, target, evidence, decision with its reason, phases, numbers: all in the incident's own part."""
    root, story = parsed("three_incidents"), story_of(filled.three_incidents)
    found = root.find("details", class_="incident")
    assert [one.find("div", class_="inside")[0].attributes["id"] for one in found] == ["incident-1", "incident-2", "incident-3"]
    for shown, case in zip(found, story.cases, strict=True):
        one = case.incident
        assert mentions(shown.words, one.kind, on_target(one.target), one.outcome, one.action, one.step_before, one.resumed_step)
        assert all(decision.reason in shown.words for decision in case.decisions)
        assert all(mentions(shown.words, part.label, duration(part.seconds)) for part in parts(case.phases))
        assert all(why in shown.words for decision in case.decisions for why in decision.passed_over.values())
        assert all(text in shown.words for text in recovery_details(one.facts))
    assert "Connection closed by peer [127.0.0.1]:40123" in found[0].words


def test_the_page_shows_what_snapshots_in_memory_were_worth(parsed: Parsed, story_of: Callable[..., JobHistory]) -> None:
    """The job's age and cost in a sentence, each generation in a row, the newest first; nothing of them in an old job."""
    (card,) = [one for one in parsed("three_incidents").find("section") if one.attributes.get("aria-labelledby") == "memory"]
    rows = story_of(filled.three_incidents).snapshots
    assert memory.overhead(rows) in card.words
    assert memory.typical_age(memory.total(rows)) in card.words
    assert [row.words for row in card.find("tbody")[0].find("tr")] == [
        "4 599 1 598 1 13.7 MB 97.5% 0.5%",
        "2 286 1 285 1 13.7 MB 97.5% 0.5%",
    ]
    assert "memory" not in sections(parsed("failed"))


def test_the_page_has_the_headline_and_every_section(parsed: Parsed) -> None:
    """What a reader looks for first stands first."""
    root = parsed("three_incidents")
    assert list(sections(root)) == [
        "facts", "next-steps", "goodput", "over-time", "over-steps", "recoveries", "incidents", "generations", "nodes", "checkpoints",
        "memory", "notes", "kinds", "configuration",
    ]  # fmt: skip
    tiles = {one.find("dt")[0].text: one.find("dd", class_="value")[0].text for one in root.find("div", class_="tile")}
    assert tiles["Steps"] == "600"
    assert tiles["Incidents"] == "3"
    assert tiles["Steps lost"] == "71"
    assert tiles["Checkpoints"] == "12"
    assert [one.text for one in root.find("span", class_="state-badge")] == ["completed"]
    assert "Completed 600 steps" in root.find("p", class_="sentence")[0].text


def test_the_page_says_who_held_which_ranks_and_what_became_of_the_nodes(parsed: Parsed, story_of: Callable[..., JobHistory]) -> None:
    """Newcomers and leavers of a generation are marked, a lost node is named with the reason."""
    root = parsed("three_incidents")
    members = [cell.words for cell in root.find("td", class_="members")]
    assert mentions(members[0], "node-0 0–1", "node-1 2–3", "2 of 2 nodes", "1 spare")  # noqa: RUF001 (ranges)
    assert mentions(members[-1], "node-0 0–1", "+ node-2 2–3", "incident 3", "node-2 for node-1")  # noqa: RUF001 (ranges)
    assert [one.text for one in root.find("span", class_="removed")] == ["node-1"]
    story = story_of(filled.three_incidents)
    for reason in (*(one.reason for one in story.status_changes), *(one.reason for one in story.checkpoints)):
        assert reason in root.text
    assert all(one.text in root.text for one in story.job_events)


def test_what_came_again_is_counted_and_what_is_in_memory_is_no_checkpoint(history: History) -> None:
    """Eleven notes are one, three troubles of snapshots stand with those, and the tile counts what lies on disk."""
    begun = filled.launched(history)
    begun.train(100)
    for number in range(11):
        begun.record_event(f"rank 1 on node-0 (host-overloaded): watched; staying costs {15 + number} ms a step")
    for _ in range(3):
        begun.save(seconds=0.0, problem="replica-lag", reason="11 snapshots were left out")
        begun.add(
            begun.fault("replica-lag", "rank 1 on node-0", recommended_action="monitor", evidence={"quote": "11 snapshots were left out"})
        )
    root = Page(page(read_history(history, begun.write(), now=filled.BEGAN + 900))).root
    (notes,) = root.find("ol", class_="notes")
    assert len(notes.find("li")) == 1
    assert "11 times, last after" in notes.words
    (tile,) = (one for one in root.find("div", class_="tile") if one.words.startswith("Checkpoints"))
    assert tile.words.startswith("Checkpoints 2 41 ms each")
    (saves,) = (one for one in root.find("div", class_="scroll") if one.attributes.get("aria-label") == "Checkpoints")
    assert len(saves.find("tr")) == 3
    assert "replica-lag" not in saves.words
    assert mentions(root.words, "replica-lag 3 times", "step 100")
    (loose,) = (one for one in root.find("div", class_="scroll") if one.attributes.get("aria-label") == "Faults without an incident")
    assert len(loose.find("tr")) == 2


def test_the_environment_of_a_job_stays_out_of_its_report(pages: Pages) -> None:
    """Reports are sent around; tokens live in environments."""
    assert filled.SPEC["env"] == {"TOKEN": "swordfish"}
    assert "swordfish" not in pages("three_incidents")


@pytest.mark.parametrize(
    ("name", "section"),
    [("nothing", "goodput"), ("nothing", "over-time"), ("nothing", "incidents"), ("unmanaged", "over-time"), ("one_step", "incidents")],
)
def test_an_empty_section_says_that_it_is(parsed: Parsed, name: str, section: str) -> None:
    """An empty place would leave the reader guessing."""
    (said,) = sections(parsed(name))[section].find("p", class_="empty")
    assert said.words


@pytest.mark.parametrize(
    ("name", "label", "numbers"),
    [("broken_losses", "Last loss", (41,)), ("recovering", "Incidents", (1, "open")), ("one_step", "Steps", (600,))],
)
def test_a_headline_number_has_a_note_on_what_is_odd(parsed: Parsed, name: str, label: str, numbers: tuple[object, ...]) -> None:
    """A number alone would mislead."""
    notes = {one.find("dt")[0].text: one.find("dd", class_="note")[0].text for one in parsed(name).find("div", class_="tile")}
    assert mentions(notes[label], *numbers)


@pytest.mark.parametrize(("name", "tone"), [("recovering", "warning"), ("running", "live"), ("failed", "bad"), ("one_step", None)])
def test_a_job_that_has_not_simply_ended_has_a_callout(parsed: Parsed, name: str, tone: str | None) -> None:
    """It has no controller, it still runs, or it failed."""
    found = [one.attributes["class"].split() for one in parsed(name).find("p", class_="callout")]
    assert found == ([["callout", tone]] if tone else [])


def test_what_is_left_out_is_counted(parsed: Parsed) -> None:
    """Of many incidents the longest have bars, of many nodes the first are named."""
    assert mentions(sections(parsed("many_incidents"))["recoveries"].words, 24, 36)
    assert mentions(sections(parsed("many_nodes"))["generations"].words, 292)


def test_steps_without_a_loss_are_drawn_by_their_number(parsed: Parsed) -> None:
    """Over wall time; there is nothing to draw over steps."""
    found = sections(parsed("unmanaged_steps"))
    assert "over-steps" not in found
    assert [one.attributes["aria-labelledby"].split("-title")[0] for one in found["over-time"].find("svg", class_="drawing")][2:4] == [
        "time-wide",
        "time-narrow",
    ]


@pytest.mark.parametrize("name", EVERY)
def test_the_numbers_of_the_page_are_those_of_the_accounts(history: History, name: str) -> None:
    """However odd the job: what faults cost is computed in one place, which the page shows."""
    job = odd.ODD.get(name, filled.three_incidents)(history)
    now = filled.BEGAN + 200_000
    story, found = read_history(history, job, now=now), losses(history, job, now=now)
    assert story.losses == found == bill(history, job, now=now).costs
    shown = {tile.label: tile.value for tile in tiles(story)}
    figures = share(found.ettr), duration(found.downtime_s), count(found.steps_lost)
    assert (shown["ETTR"], shown["Downtime"], shown["Steps lost"]) == figures


def test_text_from_strangers_is_shown_and_never_acts(pages: Pages, parsed: Parsed) -> None:
    """Markup, templates, formulas, escape sequences and reversed text arrive as what they are: text."""
    source, root = pages("failed"), parsed("failed")
    assert root.text.count('<script>alert("x")</script>') > 10
    assert "{{ 7*7 }} $\\alpha$ " in root.text
    assert "<script" not in source
    assert "<img" not in source
    assert not set("\x00\x1b\u202e") & set(source)


hostile = st.text(min_size=1, max_size=60) | st.sampled_from(
    [odd.HOSTILE, "</title></style>", "<!--", "]]>", "&lt;", "\ud800", "{% raw %}"]
)


def nothing_spent() -> Bill:
    """Return a bill without any time."""
    none = Mean(seconds=None, n=0)
    return Bill(
        unit=COMPUTE, since=None, until=filled.BEGAN, jobs=[], ledger=Ledger(), costs=FailureCosts.sum(()), losses=[], bad_nodes=[],
        mttf=none, mttr=none, user_errors=0,
    )  # fmt: skip


def _bare(text: str) -> JobHistory:
    """Return a story without drawings that says *text* wherever a stranger can."""
    job = Job(name=text, spec={"script": text, "policy": text}, cluster={"name": text}, directory=text, at=filled.BEGAN)
    move = JobTransition(job_id=job.id, at=filled.BEGAN, before=text, event=text, after="FAILED", reason=text, generation=1)
    incident = Incident(
        job_id=job.id, number=1, kind=text, target=text, fault_at=1.0, detected_at=2.0, generation_before=1, action=text, outcome=text
    )
    evidence = {text: text, "lines": [text, text], "deep": {text: [text]}}
    fault = FaultRecord(
        job_id=job.id, at=1.0, kind=text, recommended_action=text, target=text, attributed_to=text, generation=1, evidence=evidence
    )
    symptom = {"kind": text, "count": 1, "targets": [text]}
    seen = {"at": 1.0, "source": text, "target": text, "quote": text}
    weighed = {
        "kind": text,
        "target": text,
        "confidence": 0.5,
        "attributed_to": text,
        "evidence": [seen],
        "explains": [symptom],
        "unexplained": [symptom],
    }
    diagnosis = IncidentDiagnosis(
        job_id=job.id, incident_id=incident.id, at=1.0, kind=text, target=text, confidence=0.5, reason=text, candidates=[weighed, weighed]
    )
    case = IncidentCase(incident=incident, faults=[fault], decisions=[], phases=[], diagnoses=[diagnosis])
    number, real = np.empty(0, dtype=np.int64), np.empty(0)
    reals = dict.fromkeys(("at", "seconds", "loss", "samples", "tokens"), real)
    empty = StepColumns(generation=number, step=number, **reals, lost=np.empty(0, dtype=np.bool_))
    event = JobEvent(job_id=job.id, at=1.0, text=text)
    return JobHistory(
        job=job, now=filled.BEGAN, transitions=[move], generations=[], cases=[case], loose_faults=[fault], status_changes=[],
        checkpoints=[], snapshots=[], job_events=[event], steps=empty, bill=nothing_spent(),
    )  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=hostile)
def test_no_text_changes_the_shape_of_the_page(text: str) -> None:
    """Whatever is written, the page has the same elements as with a harmless word, and says it."""
    assume(text not in {*CATALOGUE, "none"})  # a kind that is known has its title beside it, and what is attributed to none is not shown so
    found = Page(page(_bare(text)).encode().decode()).root
    assert outline(found) == harmless_outline()
    assert found.find("li")[-1].find("span")[-1].text.strip() == wording.visible(text).strip()


@functools.cache
def harmless_outline() -> Counter[str]:
    """Return the elements of the page that says a harmless word everywhere."""
    return outline(Page(page(_bare("word"))).root)


def outline(root: Element) -> Counter[str]:
    """Count the elements, but for the blocks that long evidence gets."""
    return Counter(one.tag for one in root.walk() if one.tag != "pre")


def test_a_report_is_written_whole_or_not_at_all(history: History, tmp_path: Path) -> None:
    """A missing folder is made, an old report replaced, a link followed, nothing else left behind."""
    job = odd.nothing(history)
    folder = tmp_path / "reports" / "of today"
    written = write_report(history, job, folder / "a.html")
    assert written == folder / "a.html"
    written.write_text("old")
    (folder / "link.html").symlink_to(written)
    assert write_report(history, job, folder / "link.html") == folder / "link.html"
    assert written.read_text("utf-8").startswith("<!DOCTYPE html>")
    assert sorted(file.name for file in folder.iterdir()) == ["a.html", "link.html"]


@pytest.mark.parametrize("output", [".", "/dev/full", "/proc/none/report.html", "file/report.html"])
def test_a_place_that_cannot_be_written_is_the_operators_to_mend(history: History, tmp_path: Path, output: str) -> None:
    """The message names the place and the reason."""
    (tmp_path / "file").touch()
    before = set(tmp_path.iterdir())
    with pytest.raises(NotWritable, match=r"report .* cannot be written"):
        write_report(history, odd.nothing(history), tmp_path / output)
    assert set(tmp_path.iterdir()) == before


def test_nothing_heavy_is_imported_before_a_report_is_drawn() -> None:
    """The command line imports `holdfast.report`, the flow its Markdown."""
    program = "import sys, holdfast.report, holdfast.report.text.markdown; print(*sys.modules)"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert not {"matplotlib", "numpy", "jinja2", "torch", "prefect"} & set(child.stdout.split())


@pytest.mark.parametrize("name", EVERY)
def test_every_figure_has_axis_titles_with_units_and_every_mark_leads_to_its_incident(parsed: Parsed, name: str) -> None:
    """A time axis names its origin and the day; a badge is a link to a card that exists."""
    root = parsed(name)
    ids = {one.attributes["id"] for one in root.walk() if "id" in one.attributes}
    for drawn in root.find("svg", class_="drawing"):
        drawing = drawn.attributes["aria-labelledby"].partition("-")[0]
        titles = {axis: " ".join(one.words for one in drawn.find("g", class_=axis)) for axis in ("x", "y")}
        assert titles["x"]
        assert ("UTC, 2026-09-" in titles["x"]) is (drawing in {"time", "throughput", "lanes"})
        assert bool(titles["y"]) is (drawing in {"time", "throughput", "steps", "near"})
        assert all(one.attributes["href"].removeprefix("#") in ids for one in drawn.find("a"))
    cards = {one.attributes["id"] for one in root.find("div", class_="inside")}
    bars = [one.attributes["href"] for one in root.find("a") if one.attributes["href"].startswith("#incident-")]
    assert {f"#{card}" for card in cards} >= {*bars}


def test_goodput_on_the_page_is_the_bill(history: History) -> None:
    """Each category with time in it stands in one row, with the numbers of the accounts, and they are all of the time."""
    job = filled.three_incidents(history)
    found = bill(history, job, now=filled.BEGAN)
    (table,) = Page(page(read_history(history, job, now=filled.BEGAN))).root.find("table", class_="goodput")
    rows = [[cell.words for cell in row.find("td")] for row in table.find("tbody")[0].find("tr")]
    spent = {one: found.hours(one) for one in TimeCategory if found.hours(one)}
    assert [row[1] for row in rows] == [hours(of) for of in spent.values()]
    assert [row[2] for row in rows] == [share(of / found.total_hours) for of in spent.values()]
    assert sum(spent.values()) == pytest.approx(found.total_hours)


@pytest.mark.parametrize("name", EVERY)
def test_the_lane_of_the_job_shows_as_much_downtime_as_the_accounts(story_of: Callable[..., JobHistory], name: str) -> None:
    """A fault that is not detected yet is downtime too, although the state is still RUNNING."""
    story = story_of(odd.ODD.get(name, filled.three_incidents))
    spans = job_spans(story)
    down = sum(one.end - one.start for one in spans if one.color not in {SvgTheme.TRAINING, SvgTheme.STARTING})
    assert down == pytest.approx(story.losses.downtime_s, abs=0.01)
    late = sum(one.end - one.start for one in spans if one.color is SvgTheme.NOT_DETECTED)
    assert late == pytest.approx(sum(case.incident.detected_at - case.incident.fault_at for case in story.cases), abs=0.01)


def test_a_job_that_trains_before_its_controller_has_attached_is_not_drawn_as_launching(history: History) -> None:
    """Ranks start before Prefect does: the lane begins to train where the accounts end the startup."""
    on = filled.launched(history)
    on.train(until=10)
    job = on.write()
    with history.session() as session:
        generation = session.exec(select(Generation)).one()
        generation.first_step_at = filled.BEGAN + 1.5
        session.add(generation)
        session.commit()
    story = read_history(history, job, now=on.clock)
    launching = [one for one in job_spans(story) if one.color is SvgTheme.STARTING and one.end > one.start]
    assert max(one.end for one in launching) == pytest.approx(1.5)
    running = next(one.at for one in story.transitions if one.after == "RUNNING") - filled.BEGAN
    assert any((one.start, one.end) == pytest.approx((1.5, running)) and "trains for" in one.tip for one in job_spans(story))


def test_a_forwarded_page_describes_itself_and_names_no_secret(history: History) -> None:
    """Versions, the job file and the command are on it; what is secret is not."""
    on = filled.script(history, spec=filled.SPEC | {"args": ["--token", "swordfish"]})
    on.job.provenance = {"holdfast": "0.1.0", "torch": "2.13.0+cpu", "git_commit": "0123456789ab-dirty"}
    root = Page(page(read_history(history, on.write(), now=filled.BEGAN))).root
    (facts,) = root.find("dl", class_="settings")
    names = {one.find("dt")[0].words: one.find("dd")[0].words for one in facts.find("div")}
    assert names["PyTorch"] == "2.13.0+cpu"
    assert names["git commit"] == "0123456789ab-dirty"
    assert "train_gpt.py" in names["Command"]
    assert "swordfish" not in root.text
    assert yaml.safe_load(root.find("pre")[-2].text)["name"] == "bytes-gpt"


def test_a_page_about_costs_describes_its_jobs(history: History, tmp_path: Path) -> None:
    """Of one job it has the files, of several what they have in common, with the number of jobs where they differ."""
    versions = ("2.13.0+cpu", "2.13.0+cpu", "2.12.0")
    jobs = []
    for number, version in enumerate(versions):
        begun = filled.launched(history, name=f"job-{number}")
        begun.train(3)
        begun.job.provenance = {"torch": version}
        jobs.append(begun.write())
    one = Page(write_cost(history, bill(history, jobs[0]), jobs[0], tmp_path / "one.html").read_text()).root
    assert yaml.safe_load(one.find("pre")[-2].text)["name"] == "bytes-gpt"
    assert "swordfish" not in one.text
    every = Page(write_cost(history, bill(history), None, tmp_path / "all.html").read_text()).root
    facts = {row.find("dt")[0].words: row.find("dd")[0].words for row in every.find("dl", class_="settings")[0].find("div")}
    assert (facts["Jobs"], facts["Clusters"]) == ("3", "local")
    assert facts["PyTorch"] == "2.13.0+cpu (2 jobs), 2.12.0 (1 job)"
    assert every.find("pre") == []


def test_internals_of_the_program_are_not_on_the_page(pages: Pages) -> None:
    """Rules are in words, and no call of a class with its fields is shown."""
    source = pages("three_incidents")
    assert not re.search(r"\b(?:RestartWorkers|ReplaceNode|Dismiss|StopWhenSpent|StopForUserError)\(", source)


def test_rates_before_and_after_a_recovery_come_from_the_steps_around_it(story_of: Callable[..., JobHistory]) -> None:
    """Steps of 0.09 s on both sides: about 11 a second, and no change."""
    changes = rate_changes(story_of(filled.three_incidents))
    assert len(changes) == 3
    for one in changes.values():
        assert one.before == pytest.approx(1 / filled.Script.step_seconds, rel=0.1)
        assert one.change == pytest.approx(0.0, abs=0.1)


@pytest.mark.parametrize(
    ("name", "command", "others"),
    [
        ("three_incidents", "holdfast node burn-in node-1", "holdfast run"),
        ("unmanaged", "holdfast node burn-in node-1", "holdfast run"),
        ("failed", "holdfast run bytes-gpt.yaml", "holdfast node burn-in node-1"),
        ("recovering", "holdfast run bytes-gpt.yaml", "holdfast node"),
    ],
)
def test_next_steps_follow_from_what_happened(parsed: Parsed, name: str, command: str, others: str) -> None:
    """A lost node is tested, a job that failed or has no controller is run again."""
    found = [one.words for one in parsed(name).find("code", class_="command")]
    assert command in found
    assert not [one for one in found if one.startswith(others)]


def test_a_script_without_steps_gets_the_call_that_it_lacks(parsed: Parsed) -> None:
    """And no page of the fault catalogue that says nothing about it; the time of its ranks is not known."""
    root = parsed("unmanaged")
    commands = [one.words for one in root.find("code", class_="command")]
    assert "holdfast.heartbeat(step, loss)" in commands
    assert "holdfast faults show job-hang" not in commands
    assert "steps unknown" in sections(root)["goodput"].words


def test_code_in_a_next_step_is_drawn_as_code(history: History, tmp_path: Path) -> None:
    """The cure of a fault quotes commands and settings between backticks, which no page shows."""
    quoted = next(kind for kind, entry in CATALOGUE.items() if "`" in entry.action)
    on = filled.launched(history)
    on.train(10)
    incident = on.suffer(1, [on.fault(quoted, "rank 0", root=True)], detect=0.03, reason="it failed")
    incident.kind, incident.outcome, incident.closed_at = quoted, "failed", on.clock
    on.move("failed", "FAILED", "it failed")
    target = tmp_path / "report.html"
    write_report(history, on.write(), target)
    (steps,) = Page(target.read_text()).root.find("ol", class_="steps")
    assert steps.find("code"), steps.words
    assert "`" not in steps.words


def test_only_nodes_that_this_job_lost_or_released_are_a_next_step(history: History) -> None:
    """A lost node is tested, a released one is looked at, and what other jobs say of their nodes is theirs."""
    begun = filled.launched(history)
    begun.stand("node-1", "lost", "the node does not answer")
    begun.stand("node-2", "excluded", "rank 3 was moved to node-0")
    begun.add(NodeStatusChange(cluster="local", node="node-0", at=begun.clock, status="excluded", reason="", job_id="another"))
    job = begun.write()
    read = read_history(history, job, now=begun.clock + 60)
    found = next_steps(job, read.bill, read.cases, {one.node: one for one in read.status_changes})
    assert [one.command for one in found if "node" in one.command] == ["holdfast node burn-in node-1", "holdfast node ls node-2"]


def test_the_page_says_what_was_made_of_each_hypothesis() -> None:
    """Of the most likely one all that `holdfast explain` says of a line; of each other one, on one line, whether it acts."""
    story = _bare("word")
    (case,) = story.cases
    story = replace(story, cases=[replace(case, diagnoses=[an_incident_diagnosis(case.incident, 0.8)])])
    terms = [
        (one.find("dt")[0].text.strip(), one.find("dd")[0].text) for one in Page(page(story)).root.find("div") if len(one.find("dt")) == 1
    ]
    found = [(name, text) for name, text in terms if name in {"matched by", "acts", "what to do", "reference", "would change this"}]
    assert [name for name, _ in found] == ["matched by", "acts", "what to do", "reference", "would change this", "acts"]
    for (_, text), words in zip(
        found,
        (
            "xid.toml",
            "yes (evict)",
            CATALOGUE["gpu-off-bus"].action,
            "docs.nvidia.com",
            "monitor",
            "this kind takes no node out of service",
        ),
        strict=True,
    ):
        assert words in text
