"""Find the rank that blocks a hanging job, from the dumps of torch's flight recorder: for jobs of any launcher.

Each rank writes one, as a pickle or as JSON, with the newest operations of its process groups (torch 2.5 or newer; NCCL and gloo).
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final, NoReturn

from holdfast.detectors.evidence import GroupProgress, PendingOperation, RankProgress, RankStatus
from holdfast.detectors.training.hang_analysis import UNKNOWN_COUNT, HangFinding, explain

_DEFAULT: Final = "0"
"""Name of the group of all ranks."""
_OURS: Final = re.compile(r"[/\\]torch[/\\]|^<frozen ")
"""Files of torch, in a stack."""
_WRONG: Final = (
    *(pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, LookupError, MemoryError),
    *(RecursionError, TypeError, ValueError),
)
"""What reading anything else raises."""


class NotADump(ValueError):
    """The data is no dump of the flight recorder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """An operation in a dump."""

    group: str
    number: int
    """Its sequence number among the collectives of the group."""
    name: str
    size: int
    kind: str
    finished: bool
    point_to_point: bool
    at: float
    """When it was started, in seconds since 1970."""
    place: str
    """The line of the user's code that started it; empty in JSON, which has no stacks."""

    @property
    def words(self) -> str:
        """Its name in a sentence."""
        return f"{self.name} of group {self.group}" if self.point_to_point else f"{self.name} #{self.number} of group {self.group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """What one rank recorded."""

    records: tuple[Record, ...]
    members: Mapping[str, tuple[int, ...]]
    """Ranks by group, where the dump has them."""
    overwritten: bool
    """Records were overwritten by newer ones."""


def read(data: bytes) -> Dump:
    """Return the dump in *data*, a pickle or JSON; raise `NotADump` if it is none, or names a class."""
    try:
        found = json.loads(data) if data[:1] in (b"{", b"[") else _Plain(io.BytesIO(data)).load()
        entries = found["entries"]
        return Dump(
            records=tuple(_record(one) for one in entries),
            members=dict(_members(found.get("pg_config") or {})),
            overwritten=bool(entries) and int(entries[0]["record_id"]) > 0,
        )
    except _WRONG as error:
        raise NotADump(str(error) or type(error).__name__) from error


def rank_of(name: str) -> int | None:
    """Return the rank that wrote the file *name*: torch ends the name with it."""
    found = re.search(r"(?<!\d)(\d{1,6})$", PurePath(name).name.removesuffix(".json").removesuffix(".pickle").removesuffix(".pkl"))
    return int(found[1]) if found else None


def explained(dumps: Mapping[int, Dump]) -> HangFinding | None:
    """Return which rank blocks the others; None if the dumps do not show it."""
    members = _all_members(dumps)
    ranks = {rank: RankProgress(node="", step=0, age=0.0, status=_status(dump, members)) for rank, dump in dumps.items()}
    found = explain(ranks)
    if found is None or found.kind or found.rank is None or not missing(dumps):
        return found
    # A rank that waits itself may wait for one without a dump.
    return None if any(not one.finished for one in dumps[found.rank].records) else found


def missing(dumps: Mapping[int, Dump]) -> tuple[int, ...]:
    """Return the ranks that are known to exist and whose dumps are not there."""
    return tuple(sorted({rank for ranks in _all_members(dumps).values() for rank in ranks} - dumps.keys()))


def unfinished(dumps: Mapping[int, Dump]) -> Iterator[tuple[int, Record]]:
    """Yield each rank's oldest operation that is not finished."""
    for rank, dump in sorted(dumps.items()):
        waits = [one for one in dump.records if not one.finished]
        if waits:
            yield rank, waits[0]


# -- records ------------------------------------------------------------------------------------------------------------


class _Plain(pickle.Unpickler):
    """Reads plain values only."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a dump holds plain values only")


def _record(entry: Mapping[str, Any]) -> Record:
    sizes, kinds, at = entry["input_sizes"], entry.get("input_dtypes") or [""], int(entry["time_created_ns"])
    if not 0 <= at < 2**63:
        raise ValueError(f"{at} is no time")
    return Record(
        group=str(entry["process_group"][0]),
        number=int(entry["collective_seq_id"]),
        name=str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"]),
        size=math.prod(map(int, sizes[0])) if sizes else 0,
        kind=str(kinds[0]).lower(),
        finished=bool(entry["retired"]) or entry["state"] == "completed",
        point_to_point=bool(entry.get("is_p2p")),
        at=at / 1e9,
        place=_place(entry.get("frames") or ()),
    )


def _place(frames: Iterable[Mapping[str, Any]]) -> str:
    users = (one for one in frames if not _OURS.search(str(one["filename"])))
    return next((f"{PurePath(str(one['filename'])).name}:{int(one['line'])}" for one in users), "")


def _members(groups: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the members of each group that has a name: gloo writes one entry without, of the newest group or of none."""
    for name, group in groups.items():
        ranks = tuple(int(rank) for rank in re.findall(r"\d+", str(group["ranks"])))
        if name and ranks:
            yield str(name), ranks


def _all_members(dumps: Mapping[int, Dump]) -> dict[str, tuple[int, ...]]:
    """Return the members of each group; where no dump says it, those that used it, and all ranks in the first group."""
    used: dict[str, set[int]] = {_DEFAULT: set(range(max(dumps, default=-1) + 1))}
    for rank, dump in dumps.items():
        for record in dump.records:
            used.setdefault(record.group, set()).add(rank)
    said = {name: ranks for dump in dumps.values() for name, ranks in dump.members.items()}
    return {name: tuple(sorted(ranks)) for name, ranks in used.items()} | said


def _status(dump: Dump, members: Mapping[str, tuple[int, ...]]) -> RankStatus:
    newest: dict[str, int] = dict.fromkeys(members, UNKNOWN_COUNT) if dump.overwritten else {}
    waits: dict[str, dict[int, PendingOperation]] = {}
    for one in dump.records:
        if one.point_to_point:
            continue
        newest[one.group] = one.number
        if not one.finished:
            # Of operations that torch joined into one, the last record has the name of the whole.
            work = PendingOperation(number=one.number, name=one.name, size=one.size, kind=one.kind, seconds=math.inf)
            waits.setdefault(one.group, {})[one.number] = work
    groups = tuple(
        GroupProgress(name=name, ranks=members[name], counts={"": count}, pending=tuple(waits.get(name, {}).values()))
        for name, count in newest.items()
    )
    return RankStatus(groups=groups, place=_last_place(dump))


def _last_place(dump: Dump) -> str:
    """Return where the rank is, as far as its records show it."""
    if not dump.records:
        return "a place before its first operation"
    waits = next((one for one in dump.records if not one.finished), None)
    one = waits or dump.records[-1]
    where = f" ({one.place})" if one.place else ""
    return f"{one.words}{where}" if waits else f"a place after {one.words}{where}"
