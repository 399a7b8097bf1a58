"""`holdfast faults ls`: the fault catalogue, and recorded failures that are not in it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from holdfast.cli.output import clock, echo, echo_facts, echo_json, echo_table, heading, hint
from holdfast.detectors.all_kinds import by_place, words_of
from holdfast.detectors.associations import ASSOCIATIONS, traits_of
from holdfast.detectors.catalogue import AREAS, CATALOGUE, TAKES_NODE_OUT, Area, Attribution, FaultKind, RecommendedAction
from holdfast.detectors.confirmation import ActsOn, acts_on
from holdfast.detectors.evidence import LogLine
from holdfast.detectors.signatures.loading import ANY
from holdfast.errors import UnknownFault, UnknownOptionValue
from holdfast.plurals import plural
from holdfast.spec.files import synonyms


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFilter:
    """Which kinds to list: those that match every given field."""

    words: str | None = None
    area: str | None = None
    component: str | None = None
    recommended_action: str | None = None
    attributed_to: str | None = None
    acts: str | None = None
    """What has to be seen before a node is left because of it, of `ActsOn`."""

    def includes(self, one: FaultKind) -> bool:
        """Return whether *one* matches."""
        exact = ("area", "component", "recommended_action", "attributed_to")
        text = f"{one.id} {one.title} {one.source} {one.action} {one.in_logs}".lower()
        return (
            all(getattr(self, name) in (None, getattr(one, name)) for name in exact)
            and all(word in text for word in (self.words or "").lower().split())
            and (self.acts is None or self.acts in acts_on(one))
        )

    def check(self) -> None:
        """Refuse values that no kind can have: an empty list would suggest that there are no such faults."""
        known: dict[str, Iterable[str]] = {
            "area": Area,
            "component": AREAS,
            "recommended_action": RecommendedAction,
            "attributed_to": Attribution,
            "acts": ActsOn,
        }
        for name, values in known.items():
            given = getattr(self, name)
            if given is not None and given not in tuple(values):
                raise UnknownOptionValue(name.replace("_", "-"), given, tuple(str(value) for value in values))


def list_kinds(*, as_json: bool, **fields: str | None) -> int:
    """List the kinds that match all *fields* of a `FaultFilter`."""
    wanted = FaultFilter(**fields)
    wanted.check()
    kinds = [one for one in by_place() if wanted.includes(one)]
    if as_json:
        echo_json([record(one) for one in kinds])
        return 0
    if not kinds:
        hint(f"None of {len(CATALOGUE)} kinds matches. Leave out an option or a word.")
        return 0
    echo_table(
        ("KIND", "AREA", "COMPONENT", "RECOMMENDED", "ACTS ON", "ATTRIBUTED TO", "TITLE"),
        [(one.id, one.area, one.component, one.recommended_action, ", ".join(acts_on(one)), one.attributed_to, one.title) for one in kinds],
    )
    hint(f"{plural(len(kinds), 'kind')} of {len(CATALOGUE)}. `holdfast faults show KIND` explains one.")
    return 0


def show_kind(kind: str, *, as_json: bool) -> int:
    """Explain one kind."""
    if kind not in CATALOGUE:
        old = synonyms.KINDS.get(kind)
        raise UnknownFault(kind, (old,) if old else tuple(difflib.get_close_matches(kind, CATALOGUE, n=3, cutoff=0.4)))
    one = CATALOGUE[kind]
    if as_json:
        echo_json(record(one))
        return 0
    heading(f"{one.id}: {one.title}")
    facts = [
        ("component", f"{one.area}, {one.component}"),
        ("detected by", one.source),
        ("recommended", one.recommended_action),
        *([("acts on", "\n".join(proofs(one)))] if one.recommended_action in TAKES_NODE_OUT else []),
        ("attributed to", one.attributed_to),
        ("what to do", one.action),
        ("unhealthy", words_of(one.unhealthy)),
        ("healthy", words_of(one.healthy)),
        *([("in logs", one.in_logs)] if one.in_logs else []),
        ("reference", one.reference),
        *((name, "\n".join(rules)) for name, rules in associated(one.id).items() if rules),
    ]
    if one.confused_with:
        facts.append(("often taken for", "\n".join(f"{other}: {CATALOGUE[other].title}" for other in one.confused_with)))
    echo_facts(facts)
    return 0


def proofs(one: FaultKind) -> list[str]:
    """Return what takes a node out because of a fault of this kind."""
    measured = [] if isinstance(one.unhealthy.evidence, LogLine) else ["what is measured"]
    logs = " or ".join(one.logs)
    if not logs:
        return measured
    if not one.certain:
        return [*measured, f"a line in the {logs}, with a second, independent signal on that node"]
    return [*measured, f"a line in the {logs}" + (f" that matches {one.certain}" if one.certain != ANY else "")]


def associated(name: str) -> dict[str, list[str]]:
    """Return the rules by which faults of kind *name* explain others, and follow from others."""
    traits, rules = traits_of(name), ASSOCIATIONS.explains
    return {
        "leads to": [rule.name for rule in rules if rule.cause.takes(traits)],
        "follows from": [rule.name for rule in rules if rule.effect.takes(traits)],
    }


def record(one: FaultKind) -> dict[str, Any]:
    """Return a kind for programs."""
    return {
        "id": one.id,
        "title": one.title,
        "area": one.area,
        "component": one.component,
        "source": one.source,
        "recommended_action": one.recommended_action,
        "acts": list(acts_on(one)),
        "acts_on": proofs(one) if one.recommended_action in TAKES_NODE_OUT else [],
        "attributed_to": one.attributed_to,
        "action": one.action,
        "reference": one.reference,
        "unhealthy": words_of(one.unhealthy),
        "healthy": words_of(one.healthy),
        "in_logs": one.in_logs or None,
        "confused_with": list(one.confused_with),
        "weight": one.weight,
        **{name.replace(" ", "_"): rules for name, rules in associated(one.id).items()},
    }


def list_unknown(*, limit: int, draft: bool, as_json: bool) -> int:
    """List recorded failures that have no kind of their own."""
    from holdfast.classify.unknown_failures import CATCH_ALL, find_unknown_failures  # noqa: PLC0415 (the catalogue alone needs no database)
    from holdfast.history import queries  # noqa: PLC0415
    from holdfast.history.store import History  # noqa: PLC0415

    with closing(History.open(create=False)) as history:
        found = find_unknown_failures(queries.faults_of_kinds(history, CATCH_ALL))[:limit]
    if as_json:
        echo_json([one.record() for one in found])
    elif not found:
        hint("The history has no failure that the catalogue does not know.")
    elif draft:
        echo("\n\n".join(one.draft() for one in found))
    else:
        echo_table(
            ("TIMES", "JOBS", "NODES", "LAST", "RECORDED AS", "MESSAGE"),
            [(str(one.times), str(len(one.jobs)), str(len(one.nodes)), clock(one.last), one.kind, one.quote) for one in found],
        )
        hint("`--draft` writes tables for detectors/signatures, `--json` adds the surrounding output.")
    return 0
