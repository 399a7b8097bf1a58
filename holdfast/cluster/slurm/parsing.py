"""What Slurm's commands print, read: lists of nodes, jobs, states of nodes. Tolerant of versions: 22.05 to those of today."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any, Final

from detectors.node import DEAD, LEAVING
from holdfast.errors import SlurmUnavailable

FORMAT: Final = "%A|%T|%r|%N|%S|%e|%D|%k"
"""Fields of squeue: id, state, reason, nodes, begin, end, count, comment. The comment comes last, as it may hold anything.

The id is that of `SLURM_JOB_ID`: each element of an array and each part of a heterogeneous job has its own (`%i` names them otherwise).
"""
MOST: Final = 100_000
"""Names that one list of nodes may stand for."""

HERE: Final = frozenset({"RUNNING"})
GONE: Final = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "COMPLETING",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
"""States of an allocation that gives us no nodes, and will not. Every other word than these and `RUNNING` means that it is to come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """An allocation: a job of Slurm's."""

    id: str
    state: str
    reason: str = ""
    """Why it has not begun."""
    nodes: tuple[str, ...] = ()
    began: float | None = None
    """When it began, or is meant to."""
    ends: float | None = None
    """When its time is over (seconds since 1970); empty: nobody knows."""
    count: int = 0
    comment: str = ""

    @property
    def is_here(self) -> bool:
        """Tell whether its nodes can be used."""
        return self.state in HERE

    @property
    def is_coming(self) -> bool:
        """Tell whether it waits for its nodes: for the first time, or after Slurm has put it back into the queue."""
        return self.state not in HERE and self.state not in GONE

    @property
    def is_ending(self) -> bool:
        """Tell whether Slurm cleans up after it: it is over, or was put back into the queue."""
        return self.state == "COMPLETING"

    def describe(self) -> str:
        """Say how it stands."""
        if self.is_here:
            return f"Slurm job {self.id} has {', '.join(self.nodes)}"
        why = f" ({self.reason})" if self.reason not in ("", "None") else ""
        return f"Slurm job {self.id} is {self.state.lower()}{why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNodeState:
    """A node as Slurm has it."""

    name: str
    address: str = ""
    port: int = 0
    """That slurmd listens on there; 0: not known."""
    states: tuple[str, ...] = ()
    reason: str = ""
    since: float = 0.0
    """When the reason was given (seconds since 1970, whole ones); 0: not known."""

    @property
    def is_dead(self) -> bool:
        """Tell whether Slurm does not count on it."""
        return bool(DEAD & set(self.states))

    @property
    def is_leaving(self) -> bool:
        """Tell whether Slurm gives it to no further job."""
        return bool(LEAVING & set(self.states))

    def describe(self) -> str:
        """Say how it stands, as sinfo would."""
        return "+".join(one.lower() for one in self.states) + (f" ({self.reason})" if self.reason else "")


def allocations(text: str) -> list[Allocation]:
    """Return the jobs that squeue has printed in `FORMAT`."""
    return [_allocation(line) for line in text.splitlines() if line.count("|") >= FORMAT.count("|")]


def _allocation(line: str) -> Allocation:
    number, state, reason, nodes, began, ends, count, comment = line.split("|", FORMAT.count("|"))
    return Allocation(
        id=number.strip(),
        state=state.strip().upper(),
        reason=reason.strip(),
        nodes=tuple(names(nodes.strip())),
        began=float(began) if began.strip().isdigit() else None,
        ends=float(ends) if ends.strip().isdigit() else None,
        count=int(count) if count.strip().isdigit() else 0,
        comment=comment.strip(),
    )


def node_states(text: str, partitions: str | None = None) -> dict[str, SlurmNodeState]:
    """Return the nodes that `sinfo --json` tells of, in its order: all, or those of *partitions*, whatever it was asked for.

    Raise `SlurmUnavailable` when that is not what it printed.
    """
    wanted = set((partitions or "").split(",")) - {""}
    try:
        told = json.loads(text)
        rows = told["nodes"] if "nodes" in told else _of_groups(told["sinfo"])
        found = [_node(row) for row in rows if not wanted or not row.get("partitions") or wanted & set(row["partitions"])]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SlurmUnavailable("sinfo --json", f"what it printed cannot be read ({error})") from error
    return {node.name: node for node in found}


def _of_groups(groups: list[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the nodes of groups that are alike, as newer versions print them."""
    for group in groups:
        reason, nodes = group.get("reason"), group["nodes"]
        told, at = (reason.get("description", ""), reason.get("time")) if isinstance(reason, dict) else (reason, None)
        for name, address in zip_longest(nodes["nodes"], nodes.get("addresses") or []):
            node = {"name": name, "address": address, "port": group.get("port"), "state": group["node"]["state"]}
            yield {**node, "reason": told, "reason_changed_at": at}


def _node(row: Mapping[str, Any]) -> SlurmNodeState:
    states = [*_words(row["state"]), *_words(row.get("state_flags"))]
    return SlurmNodeState(
        name=str(row["name"]),
        address=str(row.get("address") or row["name"]),
        port=_number(row.get("port")),
        states=tuple(dict.fromkeys(states)),
        reason=str(row.get("reason") or ""),
        since=float(_number(row.get("reason_changed_at"))),
    )


def _number(value: object) -> int:
    """Return a number, which newer versions wrap: 0 where there is none."""
    value = value.get("number") if isinstance(value, dict) else value
    return int(value) if isinstance(value, int | str) and str(value).isdigit() else 0


def _words(value: object) -> list[str]:
    """Return states as a list of words in capitals: 22.05 has one word, and flags beside it; later versions have lists."""
    if isinstance(value, str):
        value = re.split(r"[+,\s]+", value)
    return [str(one).upper() for one in value or () if one] if isinstance(value, list | tuple) else []


def names(text: str) -> list[str]:
    """Return the nodes that a list of Slurm's stands for, e.g. ``n[1-3,7],gpu-a``."""
    found = [name for part in _parts(text) for name in islice(_expanded(part), MOST)]
    return found[:MOST]


def _parts(text: str) -> Iterator[str]:
    """Yield what the commas outside of brackets separate."""
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        if part.strip() and part.strip() != "(null)":
            yield part.strip()


def _expanded(part: str) -> Iterator[str]:
    found = re.search(r"\[([^\]]*)\]", part)
    if found is None:
        yield part
        return
    for piece in found[1].split(","):
        first, _, last = piece.partition("-")
        span = range(int(first), int(last or first) + 1) if first.isdigit() and (last or first).isdigit() else ()
        for number in span:
            yield from _expanded(f"{part[: found.start()]}{number:0{len(first)}}{part[found.end() :]}")
