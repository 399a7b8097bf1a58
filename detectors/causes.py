"""Rank the hypotheses about the root cause of an incident, from the associations between fault kinds.

A fault's score depends on how close to a root cause its kind usually is, how little of it other faults explain, how much it explains,
whether it came first (within clock error), and how many independent sources reported it. The confidences are their shares, sharpened.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from holdfast.detectors.associations import ASSOCIATIONS, Association, Scope, belongs, between
from holdfast.detectors.catalogue import CATALOGUE_ACTIONS, Fault, RecommendedActions

MOST: Final = 16
"""Maximum number of candidates: faults of ten thousand ranks are not compared pairwise."""
MULTITUDE: Final = 256
"""From this many groups on, light candidates are dropped."""
_LIGHT: Final = 0.2
NEGLIGIBLE: Final = 0.02
"""Weight below which a hypothesis is dropped."""
_COVERS: Final = 0.5
"""Share that explaining all other faults adds to a score."""
_LATER: Final = 0.92
"""Factor for a candidate if an unexplained fault surely came before it."""
_LONG_BEFORE: Final = 30.0
"""Seconds before the job stopped: an earlier fault that training survived is not the root cause of what it does not explain."""
_STALE: Final = 0.4
"""Factor for such a candidate."""
SHARPNESS: Final = 4.0
"""Exponent of the scores in the confidences, so that a confidence is right as often as it says: fitted to 124 injected incidents, checked
with others (`python -m benchmarks.causes`)."""
_UNPROVEN: Final = 0.1
"""Factor for a log line that a healthy node may write and that nothing confirms (`holdfast.detectors.confirmation`)."""
_WITNESS: Final = 0.04
"""Share that each further independent source adds, up to four."""
_UNORDERED: Final = 0.7
"""Factor for a rule if the order of cause and effect fits only within clock error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A hypothesis about an incident: one fault as its root cause."""

    fault: Fault
    confidence: float
    """Its likelihood among all candidates, 0 to 1; the sum is 1, apart from dropped ones."""
    reason: str
    """The rules by which it explains other faults."""
    evidence: tuple[Fault, ...]
    """Reports of the fault itself, earliest first."""
    explains: tuple[Fault, ...] = ()
    unexplained: tuple[Fault, ...] = ()


@dataclass(slots=True)
class _Group:
    """The faults of one kind on one rank, node or device."""

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
        """Return whether they need a reaction; otherwise they are a root cause only as far as they explain others."""
        return self.recommended_actions.needs_action(self.first)

    @property
    def only_shown(self) -> bool:
        """Return whether they are a line that a healthy node may write, and nothing confirms it."""
        return self.recommended_actions.only_shows(self.first)

    def sources(self) -> int:
        """Return how many sources reported them; that the kernel agrees with a line is one more."""
        return len({fault.source for fault in self.faults if fault.source} | {"measured" for fault in self.faults if fault.supported}) or 1


def candidates(faults: Sequence[Fault], recommended_actions: RecommendedActions = CATALOGUE_ACTIONS) -> list[Candidate]:
    """Return the hypotheses about *faults* (at least one), the most likely first."""
    groups = _grouped(faults, recommended_actions)
    runners = _runners(groups)
    links = [[_strength(cause, effect) for effect in groups] for cause in runners]
    places = {id(group): place for place, group in enumerate(groups)}
    reach = _closed(links, [places[id(one)] for one in runners])
    scores = [_score(number, runners, groups, reach) for number in range(len(runners))]
    total, sharp = sum(scores), sum(score**SHARPNESS for score in scores)
    ranked = sorted(
        range(len(runners)), key=lambda number: (-round(scores[number], 9), -runners[number].weight, _order(runners[number].first))
    )
    return [
        _candidate(runners[number], groups, reach[number], links[number], scores[number] ** SHARPNESS / sharp)
        for place, number in enumerate(ranked)
        if place == 0 or scores[number] >= NEGLIGIBLE * total
    ]


def _runners(groups: list[_Group]) -> list[_Group]:
    """Return the groups that may be the root cause: the heaviest and earliest; of many groups only those that can outweigh the heaviest."""
    ranked = sorted(groups, key=lambda one: (not one.needs_action, -one.weight, _order(one.first)))[:MOST]
    if len(groups) <= MULTITUDE:
        return ranked
    return [one for one in ranked if one.weight >= _LIGHT * ranked[0].weight]


def explained(cause: Fault, effect: Fault) -> float:
    """Return how strongly *cause* explains *effect* directly: 0 to 1."""
    return _strength(_Group([cause], device_of(cause)), _Group([effect], device_of(effect)))[0]


def _grouped(faults: Iterable[Fault], recommended_actions: RecommendedActions) -> list[_Group]:
    found: dict[tuple[str, str | None, int | None, str, bool], list[Fault]] = defaultdict(list)
    for fault in faults:
        found[fault.kind, fault.node, fault.rank, device_of(fault), fault.is_ruled_out].append(fault)
    return [_Group(list(members), device, recommended_actions) for (_, _, _, device, _), members in found.items()]


def _order(fault: Fault) -> tuple[float, str, int, str]:
    return fault.at, fault.node or "", -1 if fault.rank is None else fault.rank, fault.quote


def _strength(cause: _Group, effect: _Group) -> tuple[float, str]:
    """Return how strongly *cause* explains *effect* by one rule, and the rule's name."""
    if cause is effect or cause.first.is_ruled_out:
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
    if scope is Scope.NODE:
        disks = {disk_of(one), disk_of(other)} - {""}
        return len(disks) < 2  # noqa: PLR2004 (two disks of a node do not speak for each other)
    return not (cause.device and effect.device) or cause.device == effect.device


