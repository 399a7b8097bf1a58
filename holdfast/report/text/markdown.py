"""One incident as Markdown, for the Prefect UI."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from holdfast.history.models import DecisionRecord, FaultRecord, Incident, IncidentDiagnosis, Phase
from holdfast.plurals import plural
from holdfast.report.case import Hypothesis, IncidentCase, evidence_of, hypotheses_of
from holdfast.report.explanations import explained, explained_in_short
from holdfast.report.phases import SUM, parts
from holdfast.report.text import incident_text, wording

NONE: Final[Mapping[str, str]] = MappingProxyType({})
LONGEST: Final = 4000
"""Characters of one piece of evidence; the history has all of it."""
_SPECIAL: Final = re.compile(r"[\\`*\[\]|~]|(?<!\w)_|_(?!\w)|^(?:[-+#=](?=[-+#=\s])|[-+#=]$)|(?<=^\d)[.)]|(?<=^\d\d)[.)]")
"""What Markdown would interpret. Words with dashes stay unchanged, so that they can be searched for."""
_HTML: Final = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def incident_markdown(
    case: IncidentCase, job: str, *, quarantined: Mapping[str, str] = NONE, run_link: str = "", page_link: str = ""
) -> str:
    """Return the page of an incident of *job*: what happened, what was done, what it cost, what to do, and the evidence.

    *quarantined* are the nodes that it took out of service, and why; the links are those of the flow run and of the job page.
    """
    incident = case.incident
    blocks = [
        f"# {plain(incident_text.headline(case))}",
        *_answers(case, job, quarantined),
        _facts(incident),
        "## Where the time went",
        *_time(case.phases),
        *_inside(incident),
        "## What was seen",
        *(_seen(case.faults) if case.faults else ["No fault was recorded with it."]),
        *_explained(case.diagnoses),
        "## What was decided",
        *(_decided(case.decisions) if case.decisions else [plain(incident.reason) or "Nothing was decided yet."]),
        "---",
        _links(incident, run_link, page_link),
    ]
    return "\n\n".join(blocks) + "\n"


def _answers(case: IncidentCase, job: str, quarantined: Mapping[str, str]) -> Iterator[str]:
    """Yield the four answers that a person on call needs first."""
    incident = case.incident
    at = "" if incident.step_before is None else f", at step {wording.count(incident.step_before)}"
    detected = wording.duration(max(0.0, incident.detected_at - incident.fault_at))
    when = wording.moment(incident.fault_at)
    yield f"**What happened:** {plain(incident_text.what(case))}{at}, {when}. It was detected after {detected}."
    yield f"**What was done:** {plain(incident_text.done(case) or 'nothing yet')}."
    if why := incident_text.why_failed(case):
        yield f"**Why no recovery was possible:** {plain(why)}."
    yield f"**What it cost:** {plain(incident_text.cost(case) or 'not known yet, recovery is under way')}."
    yield f"**What to do:** {plain(incident_text.to_do(case, job, quarantined))}."


def _facts(incident: Incident) -> str:
    """Return the incident's numbers as a table."""
    generation = f"{incident.generation_before} → {wording.count(incident.generation_after)}"
    steps = f"reached {wording.count(incident.step_before)}, resumed from {wording.count(incident.resumed_step)}"
    rows = [
        ("Fault kind", plain(incident.kind)),
        ("Target", plain(incident.target)),
        ("Recovery action", plain(incident.action or wording.NOTHING)),
        ("Outcome", plain(incident.outcome or ("open" if incident.closed_at is None else "closed"))),
        ("Downtime", wording.duration(incident.downtime_s) + (" (until all processes had started)" if incident.until_started else "")),
        ("Steps", steps),
        ("Steps lost", wording.count(incident.steps_lost)),
        ("Generation", generation),
        ("Closed", wording.moment(incident.closed_at)),
    ]
    return table(("Fact", "Value"), rows)


def _time(phases: Sequence[Phase]) -> Iterator[str]:
    """Yield the phases with what happens in each, their times and shares, and their sum."""
    if not phases:
        yield "No phase was recorded."
        return
    found = parts(phases)
    rows = [
        (
            plain(part.label),
            wording.duration(part.seconds),
            wording.share(part.share),
            part.kind.meaning,
        )
        for part in found
    ]
    rows.append(("**total (T)**", f"**{wording.duration(sum(part.seconds for part in found))}**", "", ""))
    yield table(("Phase", "Time", "Share", "What happens in it"), rows, right=(1, 2))
    yield (f"T = {SUM}, the terms of recovery time. Training is stopped in all phases except rollback, which is work done a second time.")


def _inside(incident: Incident) -> Iterator[str]:
    """Yield what the recovery did in the workers, if known."""
    sentences = wording.recovery_details(incident.facts)
    if sentences:
        yield "## What the recovery did"
        yield "\n".join(f"- {plain(sentence)}" for sentence in sentences)


