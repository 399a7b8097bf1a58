"""Explain what is made of a log line: what it was recognised by, whether anything is done because of it, and what would change that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Final

from holdfast.classify.classifier import Classification, classify_text
from holdfast.classify.events import Events
from holdfast.classify.origin import NAMES, PLACES, log_of, places_of
from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.catalogue import CATALOGUE_ACTIONS, LOGS, SYSTEM_LOG, TAKES_NODE_OUT, Area, Fault, FaultKind
from holdfast.detectors.confirmation import AGREES, BY_POLICY, CONFIRMED_BY, CONTRADICTED_BY, UNUSED, confirming_rules, why_it_acts
from holdfast.detectors.evidence import LogLine
from holdfast.detectors.log_lines.classification import LONGEST
from holdfast.detectors.log_lines.heuristics import OTHERS
from holdfast.detectors.log_lines.tables import header_of
from holdfast.detectors.signatures import SIGNATURES
from holdfast.detectors.signatures.loading import ANY, Signature
from holdfast.detectors.training.tracebacks import raised_in

MOST: Final = 8
"""Kinds that are listed as what would confirm a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What is made of a line."""

    line: str
    kind: str | None
    """None: it reports no fault."""
    log: str
    """The log that it is taken to be from, one of `LOGS`; empty: its evidence says where it was seen."""
    matched: str
    """What it was recognised by, or what rules a fault out."""
    acts: bool
    """Whether a node with ranks is left, or not used, because of this line alone."""
    reason: str
    """Why it acts, or does not."""
    recommended_action: str | None = None
    """What it recommends."""
    changes: tuple[str, ...] = ()
    """What would change the verdict."""
    context: tuple[str, ...] = ()
    """Further lines that belong to the same event, each with its kind."""
    header: str = ""
    """The header that it was judged with, if it is a value of a table."""

    def facts(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield it for a reader: names, each with one text or several."""
        yield "matched by", (self.matched,)
        if self.header:
            yield "judged with its header", (self.header,)
        if self.kind is not None:
            entry = CATALOGUE[self.kind]
            if self.log:
                yield "taken to be from", (self.log if self.log != SYSTEM_LOG else "the log of a service or a scheduler",)
            if self.context:
                yield "together with", self.context
            yield "acts", (self.whether_it_acts,)
            yield "what to do", (entry.action,)
            yield "reference", (entry.reference,)
        if self.changes:
            yield "would change this", self.changes

    @property
    def whether_it_acts(self) -> str:
        """Whether it acts, and why, as a sentence."""
        reason = self.reason.removeprefix("no: ")
        return f"yes ({self.recommended_action}): {reason}" if self.acts else f"no: {reason}"


def explain(text: str, log: str | None = None) -> Explanation:
    """Explain the first fault in *text*, a line or several that belong together, from *log* (default: the one that writes such lines)."""
    found = classify_text(text)
    if not found:
        return _no_fault(text, log)
    name, line = found[0].kind, found[0].text
    context = tuple(f"{one.kind}: {one.text.strip()}" for one in found[1:] if _is_one_event(found[0], one))[:MOST]
    kind = CATALOGUE[name]
    shown = bool(log or log_of(line))
    log = log or log_of(line) or next(iter(kind.logs), LOGS[-1])
    fault = Fault(kind=name, at=0.0, node="node-0", quote=line, signature=name, source=f"{log} on node-0")
    takes_out = kind.recommended_action in TAKES_NODE_OUT
    proves = takes_out and CATALOGUE_ACTIONS.of(fault) in TAKES_NODE_OUT
    acts = proves and shown
    changes = tuple(_changes(fault, acts=proves))
    if proves and not shown:
        options = " or ".join(f"`--log {name}`" for name, place in NAMES.items() if place in kind.logs)
        reason = f"no: it proves the fault if it is a line of {places_of(kind)}, and it does not begin as one"
        changes = (f"{options}, if that is where it is from", _by_policy(kind))
    elif takes_out:
        reason = why_it_acts(fault, CATALOGUE_ACTIONS)
    else:
        reason = _no_node_is_left(kind)
    return Explanation(
        line=line,
        kind=name,
        log=log,
        matched=_matched(line),
        acts=acts,
        reason=reason,
        recommended_action=str(kind.recommended_action),
        changes=changes,
        context=context,
        header=header_of(line),
    )


@lru_cache(maxsize=1024)
def explain_report(kind: str, source: str, quote: str, proof: str, recommended_action: str) -> Explanation | None:
    """Explain a fault of an incident by what was recorded: who reported it, its line, why it acts or not, and what it recommended there.

    Return None for an unknown kind.
    """
    entry = CATALOGUE.get(kind)
    if entry is None:
        return None
    fault = Fault(kind=kind, at=0.0, node="node-0", quote=quote, signature=kind, source=source)
    if entry.recommended_action in TAKES_NODE_OUT:
        reason = proof or why_it_acts(fault, CATALOGUE_ACTIONS)
    else:
        reason = BY_POLICY if recommended_action in TAKES_NODE_OUT else _no_node_is_left(entry)
    acts = recommended_action in TAKES_NODE_OUT and not reason.startswith("no: ")
    return Explanation(
        line=quote,
        kind=kind,
        log="",
        matched=_what_matched(fault),
        acts=acts,
        reason=reason,
        recommended_action=recommended_action,
        changes=tuple(_changes_of_report(fault, reason, acts=acts)),
        header=header_of(quote),
    )