def _in_window(rule: Association, cause: _Group, effect: _Group) -> float:
    """Return 1 if the times fit the rule, less if they fit only within clock error, else 0."""
    between_them = effect.first.at - cause.first.at
    if -rule.before <= between_them <= rule.after:
        return 1.0
    slack = _slack(cause.first, effect.first)
    return _UNORDERED if -rule.before - slack <= between_them <= rule.after + slack else 0.0


def _slack(one: Fault, other: Fault) -> float:
    return ASSOCIATIONS.same_clock if one.node == other.node else ASSOCIATIONS.clock_slack


def _closed(links: list[list[tuple[float, str]]], places: list[int]) -> list[list[float]]:
    """Return how strongly each candidate explains each group, also through other candidates."""
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
    if me.only_shown:
        score *= _UNPROVEN
    acting = [other for other in others if groups[other].needs_action]
    if not me.needs_action and acting:
        score *= max(0.05, *(reach[number][other] for other in acting))
    return score


def _candidate(me: _Group, groups: list[_Group], reach: list[float], links: list[tuple[float, str]], confidence: float) -> Candidate:
    others = [(group, far) for group, far in zip(groups, reach, strict=True) if group is not me]
    rules: Mapping[str, None] = dict.fromkeys(name for _, name in sorted(links, reverse=True) if name)
    return Candidate(
        fault=me.first,
        confidence=round(confidence, 4),
        reason="; ".join(rules),
        evidence=tuple(me.faults),
        explains=tuple(fault for group, far in others if far > 0.0 for fault in group.faults),
        unexplained=tuple(fault for group, far in others if far == 0.0 for fault in group.faults),
    )


# -- devices and peers named by a fault --------------------------------------------------------------------------------

_BUS: Final = re.compile(r"(?:PCI:|\b)[0-9a-fA-F]{4,8}:(?P<bus>[0-9a-fA-F]{2}:[0-9a-fA-F]{2})\b")
_PART: Final = re.compile(
    r"\b(?P<part>(?:mlx[45]_\d+|(?:bond|ib|eth|roce|rdma|enp|ens|eno)\d\w*|md\d+|GPU[- ]?\d+|dimm\w*\d)\b"
    r"|nvme\d+(?=(?:n\d+)?(?:p\d+)?\b)|sd[a-z]{1,2}(?=\d*\b))",
    re.IGNORECASE,
)
"""A disk is named without its namespace and partition, as a line of its controller or of its file system names it."""
_DISK: Final = re.compile(r"nvme\d+|sd[a-z]{1,2}")
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
    r"(?:failed to pass|did not (?:arrive|come|join|call)|not respond|(?:is|are) (?:dead|lost)|has not joined)"
)


def device_of(fault: Fault) -> str:
    """Return the device of *fault*: from the detector, or from its text; empty if there is none."""
    return device_in(fault.device) or fault.device or device_in(fault.quote)


def disk_of(fault: Fault) -> str:
    """Return the disk that *fault* is about; empty if it names none, or only a volume or a mount that may span several."""
    return next((name for text in (fault.device, fault.quote) if _DISK.fullmatch(name := device_in(text))), "")


@lru_cache(maxsize=4096)
def device_in(text: str) -> str:
    """Return the device that *text* names, normalized; empty if there is none."""
    text = _STAMP.sub(" ", text)
    if found := _BUS.search(text):
        return found["bus"].lower()
    return found["part"].lower() if (found := _PART.search(text)) else ""


@lru_cache(maxsize=16384)
def peers_in(text: str) -> frozenset[str]:
    """Return the peers that *text* names: hosts and addresses as written, ranks as ``rank 3``."""
    hosts = {found["host"] for pattern in (_HOST, _GLOO) for found in pattern.finditer(text)}
    lists = [found["ranks"] or found["failed"] for found in _RANKS.finditer(text)]
    ranks = {f"rank {number.strip()}" for one in lists for number in one.split(",")}
    return frozenset(hosts | ranks)