def _seen(faults: Sequence[FaultRecord]) -> Iterator[str]:
    """Yield the root causes with their evidence, then the secondary failures, one line each."""
    ordered = sorted(faults, key=lambda fault: not fault.root)
    roots, others = [one for one in ordered if one.root] or ordered[:1], [one for one in ordered if not one.root]
    for fault in roots:
        step = "" if fault.step is None else f", step {wording.count(fault.step)}"
        yield f"### {plain(fault.kind)} on {plain(fault.target)}"
        against = "" if fault.attributed_to in {"", "none"} else f", attributed to {plain(fault.attributed_to)}"
        root = "root cause, " if fault.root else ""
        yield f"{root}asks for {plain(fault.recommended_action)}{against}, generation {fault.generation}{step}"
        found = list(evidence_of(fault.evidence, longest=LONGEST))
        short = [f"- {plain(piece.name)}: {plain(piece.text)}" for piece in found if not piece.block]
        if short:
            yield "\n".join(short)
        for piece in found:
            if piece.block:
                yield f"{plain(piece.name)}:"
                yield _fenced(piece.text)
    others = [one for one in others if one not in roots]
    if others:
        lines = [
            f"{wording.visible(one.kind)} on {wording.visible(one.target)}: {incident_text.brief(str(one.evidence.get('quote') or ''))}"
            for one in others
        ]
        yield _folded(f"{plural(len(others), 'secondary failure')}", lines)


def _explained(diagnoses: Sequence[IncidentDiagnosis]) -> Iterator[str]:
    """Yield the hypotheses: the most likely one with its evidence and what was made of it, the others folded."""
    found = list(hypotheses_of(diagnoses))
    if not found:
        return
    first, *others = found
    yield "## How it was explained"
    yield f"**{wording.share(first.confidence)}** {plain(first.kind)} on {plain(wording.on_target(first.target))}"
    lines = [f"- {wording.moment(at)}, {plain(source)}: {plain(quote)}" for at, source, quote in first.evidence]
    lines += [f"- {name}: {plain(text)}" for name, text in explained(first)]
    lines += [f"- explains {plain(first.explains)}"] if first.explains else []
    lines += [f"- leaves unexplained {plain(first.unexplained)}"] if first.unexplained else []
    if lines:
        yield "\n".join(lines)
    if others:
        summary = f"{plural(len(others), 'other hypothesis', 'other hypotheses')}"
        yield _folded(summary, [_in_short(one) for one in others])


def _in_short(one: Hypothesis) -> str:
    reasons = "".join(f"; {name}: {text}" for name, text in explained_in_short(one))
    return f"{wording.share(one.confidence)} {one.kind} on {wording.on_target(one.target)}{reasons}"


def _decided(decisions: Sequence[DecisionRecord]) -> Iterator[str]:
    """Yield the decisions in order, each with its reason; the rules that did not apply are folded."""
    for decision in decisions:
        yield f"**{plain(decision.action)}**: {plain(decision.reason)}"
        short = [f"- {plain(piece.name)}: {plain(piece.text)}" for piece in evidence_of(wording.act(decision.act), longest=LONGEST)]
        if short:
            yield "\n".join(short)
        if decision.passed_over:
            passed = [f"{incident_text.rule_text(rule)}: no, {reason}" for rule, reason in decision.passed_over.items()]
            yield _folded("What the policy considered first, and why not", passed)


def _links(incident: Incident, run_link: str, page_link: str) -> str:
    links = [f"[{name}]({link})" for name, link in (("Flow run", run_link), ("Job page", page_link)) if link]
    return " · ".join([*links, f"`holdfast incidents show {_code(incident.id)}`"])


def _folded(summary: str, lines: Sequence[str]) -> str:
    """Return a list that a reader opens with a click. It is HTML on one line: the Prefect UI renders nothing else folded."""
    items = "".join(f"<li>{html.escape(' '.join(wording.visible(line).split()))}</li>" for line in lines)
    return f"<details><summary>{html.escape(summary)}</summary><ul>{items}</ul></details>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return a Markdown table; the columns *right* are aligned to the right."""
    rule = ["---:" if column in right else ":---" for column in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def plain(text: str, *, code: bool = False) -> str:
    """Return *text* on one line so that Markdown and HTML show it unchanged; with *code*, what is in backquotes stays code."""
    line = _SPECIAL.sub(r"\\\g<0>", " ".join(wording.visible(text).split())).translate(_HTML)
    return line.replace("\\`", "`") if code else line


def _code(text: str) -> str:
    return wording.visible(text).replace("`", "'")


def _fenced(text: str) -> str:
    """Return *text* as a code block, behind a fence longer than any in it."""
    shown = wording.visible(text).rstrip()
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{shown}\n{fence}"