def _what_matched(fault: Fault) -> str:
    """Return what a recorded fault was recognised by."""
    if not fault.log:
        return f"what was measured ({fault.entry.source})"
    if fault.is_condition:
        signature = _signature(fault.quote, fault.kind)
        name = "the source of the node event" if fault.is_event else "the type of the node condition"
        return name + (f", and {_named(signature)}" if signature is not None else "")
    if fault.is_dcgm:
        return "a verdict of DCGM's health check"
    return _matched(fault.quote, fault.kind)


def _no_node_is_left(kind: FaultKind) -> str:
    if kind.id in OTHERS:
        return "no: its words suggest a failure, and no signature was written for it"
    return f"this kind takes no node out of service; what it recommends ({kind.recommended_action}) applies where a rank has failed"


def _changes_of_report(fault: Fault, reason: str, *, acts: bool) -> Iterator[str]:
    """Yield what would have changed the verdict on a fault whose evidence is known."""
    kind = fault.entry
    only_shown = f"a policy: `recommended_actions: {{{kind.id}: monitor}}`"
    if reason == BY_POLICY:
        yield f"a policy without {kind.id} in its `recommended_actions`"
    elif reason.startswith(CONFIRMED_BY):
        yield f"without {reason.removeprefix(CONFIRMED_BY).partition(AGREES)[0]} it would only be shown"
        yield only_shown
    elif acts and not fault.log:
        yield only_shown
    elif CONTRADICTED_BY in reason:
        yield "a measurement of that device that agrees with the line, and a second signal on that node"
        yield _by_policy(kind)
    elif reason.partition(AGREES)[0].endswith(UNUSED):
        yield "a rank of the job that uses the device"
        yield _by_policy(kind)
    else:
        yield from _changes(fault, acts=acts)


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


def _matched(line: str, kind: str | None = None) -> str:
    if (raised := raised_in(line)) is not None:
        line = f"{raised.type}: {raised.message}".replace("\n", " ")
        found = _signature(line, kind)
        return f"the exception that ended the traceback, {raised.type}" + (f", and {_named(found)}" if found else "")
    signature = _signature(line, kind)
    return _named(signature) if signature is not None else "its words, as no signature matches"


def _signature(line: str, kind: str | None = None) -> Signature | None:
    """Return the first signature that matches *line*; of *kind* only, if that is known: the others need not be compiled."""
    text = line[:LONGEST]
    of_kind = (one for one in SIGNATURES if kind in {None, one.kind} or kind in one.keys.values())
    return next((one for one in of_kind if one.regex.search(text)), None)


def _named(signature: Signature) -> str:
    return f"the expression {signature.pattern} in {signature.place}"


def _changes(fault: Fault, *, acts: bool) -> list[str]:
    """Return what would change the verdict on *fault*."""
    kind = fault.entry
    if kind.recommended_action not in TAKES_NODE_OUT:
        return [f"a policy that sets another action for {kind.id} (`recommended_actions`)"]
    if acts:
        others = " or in ".join(PLACES[log] for log in LOGS if log not in kind.logs)
        return [f"the same line in {others}: it would only be shown", f"a policy: `recommended_actions: {{{kind.id}: monitor}}`"]
    changes = []
    if kind.certain and fault.needs_proof:
        where = " or ".join(PLACES[log] for log in kind.logs)
        changes.append(f"the line in {where}" + (f", if it also matches {kind.certain}" if kind.certain != ANY else ""))
    if fault.log in kind.logs or not kind.logs:
        beside = _beside(kind.id)
        if beside:
            more = f" and {len(beside) - MOST} more" if len(beside) > MOST else ""
            changes.append(f"a second signal on that node: {', '.join(beside[:MOST])}{more}")
    return [*changes, _by_policy(kind)]


def _by_policy(kind: FaultKind) -> str:
    return f"a policy: `recommended_actions: {{{kind.id}: {kind.recommended_action}}}`"


@cache
def _beside(kind: str) -> tuple[str, ...]:
    """Return the measured kinds that confirm a line of *kind*, those of the node's devices first."""
    measured = (name for name, one in CATALOGUE.items() if name != kind and not isinstance(one.unhealthy.evidence, LogLine))
    found = [name for name in measured if confirming_rules(CATALOGUE[kind], name)]
    return tuple(sorted(found, key=lambda name: (CATALOGUE[name].area in {Area.SOFTWARE, Area.PROGRESS}, name)))
