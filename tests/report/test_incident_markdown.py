"""One incident as Markdown: what it says, and that strangers' text stays text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.history.models import DecisionRecord, FaultRecord, Incident, Job, Phase
from holdfast.history.store import History
from holdfast.report import phases
from holdfast.report.case import IncidentCase
from holdfast.report.pages.job_history import JobHistory
from holdfast.report.text import incident_text, wording
from holdfast.report.text.markdown import incident_markdown, plain
from tests.cli.written_history import an_incident_diagnosis
from tests.mentions import one_line_mentions
from tests.report import filled, odd


def _written(case: IncidentCase) -> str:
    return incident_markdown(case, "gpt")


def tokens(markdown: str) -> list[Token]:
    """Return all tokens, inline ones among them, as a renderer that lets HTML through would have them."""
    found = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(markdown)
    return [one for block in found for one in (block, *(block.children or []))]


def shape(markdown: str) -> list[str]:
    """Return what a renderer makes of it, without the words: of our own HTML, the tags of what is folded."""
    found = []
    for one in tokens(markdown):
        if one.type == "html_block":
            found += re.findall(r"<[^>]*>?", one.content)
        elif one.type not in {"text", "text_special", "softbreak"}:
            found.append(one.type)
    return found


@pytest.fixture
def killed(story_of: Callable[[Callable[[History], Job]], JobHistory]) -> IncidentCase:
    """Give the first incident of the usual job."""
    return story_of(filled.three_incidents).cases[0]


def test_it_answers_what_somebody_on_call_asks_first(killed: IncidentCase) -> None:
    """What happened, what was done, what it cost, what to do; then the numbers, without an empty head."""
    written = incident_markdown(killed, "gpt", quarantined={"node-0": "Xid 79"}, run_link="http://ui/run", page_link="http://ui/page")
    assert written.startswith(f"# {incident_text.headline(killed)}\n")
    at, step = wording.moment(killed.incident.fault_at), killed.incident.step_before
    detected = wording.duration(killed.incident.detected_at - killed.incident.fault_at)
    assert one_line_mentions(written, incident_text.what(killed), f"step {step}", at, detected)
    for line in (
        f"**What was done:** {incident_text.done(killed)}.",
        f"**What it cost:** {incident_text.cost(killed)}.",
        "| Fact | Value |",
        "| Fault kind | worker-sigkill |",
        "| Downtime | 1.12 s |",
        "| Steps lost | 22 |",
        f"| T1 reschedule | 172 ms | 5.6% | {phases.kind_of('reschedule').meaning} |",
        f"| T0 rollback | 1.98 s | 63.9% | {phases.kind_of('rollback').meaning} |",
        "| **total (T)** | **3.10 s** |  |  |",
    ):
        assert line in written.splitlines()
    assert plain(incident_text.to_do(killed, "gpt", {"node-0": "Xid 79"})) in written
    assert one_line_mentions(written, "(http://ui/run)", "(http://ui/page)", f"`holdfast incidents show {killed.incident.id}`")


def test_it_says_what_was_seen_and_what_was_decided_and_folds_what_was_not_done(killed: IncidentCase) -> None:
    """The reason of the decision stands there word for word; what the policy passed over is there in plain words."""
    written = _written(killed)
    for line in (
        "### worker-sigkill on rank 1 on node-0",
        "- quote: rank 1 on node-0 was ended by SIGKILL",
        f"**restart-workers**: {killed.decisions[0].reason}",
    ):
        assert line in written.splitlines()
    folded = next(line for line in written.splitlines() if line.startswith("<details>"))
    for rule, why in killed.decisions[0].passed_over.items():
        assert f"<li>{incident_text.rule_text(rule)}: no, {why}</li>" in written
    assert folded.endswith("</ul></details>")
    assert "<summary>1 secondary failure</summary>" in written


def test_a_traceback_of_the_root_is_code(killed: IncidentCase) -> None:
    """Line for line."""
    root = killed.faults[0].model_copy(update={"evidence": {"detail": filled.TRACEBACK}, "root": True})
    fences = [one.content for one in tokens(_written(replace(killed, faults=[root]))) if one.type == "fence"]
    assert fences == [filled.TRACEBACK]


def test_the_root_comes_first_whatever_came_first(killed: IncidentCase) -> None:
    """A reader wants the cause before what follows from it."""
    assert _written(replace(killed, faults=killed.faults[::-1])) == _written(killed)


def test_an_incident_that_is_only_open_is_said_to_be() -> None:
    """Nothing decided, nothing timed, nothing closed."""
    incident = Incident(job_id="j", number=7, kind="job-hang", target="job", fault_at=10.0, detected_at=12.5, generation_before=3)
    case = IncidentCase(incident=incident, faults=[], decisions=[], phases=[])
    written = _written(case)
    for words in (
        f"# {incident_text.headline(case)}\n",
        "| Outcome | open |",
        " 2.50 s.",
        "**What was done:** nothing yet.",
    ):
        assert words in written


def _saying(text: str) -> str:
    """Return the Markdown of an incident in which strangers say *text* wherever they can."""
    incident = Incident(
        job_id="j",
        number=1,
        kind=text,
        target=text,
        fault_at=0.0,
        detected_at=0.0,
        generation_before=1,
        outcome=text,
        action=text,
        reason=text,
    )
    evidence = {text + "x": " ".join(text.split()) + "x", "detail": f"first\n{text}"}
    fault = FaultRecord(
        job_id="j", at=0.0, kind=text, recommended_action=text, target=text, attributed_to=text, generation=1, evidence=evidence
    )
    echo = fault.model_copy(update={"id": "echo"})
    fault.root = True
    act = {"node": text + "x"}
    decision = DecisionRecord(job_id="j", incident_id="i", at=0.0, action=text, rule=text, reason=text, act=act, passed_over={text: text})
    phase = Phase(job_id="j", incident_id="i", position=0, name=text, seconds=1.0)
    return _written(IncidentCase(incident=incident, faults=[fault, echo], decisions=[decision], phases=[phase]))


hostile: Sequence[str] = [
    odd.HOSTILE, "a | b", "**bold** _x_ `code`", "[link](http://x)", "![i](x)", "<b>", "&lt;", "```\n# head", "~~~", "| - |", "\\", "\\|",
    "# h", "- item", "> quote", "1. one", "---", "===", "~~gone~~", "<http://x.example>", "|", "_", "*", "`", "+", "\ud800\x00",
]  # fmt: skip


anything = st.text(st.sampled_from("ab1.\\`*_[]()<>&|~#+-=! \n\t\"'$:/"), min_size=1, max_size=30).filter(str.strip)


@settings(deadline=None)
@given(text=st.sampled_from(hostile) | anything)
def test_no_text_changes_the_shape_of_the_markdown(text: str) -> None:
    """The same headings, tables, lists and code as with a harmless word, and no HTML; and the words are all there."""
    written = _saying(text)
    written.encode("utf-8")
    found = tokens(written)
    assert shape(written) == shape(_saying("word"))
    assert not [
        one
        for one in found
        if one.type
        in {
            "html_inline",
            "link_open",
            "image",
        }
    ]
    shown = ["".join(child.content for child in one.children or []) for one in found if one.type == "inline"]
    assert any(" ".join(wording.visible(text).split()) in one for one in shown)


def test_it_says_how_the_incident_was_explained(killed: IncidentCase) -> None:
    """Each explanation with its weight and its evidence; an incident from before that was kept says nothing of it."""
    written = _written(replace(killed, diagnoses=[an_incident_diagnosis(killed.incident, 0.8)]))
    for line in (
        "**80.0%** gpu-off-bus on n1",
        "- leaves unexplained worker-sigkill of rank 5 on n2",
        f"- {wording.moment(killed.incident.fault_at)}, kernel log on n1: NVRM: Xid 79",
    ):
        assert line in written.splitlines()
    assert "How it was explained" not in _written(killed)


@given(text=st.text(min_size=1))
def test_no_evidence_of_an_explanation_changes_the_shape(text: str) -> None:
    """Quotes come from strangers."""
    incident = Incident(job_id="1", number=1, kind="k", target="s", fault_at=1.0, detected_at=2.0, generation_before=1)
    shapes = []
    for words in (f"x{text}", "word"):
        diagnosis = an_incident_diagnosis(incident, 0.8)
        diagnosis.candidates[0]["evidence"][0] |= {"quote": words, "source": words}
        shapes.append(shape(_written(IncidentCase(incident=incident, faults=[], decisions=[], phases=[], diagnoses=[diagnosis]))))
    assert shapes[0] == shapes[1]


def test_it_says_what_was_made_of_the_root_fault(killed: IncidentCase) -> None:
    """Which signature matched, whether it acts and why, what to do with a link, and what would change that; also of the only hypothesis."""
    diagnosis = an_incident_diagnosis(killed.incident, 0.8)
    quote = "NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus."
    diagnosis.candidates = [diagnosis.candidates[0] | {"proof": "the line proves it", "unexplained": []}]
    diagnosis.candidates[0]["evidence"][0] |= {"quote": quote}
    incident = killed.incident.model_copy(update={"kind": "gpu-off-bus", "target": "node n1"})
    lines = _written(replace(killed, incident=incident, diagnoses=[diagnosis])).splitlines()
    for name, words in (
        ("matched by", ("fallen off the bus", "xid.toml")),
        ("acts", ("yes", "evict", "the line proves it")),
        ("what to do", (CATALOGUE["gpu-off-bus"].action,)),
        ("reference", ("https://docs.nvidia.com/deploy/xid-errors",)),
        ("would change this", ("a worker's output", "monitor")),
    ):
        assert any(line.startswith(f"- {name}: ") and all(plain(word) in line for word in words) for line in lines), name


def test_the_other_hypotheses_have_one_line_each(killed: IncidentCase) -> None:
    """With what each was recognised by, and why nothing is done because of it."""
    folded = _written(replace(killed, diagnoses=[an_incident_diagnosis(killed.incident, 0.8)]))
    assert "worker-sigkill on rank 5 of node n2; acts: no: " in folded or "worker-sigkill on rank 5 on n2; acts: no: " in folded


@pytest.mark.parametrize(
    ("kind", "proof", "action", "said"),
    [
        ("link-down", "confirmed by job-hang", "drain", "acts: yes (drain): confirmed by job-hang"),
        ("link-down", "confirmed by job-hang", "drain", "would change this: without job-hang it would only be shown"),
        ("link-down", "no: one line does not prove it", "monitor", "would change this: a second signal on that node: "),
        ("gpu-off-bus", "no: no rank of the job uses that device", "monitor", "would change this: a rank of the job that uses the device"),
        ("gpu-off-bus", "the policy sets its action", "monitor", "acts: no: the policy sets its action"),
        ("worker-sigkill", "", "evict", "acts: yes (evict): the policy sets its action"),
        ("worker-sigkill", "", "restart", "acts: no: this kind takes no node out of service"),
    ],
)
def test_why_a_fault_acted_is_as_it_was_recorded(killed: IncidentCase, kind: str, proof: str, action: str, said: str) -> None:
    """With the second signal, the devices in use and the policy that counted at that time."""
    diagnosis = an_incident_diagnosis(killed.incident, 0.8)
    diagnosis.candidates[0] |= {"kind": kind, "proof": proof, "recommended_action": action}
    assert f"- {plain(said)}" in _written(replace(killed, diagnoses=[diagnosis]))
