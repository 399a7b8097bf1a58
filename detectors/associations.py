"""Associated faults: which kinds explain which, from `associations.toml`.

The tables select kinds by family (component, area, recommended action, attribution), and by name where a family is too coarse; groups
give either a name.
The rules were drawn from the associated-fault tables of vendors (an Xid of NVIDIA names those that lead to it and follow from it:
https://docs.nvidia.com/deploy/xid-errors/) and from what the samples of the catalogue say of each other.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final, Literal

from holdfast.detectors.catalogue import AREAS, CATALOGUE, Area, Attribution, RecommendedAction

PLACE: Final = Path(__file__).with_name("associations.toml")
_FIELDS: Final = frozenset({"kinds", "components", "areas", "recommended_actions", "attributions", "groups", "but"})


class Scope(StrEnum):
    """Where to look for an effect, relative to its cause."""

    RANK = "rank"
    DEVICE = "device"
    NODE = "node"
    ELSEWHERE = "elsewhere"
    ANYWHERE = "anywhere"


class BadAssociation(ValueError):
    """An invalid table of associated faults."""

    def __init__(self, place: str, reason: str, cure: str) -> None:
        super().__init__(place, reason, cure)
        self.place, self.reason, self.cure = place, reason, cure

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}; {self.cure}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The attributes by which a family selects fault kinds."""

    id: str
    component: str
    area: str
    recommended_action: str
    attributed_to: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A set of fault kinds: by name, by attributes (all given ones must match), and of other families."""

    kinds: frozenset[str] = frozenset()
    components: frozenset[str] = frozenset()
    areas: frozenset[str] = frozenset()
    recommended_actions: frozenset[str] = frozenset()
    attributions: frozenset[str] = frozenset()
    groups: tuple[Family, ...] = ()
    but: frozenset[str] = frozenset()

    def takes(self, one: Traits) -> bool:
        """Return whether *one* belongs to the family."""
        if one.id in self.but:
            return False
        return one.id in self.kinds or self._fits(one) or any(group.takes(one) for group in self.groups)

    def _fits(self, one: Traits) -> bool:
        asked = (
            (self.components, one.component),
            (self.areas, one.area),
            (self.recommended_actions, one.recommended_action),
            (self.attributions, one.attributed_to),
        )
        return any(wanted for wanted, _ in asked) and all(have in wanted for wanted, have in asked if wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Association:
    """A fault of the family *cause* explains one of the family *effect* in its scope and window."""

    name: str
    cause: Family
    effect: Family
    scope: Scope
    before: float
    """Seconds by which the effect may be observed before its cause."""
    after: float
    """Seconds for which effects may follow."""
    strength: float
    """Probability of the effect given the cause: 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Faults of one family on several nodes within seconds are one fault of a shared component."""

    kind: str
    of: Family
    nodes: int
    share: float
    """Minimum fraction of the nodes with ranks."""
    window: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Faults of one family that repeat on one device, and on no other node, are the device's."""

    kind: str
    of: Family
    times: int
    window: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Accused:
    """Faults of several ranks that name one peer are a fault of that peer."""

    kind: str
    of: Family
    observers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Faults of one family are the script's if they follow the step and not the node."""

    of: Family
    together: int | Literal["all"]
    """On how many nodes at once, or on all of them."""
    again: bool
    """Also if it happened before at the same step on another node."""
    reason: str
    """The explanation, if that of the failure itself is not enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """Seconds to wait for more evidence if the root so far is of the family; None: the time until an agent counts as unreachable."""

    of: Family
    all: float
    some: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Associations:
    """All tables."""

    clock_slack: float
    same_clock: float
    own: int
    groups: Mapping[str, Family]
    weights: tuple[tuple[Family, int], ...]
    explains: tuple[Association, ...]
    shared: tuple[Shared, ...]
    repeats: tuple[Repeats, ...]
    accused: tuple[Accused, ...]
    script: tuple[Script, ...]
    settle: tuple[Settle, ...]
    vague: frozenset[str]
    """Kinds of worker output without a specific cause."""
    restates: Mapping[str, Family]
    """Exit kinds, each with the kinds of output that only restate it."""
    named: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The kinds that each table names, for a test."""


def load(place: Path = PLACE) -> Associations:
    """Read the tables at *place*; raise BadAssociation with the invalid table, the reason and what to do."""
    try:
        table = tomllib.loads(place.read_text())
    except tomllib.TOMLDecodeError as error:
        raise BadAssociation(place.name, f"is no TOML ({error})", "fix the line it names") from error
    reader = _RowReader(place.name, table.get("groups", {}))
    try:
        return Associations(
            clock_slack=float(table["clock_slack"]),
            same_clock=float(table["same_clock"]),
            own=int(table["own"]),
            groups={name: reader.group(name, "groups") for name in table.get("groups", {})},
            weights=tuple((reader.family(row, "weight", ("weight",)), int(row["weight"])) for row in table.get("weight", ())),
            explains=tuple(reader.association(row) for row in table.get("explains", ())),
            shared=tuple(Shared(**reader.row(row, "shared")) for row in table.get("shared", ())),
            repeats=tuple(Repeats(**reader.row(row, "repeats")) for row in table.get("repeats", ())),
            accused=tuple(Accused(**reader.row(row, "accused")) for row in table.get("accused", ())),
            script=tuple(Script(**{"again": False, "reason": "", **reader.row(row, "script")}) for row in table.get("script", ())),
            settle=tuple(reader.settle(row) for row in table.get("settle", ())),
            vague=frozenset(table["vague"]),
            restates={name: reader.family(row, f"restates.{name}") for name, row in table.get("restates", {}).items()},
            named=reader.named,
        )
    except KeyError as error:
        raise BadAssociation(place.name, f"says nothing of {error}", "add it") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, BadAssociation):
            raise
        raise BadAssociation(place.name, str(error), "compare the row with the rows around it") from error


