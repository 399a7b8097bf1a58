"""Faults and what they explain: a graph from `associations`, and the candidates for the root with their weights.

Each fault is scored by how near the root its kind usually is, how little of it others explain, how much it explains, whether it came
first (as far as clocks can tell), and how many told of it independently. Scores become weights: shares of one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from detectors.associations import ASSOCIATIONS, Association, Scope, belongs, between
from detectors.catalogue import CATALOGUE_ACTIONS, Fault, RecommendedActions

MOST: Final = 16
"""Candidates that are weighed against each other; the echoes of ten thousand ranks are not compared pair by pair."""
MULTITUDE: Final = 256
"""From so many subjects on only candidates of some weight are compared with all of them."""
_LIGHT: Final = 0.2
NEGLIGIBLE: Final = 0.02
"""Weight below which an explanation is not kept."""
_COVERS: Final = 0.5
"""How much explaining all the rest adds to a score, as a share of it."""
_LATER: Final = 0.92
"""What a candidate keeps of its score when something came surely before it that it does not explain."""
_LONG_BEFORE: Final = 30.0
"""Seconds before the job stopped: what was there earlier, and training went on, is no root of what it does not explain."""
_STALE: Final = 0.4
"""What such a candidate keeps of its score."""
_WITNESS: Final = 0.04
"""What each further independent source adds, up to four."""
_UNORDERED: Final = 0.7
"""What is left of a rule's strength when the order of cause and effect fits only if clocks differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One explanation of an incident: a fault as its root."""

    fault: Fault
    weight: float
    """How likely it is beside the others: 0 to 1; those of all candidates are 1 together, but for what is negligible."""
    reason: str
    """By which rules it explains the rest."""
    evidence: tuple[Fault, ...]
    """What was told of it itself, earliest first; each with its time and source."""
    explains: tuple[Fault, ...] = ()
    unexplained: tuple[Fault, ...] = ()


@dataclass(slots=True)
class _Group:
    """The faults of one kind seen on one subject."""

    faults: list[Fault]
    device: str
    recommended_actions: RecommendedActions = CATALOGUE_ACTIONS
    first: Fault = field(init=False)

    def __post_init__(self) -> None:
        self.faults.sort(key=_order)
        self.first = self.faults[0]

    @property
    def weight(self) -> int:
        return self.first.entry.weight

    @property
    def needs_action(self) -> bool:
        """Tell whether they ask for an answer: one that does not is a root only as far as it explains others."""
        return self.recommended_actions.needs_action(self.first)

    def sources(self) -> int:
        return len({fault.source for fault in self.faults if fault.source}) or 1


def candidates(faults: Sequence[Fault], recommended_actions: RecommendedActions = CATALOGUE_ACTIONS) -> list[Candidate]:
    """Return what may be the root of *faults* (at least one), the likeliest first."""
    groups = _grouped(faults, recommended_actions)
    runners = _runners(groups)
    links = [[_strength(cause, effect) for effect in groups] for cause in runners]
    places = {id(group): place for place, group in enumerate(groups)}
    reach = _closed(links, [places[id(one)] for one in runners])
    scores = [_score(number, runners, groups, reach) for number in range(len(runners))]
    whole = sum(scores)
    ranked = sorted(
        range(len(runners)), key=lambda number: (-round(scores[number], 9), -runners[number].weight, _order(runners[number].first))
    )
    return [
        _candidate(runners[number], groups, reach[number], links[number], scores[number] / whole)
        for place, number in enumerate(ranked)
        if place == 0 or scores[number] >= NEGLIGIBLE * whole
    ]


def _runners(groups: list[_Group]) -> list[_Group]:
    """Return the groups that may be the root: the heaviest and first; of a multitude not those that could never outweigh the heaviest."""
    ranked = sorted(groups, key=lambda one: (not one.needs_action, -one.weight, _order(one.first)))[:MOST]
    if len(groups) <= MULTITUDE:
        return ranked
    return [one for one in ranked if one.weight >= _LIGHT * ranked[0].weight]


