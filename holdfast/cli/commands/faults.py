"""`holdfast faults`: the catalogue, and what is not in it yet."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from detectors.all_kinds import by_place, words_of
from detectors.associations import ASSOCIATIONS, traits_of
from detectors.catalogue import AREAS, CATALOGUE, Area, Blame, FaultKind, RecommendedAction
from holdfast.cli.output import clock, heading, hint, say, say_facts, say_json, say_rows
from holdfast.errors import UnknownFault, UnknownOptionValue
from holdfast.report.wording import plural


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFilter:
    """Which kinds to list: those to which all that is given applies."""

    words: str | None = None
    area: str | None = None
    component: str | None = None
    recommended_action: str | None = None
    blame: str | None = None

    def includes(self, one: FaultKind) -> bool:
        """Tell whether *one* is wanted."""
        exact = (
            (self.area, one.area),
            (self.component, one.component),
            (self.recommended_action, one.recommended_action),
            (self.blame, one.blame),
        )
        text = f"{one.id} {one.title} {one.source} {one.action} {one.in_logs}".lower()
        return all(want in (None, have) for want, have in exact) and all(word in text for word in (self.words or "").lower().split())

    def check(self) -> None:
        """Refuse what no kind can be: an empty list would say that there are no such faults."""
        known: dict[str, Iterable[str]] = {"area": Area, "component": AREAS, "recommended_action": RecommendedAction, "blame": Blame}
        for name, words in known.items():
            given = getattr(self, name)
            if given is not None and given not in tuple(words):
                raise UnknownOptionValue(name, given, tuple(str(word) for word in words))


def list_kinds(wanted: FaultFilter, *, as_json: bool) -> int:
    """List the kinds that are wanted."""
    wanted.check()
    kinds = [one for one in by_place() if wanted.includes(one)]
    if as_json:
        say_json([record(one) for one in kinds])
        return 0
    if not kinds:
        hint(f"None of {len(CATALOGUE)} kinds is like that. Leave an option out, or ask with fewer words.")
        return 0
    say_rows(
        ("KIND", "AREA", "COMPONENT", "LEVEL", "BLAME", "WHAT IT IS"),
        [(one.id, one.area, one.component, one.recommended_action, one.blame, one.title) for one in kinds],
    )
    hint(f"{plural(len(kinds), 'kind')} of {len(CATALOGUE)}. `holdfast faults show KIND` explains one.")
    return 0


def show_kind(name: str, *, as_json: bool) -> int:
    """Explain one kind."""
    if name not in CATALOGUE:
        raise UnknownFault(name, tuple(difflib.get_close_matches(name, CATALOGUE, n=3, cutoff=0.4)))
    one = CATALOGUE[name]
    if as_json:
        say_json(record(one))
        return 0
    heading(f"{one.id}: {one.title}")
    facts = [
        ("place", f"{one.area}, {one.component}"),
        ("seen by", one.source),
        ("recommended_action", one.recommended_action),
        ("blames", one.blame),
        ("answer", one.action),
        ("unhealthy", words_of(one.unhealthy)),
        ("healthy", words_of(one.healthy)),
        *([("in logs", one.in_logs)] if one.in_logs else []),
        ("reference", one.reference),
    ]
    for word, rules in associated(one.id).items():
        if rules:
            facts.append((word, "\n".join(rules)))
    if one.confused_with:
        facts.append(("often taken for", "\n".join(f"{other}: {CATALOGUE[other].title}" for other in one.confused_with)))
    say_facts(facts)
    return 0


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
        "blame": one.blame,
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
    """List what failed and has no kind of its own, out of the history."""
    from holdfast.classify.unknown_failures import CATCH_ALL, find_unknown_failures  # noqa: PLC0415 (the history: the catalogue alone does without a database)
    from holdfast.history import queries  # noqa: PLC0415
    from holdfast.history.store import History  # noqa: PLC0415

    book = History.open(create=False)
    try:
        found = find_unknown_failures(queries.faults_of_kinds(book, CATCH_ALL))[:limit]
    finally:
        book.close()
    if as_json:
        say_json([one.record() for one in found])
    elif not found:
        hint("The history holds no failure that the catalogue does not know.")
    elif draft:
        say("\n\n".join(one.draft() for one in found))
    else:
        say_rows(
            ("TIMES", "JOBS", "NODES", "LAST", "RECORDED AS", "WHAT WAS SAID"),
            [(str(one.times), str(len(one.jobs)), str(len(one.nodes)), clock(one.last), one.kind, one.quote) for one in found],
        )
        hint("`--draft` writes tables for detectors/signatures, `--json` adds what was printed around them.")
    return 0
