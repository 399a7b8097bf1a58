"""Explain what is made of a log line: what it was recognised by, whether anything is done because of it, and what would change that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from holdfast.classify.classifier import Classification, classify_text
from holdfast.classify.events import Events
from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.catalogue import CATALOGUE_ACTIONS, KERNEL_LOG, LOGS, SYSTEM_LOG, TAKES_NODE_OUT, WORKER_OUTPUT, Area, Fault
from holdfast.detectors.confirmation import confirming_rules, why_it_acts
from holdfast.detectors.evidence import LogLine
from holdfast.detectors.log_lines.classification import LONGEST
from holdfast.detectors.log_lines.heuristics import OTHERS
from holdfast.detectors.signatures import SIGNATURES
from holdfast.detectors.signatures.loading import ANY, Signature
from holdfast.detectors.training.tracebacks import raised_in

_PLACES: Final = {KERNEL_LOG: "the kernel log", WORKER_OUTPUT: "a worker's output", SYSTEM_LOG: "the log of a service"}
MOST: Final = 8
"""Kinds that are listed as what would confirm a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What is made of a line."""

    line: str
    kind: str | None
    """None: it reports no fault."""
    log: str
    """The log that it is taken to be from, one of `LOGS`."""
    matched: str
    """What it was recognised by, or what rules a fault out."""
    acts: bool
    """Whether a node with ranks is left, or not used, because of this line alone."""
    reason: str
    """Why it acts, or does not."""
    changes: tuple[str, ...] = ()
    """What would change the verdict."""
    context: tuple[str, ...] = ()
    """Further lines that belong to the same event, each with its kind."""


def explain(text: str, log: str | None = None) -> Explanation:
    """Explain the first fault in *text*, a line or several that belong together, from *log* (default: the one that writes such lines)."""
    found = classify_text(text)
    if not found:
        return _no_fault(text, log)
    name, line = found[0].kind, found[0].text
    context = tuple(f"{one.kind}: {one.text.strip()}" for one in found[1:] if _is_one_event(found[0], one))[:MOST]
    kind = CATALOGUE[name]
    log = log or next(iter(kind.logs), LOGS[-1])
    fault = Fault(kind=name, at=0.0, node="node-0", quote=line, signature=name, source=f"{log} on node-0")
    takes_out = kind.recommended_action in TAKES_NODE_OUT
    acts = takes_out and CATALOGUE_ACTIONS.of(fault) in TAKES_NODE_OUT
    if takes_out:
        reason = why_it_acts(fault, CATALOGUE_ACTIONS)
    elif name in OTHERS:
        reason = "no: its words suggest a failure, and no signature was written for it"
    else:
        reason = f"no node is left for this kind; what it recommends ({kind.recommended_action}) applies where a rank has failed"
    return Explanation(
        line=line,
        kind=name,
        log=log,
        matched=_matched(line),
        acts=acts,
        reason=reason,
        changes=tuple(_changes(fault, acts=acts)),
        context=context,
    )


def _is_one_event(first: Classification, other: Classification) -> bool:
    events = Events()
    return not [*events.feed([first, other], other.line)] and len([*events.finish()]) == 1


def _no_fault(text: str, log: str | None) -> Explanation:
    first = next(iter(text.strip().splitlines()), "")
    signature = _signature(first)
    changes: tuple[str, ...] = ()
    if signature is None:
        matched = "no signature matches, and its words report no failure"
    elif signature.least > 1:
        matched, changes = _named(signature), (f"a count of {signature.least} or more",)
    else:
        matched = f"{_named(signature)}, which rules a fault out"
    return Explanation(
        line=first, kind=None, log=log or LOGS[-1], matched=matched, acts=False, reason="it reports no fault", changes=changes
    )


def _matched(line: str) -> str:
    if (raised := raised_in(line)) is not None:
        line = f"{raised.type}: {raised.message}".replace("\n", " ")
        return f"the exception that ended the traceback, {raised.type}" + (f", and {_named(found)}" if (found := _signature(line)) else "")
    signature = _signature(line)
    return _named(signature) if signature is not None else "its words, as no signature matches"


def _signature(line: str) -> Signature | None:
    """Return the first signature that matches *line*."""
    text = line[:LONGEST]
    return next((one for one in SIGNATURES if one.regex.search(text)), None)


def _named(signature: Signature) -> str:
    return f"the expression {signature.pattern} in {signature.place}"


def _changes(fault: Fault, *, acts: bool) -> list[str]:
    """Return what would change the verdict on *fault*."""
    kind = fault.entry
    if kind.recommended_action not in TAKES_NODE_OUT:
        return [f"a policy that sets another action for {kind.id} (`recommended_actions`)"]
    if acts:
        others = " or in ".join(_PLACES[log] for log in LOGS if log not in kind.logs)
        return [f"the same line in {others}: it would only be shown", f"a policy: `recommended_actions: {{{kind.id}: monitor}}`"]
    changes = []
    if kind.certain and fault.needs_proof:
        where = " or ".join(_PLACES[log] for log in kind.logs)
        changes.append(f"the line in {where}" + (f", if it also matches {kind.certain}" if kind.certain != ANY else ""))
    if fault.log in kind.logs or not kind.logs:
        measured = (name for name, one in CATALOGUE.items() if name != kind.id and not isinstance(one.unhealthy.evidence, LogLine))
        found = [name for name in measured if confirming_rules(kind, name)]
        beside = sorted(found, key=lambda name: (CATALOGUE[name].area in {Area.SOFTWARE, Area.PROGRESS}, name))
        if beside:
            more = f" and {len(beside) - MOST} more" if len(beside) > MOST else ""
            changes.append(f"a second signal on that node: {', '.join(beside[:MOST])}{more}")
    return [*changes, f"a policy: `recommended_actions: {{{kind.id}: {kind.recommended_action}}}`"]