def explained(cause: Fault, effect: Fault) -> float:
    """Return how surely *effect* follows from *cause* directly: 0 to 1."""
    return _strength(_Group([cause], device_of(cause)), _Group([effect], device_of(effect)))[0]


def _grouped(faults: Iterable[Fault], recommended_actions: RecommendedActions) -> list[_Group]:
    found: dict[tuple[str, str | None, int | None, str], list[Fault]] = defaultdict(list)
    for fault in faults:
        found[fault.kind, fault.node, fault.rank, device_of(fault)].append(fault)
    return [_Group(list(members), device, recommended_actions) for (_, _, _, device), members in found.items()]


def _order(fault: Fault) -> tuple[float, str, int, str]:
    return fault.at, fault.node or "", -1 if fault.rank is None else fault.rank, fault.quote


def _strength(cause: _Group, effect: _Group) -> tuple[float, str]:
    """Return how surely *effect* follows from *cause* by one rule, and the rule."""
    if cause is effect:
        return 0.0, ""
    best, name = 0.0, ""
    for rule in between(cause.first.kind, effect.first.kind):
        strength = rule.strength * _in_window(rule, cause, effect) if _in_scope(rule.scope, cause, effect) else 0.0
        if strength > best:
            best, name = strength, rule.name
    return best, name


def _in_scope(scope: Scope, cause: _Group, effect: _Group) -> bool:
    one, other = cause.first, effect.first
    if scope is Scope.ANYWHERE:
        return True
    if scope is Scope.ELSEWHERE:
        return one.node is None or one.node != other.node
    if one.node is None or one.node != other.node:
        return False
    if scope is Scope.RANK:
        return one.rank == other.rank
    return scope is Scope.NODE or not (cause.device and effect.device) or cause.device == effect.device


def _in_window(rule: Association, cause: _Group, effect: _Group) -> float:
    """Return 1 when the times fit the rule, less when they fit only if clocks differ, 0 when they do not."""
    between_them = effect.first.at - cause.first.at
    if -rule.before <= between_them <= rule.after:
        return 1.0
    slack = _slack(cause.first, effect.first)
    return _UNORDERED if -rule.before - slack <= between_them <= rule.after + slack else 0.0


def _slack(one: Fault, other: Fault) -> float:
    return ASSOCIATIONS.same_clock if one.node == other.node else ASSOCIATIONS.clock_slack


def _closed(links: list[list[tuple[float, str]]], places: list[int]) -> list[list[float]]:
    """Return how surely each candidate leads to each group, by way of other candidates too."""
    reach = [[strength for strength, _ in row] for row in links]
    for way, place in enumerate(places):
        for number, row in enumerate(reach):
            if number != way and row[place]:
                through = row[place]
                reach[number] = [max(direct, through * further) for direct, further in zip(row, reach[way], strict=True)]
    for number, place in enumerate(places):
        reach[number][place] = 0.0
    return reach


def _score(number: int, runners: list[_Group], groups: list[_Group], reach: list[list[float]]) -> float:
    me = runners[number]
    place = next(place for place, group in enumerate(groups) if group is me)
    away = max((reach[other][place] * runners[other].weight / 100 for other in range(len(runners)) if other != number), default=0.0)
    others = [other for other, group in enumerate(groups) if group is not me]
    covers = sum(reach[number][other] for other in others) / len(others) if others else 0.0
    score = max(me.weight, 1) / 100 * (1.0 - away) * (1.0 + _COVERS * covers)
    score *= 1.0 + _WITNESS * min(me.sources() - 1, 4)
    stops = [other for other, group in enumerate(groups) if belongs(group.first.kind, "stops-the-job")]
    begin = min((groups[other].first.at for other in stops), default=me.first.at) - _LONG_BEFORE
    if me.first.at < begin and not any(reach[number][other] for other in stops):
        score *= _STALE
    unmoved = [groups[other] for other in others if reach[number][other] == 0.0 and groups[other].needs_action]
    if any(begin <= other.first.at < me.first.at - _slack(other.first, me.first) for other in unmoved):
        score *= _LATER
    acting = [other for other in others if groups[other].needs_action]
    if not me.needs_action and acting:
        score *= max(0.05, *(reach[number][other] for other in acting))
    return score