class _RowReader:
    """Reads rows and collects the kinds that they name."""

    def __init__(self, file: str, groups: Mapping[str, Mapping[str, Any]]) -> None:
        self._file, self._groups, self._made = file, groups, dict[str, Family]()
        self.named: dict[str, frozenset[str]] = {}

    def group(self, name: str, where: str) -> Family:
        """Return the group *name*."""
        if name not in self._groups:
            raise BadAssociation(
                f"{self._file}, {where}", f"names an unknown group {name!r}", f"known are {', '.join(sorted(self._groups))}"
            )
        if name not in self._made:
            self._made[name] = self.family(self._groups[name], f"groups.{name}")
        return self._made[name]

    def family(self, row: Mapping[str, Any], where: str, other: tuple[str, ...] = ()) -> Family:
        """Return the family that *row* describes; *other* are its other fields."""
        members = {name: value for name, value in row.items() if name not in other}
        if unknown := sorted(members.keys() - _FIELDS):
            raise BadAssociation(
                f"{self._file}, {where}", f"has unknown fields {', '.join(unknown)}", f"known are {', '.join(sorted(_FIELDS))}"
            )
        if not members.keys() - {"but"}:
            raise BadAssociation(f"{self._file}, {where}", "names no kind and no family", "give it one")
        for name, known in (
            ("components", AREAS),
            ("areas", list(Area)),
            ("recommended_actions", list(RecommendedAction)),
            ("attributions", list(Attribution)),
        ):
            if wrong := sorted(set(members.get(name, ())) - set(map(str, known))):
                raise BadAssociation(f"{self._file}, {where}", f"has unknown {name} {', '.join(wrong)}", "take values of the catalogue")
        groups = tuple(self.group(name, where) for name in members.pop("groups", ()))
        self.named[where] = self.named.get(where, frozenset()) | frozenset(members.get("kinds", ())) | frozenset(members.get("but", ()))
        return Family(groups=groups, **{name: frozenset(value) for name, value in members.items()})

    def association(self, row: Mapping[str, Any]) -> Association:
        """Return a rule of which kind explains which."""
        where = f"explains {row.get('name', '?')!r}"
        rest = {name: value for name, value in row.items() if name not in ("cause", "effect", "scope")}
        return Association(
            cause=self.family(row["cause"], where), effect=self.family(row["effect"], where), scope=Scope(row["scope"]), **rest
        )

    def row(self, row: Mapping[str, Any], table: str) -> dict[str, Any]:
        """Return the fields of a row with its family read."""
        if "kind" in row:
            self.named[f"{table} {row['kind']}"] = frozenset({row["kind"]})
        return {**row, "of": self.family(row["of"], table)}

    def settle(self, row: Mapping[str, Any]) -> Settle:
        """Return one rule of how long to wait."""
        some = None if row["some"] == "silence" else float(row["some"])
        return Settle(of=self.family(row["of"], "settle"), all=float(row["all"]), some=some)


ASSOCIATIONS: Final = load()


@cache
def traits_of(kind: str) -> Traits:
    """Return by what families take *kind*; KeyError for one that is not in the catalogue."""
    one = CATALOGUE[kind]
    return Traits(
        id=kind, component=one.component, area=one.area, recommended_action=one.recommended_action, attributed_to=one.attributed_to
    )


@cache
def belongs(kind: str, group: str) -> bool:
    """Return whether *kind* belongs to *group* of the tables."""
    return ASSOCIATIONS.groups[group].takes(traits_of(kind))


@lru_cache(maxsize=65536)
def between(cause: str, effect: str) -> tuple[Association, ...]:
    """Return the rules by which a fault of kind *cause* may explain one of kind *effect*."""
    first, second = traits_of(cause), traits_of(effect)
    return tuple(rule for rule in ASSOCIATIONS.explains if rule.cause.takes(first) and rule.effect.takes(second))


@cache
def script_rule(kind: str) -> Script | None:
    """Return the rule by which failures of *kind* are the script's; None: they never are."""
    return next((rule for rule in ASSOCIATIONS.script if rule.of.takes(traits_of(kind))), None)


@cache
def settle_rule(kind: str) -> Settle | None:
    """Return how long to wait for more evidence if the root is of *kind*; None: not at all."""
    return next((rule for rule in ASSOCIATIONS.settle if rule.of.takes(traits_of(kind))), None)


def follows_step(kind: str) -> bool:
    """Return whether failures of *kind* can be the user code's; those by a signal, a lost node, a full disk or a dead service cannot."""
    rule = script_rule(kind)
    return rule is not None and rule.again


def is_secondary(kind: str) -> bool:
    """Return whether faults of *kind* are secondary: effects of a loss, not its cause."""
    return belongs(kind, "secondary") or belongs(kind, "named-peer")


def usual_weight(kind: str, component: str, recommended_action: str, attributed_to: str) -> int:
    """Return how close to the root cause kinds of this family usually are; 50 if no family defines it."""
    one = Traits(id=kind, component=component, area=AREAS[component], recommended_action=recommended_action, attributed_to=attributed_to)
    return next((weight for family, weight in ASSOCIATIONS.weights if family.takes(one)), 50)
