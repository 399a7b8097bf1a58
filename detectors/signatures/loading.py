"""Load signature tables: compile their expressions and define their fault kinds."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from holdfast.detectors.associations import usual_weight
from holdfast.detectors.catalogue import AREAS, LOGS, Attribution, FaultKind, RecommendedAction, register
from holdfast.detectors.evidence import LogLine, Sample

HERE: Final = Path(__file__).parent
FILES: Final = (
    "node_monitors", "innocent", "xid", "nvlink", "nvswitch", "nvidia", "gpu_health", "amd", "accelerators", "aer", "pcie", "memory", "cpu",
    "power", "progress", "counters", "infiniband", "nccl", "pytorch", "cuda", "ethernet", "containers", "nvme", "disks", "file_systems",
    "network_fs", "kernel", "limits", "services", "schedulers", "data", "processes", "python",
)  # fmt: skip
"""The tables in order of precedence: specific devices and libraries before general programs."""

ANY: Final = "^"
"""The expression of a kind that any of its lines proves (`certain = true`)."""
REACH: Final = 1024
"""Maximum length that ``.*`` in an expression matches: unbounded, repeated beginnings cost quadratic time."""
REACHES: Final = 256
"""The same for an expression with several, as the cost is the product of their lengths."""
_GAP: Final = re.compile(r"(?P<kept>\\.|\[\^?\]?(?:\\.|[^\]\\])*\])|\.(?P<times>[*+])", re.DOTALL)
"""An escape or a character set, to keep; or an unbounded repeated dot."""

_SHARED: Final = frozenset({
    "component", "source", "logs", "certain", "reference", "recommended_action", "attributed_to", "action", "healthy", "confused_with",
    "weight",
})  # fmt: skip
_OF_FILE: Final = _SHARED | {"family", "quiet", "other", "clears"}
_OF_KIND: Final = _SHARED | {"title", "match", "keys", "least", "unhealthy"}
_NEEDED: Final = (
    "component", "source", "logs", "reference", "recommended_action", "attributed_to", "action", "healthy", "title", "unhealthy",
)  # fmt: skip


class BadSignature(ValueError):
    """An invalid signature table."""

    def __init__(self, place: str, reason: str, cure: str) -> None:
        super().__init__(place, reason, cure)
        self.place, self.reason, self.cure = place, reason, cure

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}; {self.cure}"


@dataclass(frozen=True, kw_only=True)
class Signature:
    """One expression, with the kind of the lines that it matches."""

    pattern: str
    place: str = ""
    """The table that defines it."""
    kind: str | None = None
    """None: no fault, or by *keys*."""
    keys: Mapping[str, str] = field(default_factory=dict)
    quiet: frozenset[str] = frozenset()
    least: int = 1

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """The expression, compiled at first use."""
        return re.compile(bounded(self.pattern), re.ASCII)

    def kind_of(self, found: re.Match[str]) -> str | None:
        """Return the kind of a match; None: the line is known and no fault."""
        if not found.re.groupindex:
            return self.kind
        groups = found.groupdict()
        if (key := groups.get("key")) is not None:
            key = key.strip()
            return None if key in self.quiet else self.keys.get(key, self.kind)
        if (count := groups.get("count")) is not None and float(count) < self.least:
            return None
        return self.kind


def bounded(pattern: str) -> str:
    """Return *pattern* with bounds on each repeated dot, so that its cost is linear in the line length."""

    def with_an_end(found: re.Match[str]) -> str:
        return found[0] if found["kept"] else f".{{{int(found['times'] == '+')},{reach}}}"

    reach = REACH if sum(not found["kept"] for found in _GAP.finditer(pattern)) == 1 else REACHES
    return _GAP.sub(with_an_end, pattern)


def load(folder: Path = HERE, files: tuple[str, ...] = FILES, enter: Callable[[FaultKind], object] = register) -> tuple[Signature, ...]:
    """Read the tables of *files* in *folder*, define their kinds with *enter*, and return their signatures in order."""
    return tuple(signature for name in files for signature in _of_file(folder / f"{name}.toml", enter))


def check(signature: Signature) -> None:
    """Raise for an expression that cannot be compiled. Takes a second, so only tests call it."""
    try:
        re.compile(bounded(signature.pattern), re.ASCII)
    except re.error as error:
        raise BadSignature(signature.place, f"{signature.pattern!r} cannot be used ({error})", "correct the expression") from error


def _of_file(path: Path, enter: Callable[[FaultKind], object]) -> Iterator[Signature]:
    try:
        table = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise BadSignature(path.name, f"is no TOML ({error})", "fix the line it names") from error
    shared = {name: value for name, value in table.items() if not isinstance(value, dict)}
    _refuse_unknown(path.name, shared, _OF_FILE)
    for pattern in shared.get("clears", ()):
        yield Signature(pattern=pattern, place=path.name)
    keys: dict[str, str] = {}
    for name, row in table.items():
        if isinstance(row, dict):
            place = f"{path.name}, [{name}]"
            enter(_kind(name, row, {**shared, **row}, place))
            yield from (Signature(pattern=one, place=place, kind=name, least=row.get("least", 1)) for one in row.get("match", ()))
            for key in row.get("keys", ()):
                if (owner := keys.setdefault(key, name)) != name or key in shared.get("quiet", ()):
                    other = f"{owner}'s" if owner != name else "quiet"
                    raise BadSignature(place, f"claims the key {key}, which is {other}", "leave it to one of them")
    if "family" in shared:
        quiet = frozenset(shared.get("quiet", ()))
        yield Signature(pattern=shared["family"], place=path.name, kind=shared.get("other"), keys=keys, quiet=quiet)


def _kind(name: str, row: Mapping[str, Any], all_of_it: Mapping[str, Any], place: str) -> FaultKind:
    """Return one fault kind for the catalogue."""
    _refuse_unknown(place, row, _OF_KIND)
    missing = [word for word in _NEEDED if not all_of_it.get(word)]
    if unheard := [log for log in all_of_it.get("logs", ()) if log not in LOGS]:
        raise BadSignature(place, f"is in unknown logs {', '.join(unheard)}", f"take some of {', '.join(LOGS)}")
    if missing:
        raise BadSignature(place, f"says nothing of {', '.join(missing)}", "add it here or at the head of the file")
    if not row.keys() & {"match", "keys"} and name != all_of_it.get("other"):
        raise BadSignature(place, "cannot be recognised", "give it `match`, or `keys` of the file's family")
    if all_of_it["component"] not in AREAS:
        raise BadSignature(
            place, f"is of an unknown component {all_of_it['component']!r}", "take one of `holdfast.detectors.catalogue.COMPONENTS`"
        )
    try:
        recommended_action, attributed_to = RecommendedAction(all_of_it["recommended_action"]), Attribution(all_of_it["attributed_to"])
    except ValueError as error:
        raise BadSignature(place, str(error), "take a word of `holdfast.detectors.catalogue`") from error
    return FaultKind(
        id=name,
        title=all_of_it["title"],
        component=all_of_it["component"],
        source=all_of_it["source"],
        recommended_action=recommended_action,
        attributed_to=attributed_to,
        action=all_of_it["action"],
        reference=all_of_it["reference"],
        unhealthy=Sample(LogLine(text=all_of_it["unhealthy"])),
        healthy=Sample(LogLine(text=all_of_it["healthy"])),
        weight=all_of_it.get("weight", usual_weight(name, all_of_it["component"], recommended_action, attributed_to)),
        confused_with=tuple(all_of_it.get("confused_with", ())),
        logs=tuple(all_of_it["logs"]),
        certain=_certain(all_of_it.get("certain", False)),
    )


def _certain(value: bool | str) -> str:  # noqa: FBT001 (a value of the table)
    """Return the expression for lines that prove a kind: any, if the table has `true`."""
    return value if isinstance(value, str) else ANY if value else ""


def _refuse_unknown(place: str, row: Mapping[str, Any], known: frozenset[str]) -> None:
    if unknown := sorted(row.keys() - known):
        raise BadSignature(place, f"has unknown fields {', '.join(unknown)}", f"known are {', '.join(sorted(known))}")