def _candidate(me: _Group, groups: list[_Group], reach: list[float], links: list[tuple[float, str]], weight: float) -> Candidate:
    others = [(group, far) for group, far in zip(groups, reach, strict=True) if group is not me]
    rules: Mapping[str, None] = dict.fromkeys(name for _, name in sorted(links, reverse=True) if name)
    return Candidate(
        fault=me.first,
        weight=round(weight, 4),
        reason="; ".join(rules),
        evidence=tuple(me.faults),
        explains=tuple(fault for group, far in others if far > 0.0 for fault in group.faults),
        unexplained=tuple(fault for group, far in others if far == 0.0 for fault in group.faults),
    )


# -- devices and peers that a fault names --------------------------------------------------------------------------------

_BUS: Final = re.compile(r"(?:PCI:|\b)[0-9a-fA-F]{4,8}:(?P<bus>[0-9a-fA-F]{2}:[0-9a-fA-F]{2})\b")
_PART: Final = re.compile(
    r"\b(?P<part>mlx[45]_\d+|(?:bond|ib|eth|roce|rdma|enp|ens|eno)\d\w*|nvme\d+(?:n\d+)?|sd[a-z]{1,2}|md\d+|GPU[- ]?\d+|dimm\w*\d)\b",
    re.IGNORECASE,
)
_STAMP: Final = re.compile(r"\b\d{1,2}:\d{2}:\d{2}\b|\d{4}-\d\d-\d\dT?\S*")
_HOST: Final = re.compile(
    r"(?:[Pp]eer|[Cc]onnect to|remote (?:peer )?address|connection (?:to|from))\s+(?:address )?"
    r"\[?(?P<host>[A-Za-z0-9][\w.-]*)\]?\s*[<:](?P<port>\d+)"
)
_GLOO: Final = re.compile(r"\[(?P<host>[0-9a-fA-F.:]+)\]:\d+")
_NUMBERS: Final = r"\d+(?:\s*,\s*\d+)*"
_RANKS: Final = re.compile(
    r"(?i)\b(?:remote rank|peer rank|from rank|to rank|rank\(s\)|dead ranks?|missing ranks?|peer)[ :=]+"
    rf"\[?(?P<ranks>{_NUMBERS})\b(?![.<:\w])"
    rf"|\branks? \[?(?P<failed>{_NUMBERS})\]? "
    r"(?:failed to pass|did not (?:arrive|come|join|call)|not respond|is dead|has not joined)"
)


def device_of(fault: Fault) -> str:
    """Return the part of the node that *fault* was seen on: what the detector says, or what its words name; empty for none."""
    return device_in(fault.device) or fault.device or device_in(fault.quote)


@lru_cache(maxsize=4096)
def device_in(text: str) -> str:
    """Return the device that *text* names, in one form however it is written; empty for none."""
    text = _STAMP.sub(" ", text)
    if found := _BUS.search(text):
        return found["bus"].lower()
    return found["part"].lower() if (found := _PART.search(text)) else ""


@lru_cache(maxsize=16384)
def peers_in(text: str) -> frozenset[str]:
    """Return whom *text* accuses: hosts and addresses as they stand, ranks as ``rank 3``."""
    hosts = {found["host"] for pattern in (_HOST, _GLOO) for found in pattern.finditer(text)}
    told = [found["ranks"] or found["failed"] for found in _RANKS.finditer(text)]
    ranks = {f"rank {number.strip()}" for one in told for number in one.split(",")}
    return frozenset(hosts | ranks)
