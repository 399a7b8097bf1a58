"""One incident as Markdown, for the Prefect UI and wherever else Markdown is shown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from holdfast.history.models import Decision, Fault, Incident, Phase, Verdict
from holdfast.report import wording
from holdfast.report.evidence import pieces
from holdfast.report.phases import parts
from holdfast.report.weighing import explanations

LONGEST: Final = 4000
"""Characters of one piece of evidence; the history has all of it."""
_SPECIAL: Final = re.compile(r"[\\`*\[\]|~]|(?<!\w)_|_(?!\w)|^(?:[-+#=](?=[-+#=\s])|[-+#=]$)|(?<=^\d)[.)]|(?<=^\d\d)[.)]")
"""What Markdown would read as more than itself. Words with dashes stay as they are, so that they can be searched for."""
_HTML: Final = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def incident_markdown(
    incident: Incident, faults: Sequence[Fault], decisions: Sequence[Decision], phases: Sequence[Phase], verdicts: Sequence[Verdict] = ()
) -> str:
    """Return what was seen, how it was explained, what was decided and why, and where the time went."""
    blocks = [
        f"# Incident {incident.number}: {_plain(incident.kind)}",
        _summary(incident),
        "## What was seen",
        *(_seen(faults) if faults else ["No fault was recorded with it."]),
        *_explained(verdicts),
        "## What was decided",
        *(_decided(decisions) if decisions else [_plain(incident.because) or "Nothing was decided yet."]),
        "## Where the time went",
        _phase_table(phases) if phases else "No phase was recorded.",
        f"Incident `{_code(incident.id)}`, happened {wording.moment(incident.fault_at)}, closed {wording.moment(incident.closed_at)}.",
    ]
    return "\n\n".join(blocks) + "\n"


def _summary(incident: Incident) -> str:
    """Return the incident's numbers as a table of two columns."""
    generation = f"{incident.generation_before} → {wording.count(incident.generation_after)}"
    steps = f"had reached {wording.count(incident.step_before)}, resumed from {wording.count(incident.resumed_step)}"
    rows = [
        ("Subject", _plain(incident.subject)),
        ("Outcome", _plain(incident.outcome or ("open" if incident.closed_at is None else "closed"))),
        ("Recovery", _plain(incident.rung or wording.NOTHING)),
        ("Detected in", wording.duration(max(0.0, incident.detected_at - incident.fault_at))),
        ("Downtime", wording.duration(incident.downtime_s)),
        ("Steps lost", wording.count(incident.steps_lost)),
        ("Steps", steps),
        ("Generation", generation),
        *(
            ("Take-over" if "rebuilt" in (incident.facts or {}) else "State", _plain(sentence))
            for sentence in wording.taken_over(incident.facts)
        ),
    ]
    return _table(("", ""), rows)


def _seen(faults: Sequence[Fault]) -> Iterator[str]:
    """Yield the faults, the root first, each with its evidence."""
    for fault in sorted(faults, key=lambda fault: not fault.root):
        step = "" if fault.step is None else f", step {wording.count(fault.step)}"
        root = "**root** · " if fault.root else ""
        yield f"### {_plain(fault.kind)} on {_plain(fault.subject)}"
        against = "" if fault.blame in {"", "none"} else f" · speaks against {_plain(fault.blame)}"
        yield f"{root}level {_plain(fault.level)}{against} · generation {fault.generation}{step}"
        found = list(pieces(fault.evidence, longest=LONGEST))
        short = [f"- {_plain(piece.name)}: {_plain(piece.text)}" for piece in found if not piece.block]
        if short:
            yield "\n".join(short)
        for piece in found:
            if piece.block:
                yield f"{_plain(piece.name)}:"
                yield _fenced(piece.text)


def _explained(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield the explanations that were weighed, each with its evidence."""
    found = list(explanations(verdicts))
    if not found:
        return
    yield "## How it was explained"
    for one in found:
        yield f"**{wording.share(one.weight)}** {_plain(one.kind)} of {_plain(one.subject)}"
        lines = [f"- {wording.moment(at)}, {_plain(source)}: {_plain(quote)}" for at, source, quote in one.evidence]
        lines += [f"- explains {_plain(one.explains)}"] if one.explains else []
        lines += [f"- leaves unexplained {_plain(one.unexplained)}"] if one.unexplained else []
        yield "\n".join(lines)


def _decided(decisions: Sequence[Decision]) -> Iterator[str]:
    """Yield the decisions in order, each with its `because`."""
    for decision in decisions:
        yield f"**{_plain(decision.rung)}** by {_plain(decision.rule)}"
        yield f"> because {_plain(decision.because)}"
        short = [f"- {_plain(piece.name)}: {_plain(piece.text)}" for piece in pieces(wording.act(decision.act), longest=LONGEST)]
        passed = [f"- passed over {_plain(rule)}: {_plain(str(why))}" for rule, why in decision.passed_over.items()]
        if short or passed:
            yield "\n".join(short + passed)


def _phase_table(phases: Sequence[Phase]) -> str:
    """Return the phases with their terms, seconds and shares, and their sum."""
    found = parts(phases)
    rows = [(_plain(part.label), part.kind.term, f"{part.seconds:.3f}", wording.share(part.share)) for part in found]
    rows.append(("**all**", "**T**", f"**{sum(part.seconds for part in found):.3f}**", ""))
    return _table(("Phase", "Term", "Seconds", "Share"), rows, right=(2, 3))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return a Markdown table; the columns *right* are aligned to the right."""
    rule = ["---:" if column in right else ":---" for column in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def _plain(text: str) -> str:
    """Return *text* on one line so that Markdown and HTML show it as it is."""
    line = " ".join(wording.visible(text).split())
    return _SPECIAL.sub(r"\\\g<0>", line).translate(_HTML)


def _code(text: str) -> str:
    return wording.visible(text).replace("`", "'")


def _fenced(text: str) -> str:
    """Return *text* as a code block, behind a fence longer than any in it."""
    shown = wording.visible(text).rstrip()
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{shown}\n{fence}"
