"""Parse the output of Slurm's commands, from 22.05 on: node lists, jobs, states of nodes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any, Final

from holdfast.detectors.nodes.node import DEAD, LEAVING
from holdfast.errors import SlurmUnavailable

FORMAT: Final = "%A|%T|%r|%N|%S|%e|%D|%k"
"""Fields of squeue: id, state, reason, nodes, begin, end, count, comment. The comment comes last, as it may hold anything.

The id is that of `SLURM_JOB_ID`: each element of an array and each part of a heterogeneous job has its own (`%i` names them otherwise).
"""
MAX_NODES: Final = 100_000
"""Names that one node list may expand to."""
RUNNING: Final = "RUNNING"
ENDED: Final = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED COMPLETING DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT".split()  # noqa: SIM905 (a list takes a line each)
)
"""States of an allocation that has no nodes for us and will have none. Every other state except `RUNNING` counts as pending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """A Slurm job that allocates nodes."""

    id: str
    state: str
    reason: str = ""
    """Why it has not started."""
    nodes: tuple[str, ...] = ()
    began: float | None = None
    """When it started, or is expected to."""
    ends: float | None = None
    """When its time is over (seconds since 1970); empty: unknown."""
    count: int = 0
    comment: str = ""

    @property
    def is_running(self) -> bool:
        """Return whether its nodes can be used."""
        return self.state == RUNNING

    @property
    def is_pending(self) -> bool:
        """Return whether it waits for nodes: for the first time, or after Slurm has requeued it."""
        return self.state != RUNNING and self.state not in ENDED

    @property
    def is_completing(self) -> bool:
        """Return whether Slurm cleans up after it: it has ended, or was requeued."""
        return self.state == "COMPLETING"

    def describe(self) -> str:
        """Return its state as text."""
        if self.is_running:
            return f"Slurm job {self.id} has {', '.join(self.nodes)}"
        why = f" ({self.reason})" if self.reason not in ("", "None") else ""
        return f"Slurm job {self.id} is {self.state.lower()}{why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNodeState:
    """A node as Slurm reports it."""

    name: str
    address: str = ""
    port: int = 0
    """The port of slurmd; 0: unknown."""
    states: tuple[str, ...] = ()
    reason: str = ""
    since: float = 0.0
    """When the reason was set (whole seconds since 1970); 0: unknown."""

    @property
    def is_dead(self) -> bool:
        """Return whether Slurm considers it down."""
        return bool(DEAD & set(self.states))

    @property
    def is_leaving(self) -> bool:
        """Return whether Slurm gives it to no further job."""
        return bool(LEAVING & set(self.states))

    def describe(self) -> str:
        """Return its state as sinfo shows it."""
        return "+".join(one.lower() for one in self.states) + (f" ({self.reason})" if self.reason else "")


def allocations(text: str) -> list[Allocation]:
    """Return the jobs that squeue has printed in `FORMAT`."""
    found = []
    for line in text.splitlines():
        if line.count("|") < FORMAT.count("|"):  # an error message between the rows
            continue
        job_id, state, reason, nodes, began, ends, count, comment = (part.strip() for part in line.split("|", FORMAT.count("|")))
        found.append(
            Allocation(
                id=job_id,
                state=state.upper(),
                reason=reason,
                nodes=tuple(names(nodes)),
                began=float(began) if began.isdigit() else None,
                ends=float(ends) if ends.isdigit() else None,
                count=int(count) if count.isdigit() else 0,
                comment=comment,
            )
        )
    return found


def node_states(text: str, partitions: str | None = None) -> dict[str, SlurmNodeState]:
    """Return the nodes in the output of `sinfo --json`, in its order: all, or those of *partitions*.

    Raise `SlurmUnavailable` for any other text.
    """
    wanted = set((partitions or "").split(",")) - {""}
    try:
        document = json.loads(text)
        rows = document["nodes"] if "nodes" in document else _rows_of_groups(document["sinfo"])
        found = [_node_state(row) for row in rows if not wanted or not row.get("partitions") or wanted & set(row["partitions"])]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SlurmUnavailable("sinfo --json", f"its output cannot be read ({error})") from error
    return {node.name: node for node in found}


def _rows_of_groups(groups: list[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the nodes of groups of like nodes, as newer versions print them."""
    for group in groups:
        reason, nodes = group.get("reason"), group["nodes"]
        why, at = (reason.get("description", ""), reason.get("time")) if isinstance(reason, dict) else (reason, None)
        for name, address in zip_longest(nodes["nodes"], nodes.get("addresses") or []):
            node = {"name": name, "address": address, "port": group.get("port"), "state": group["node"]["state"]}
            yield {**node, "reason": why, "reason_changed_at": at}


def _node_state(row: Mapping[str, Any]) -> SlurmNodeState:
    return SlurmNodeState(
        name=str(row["name"]),
        address=str(row.get("address") or row["name"]),
        port=_number(row.get("port")),
        states=tuple(dict.fromkeys([*_state_names(row["state"]), *_state_names(row.get("state_flags"))])),
        reason=str(row.get("reason") or ""),
        since=float(_number(row.get("reason_changed_at"))),
    )


def _number(value: object) -> int:
    """Return a number, which newer versions wrap in an object; 0 where there is none."""
    value = value.get("number") if isinstance(value, dict) else value
    return int(value) if isinstance(value, int | str) and str(value).isdigit() else 0


def _state_names(value: object) -> list[str]:
    """Return states in capitals: 22.05 prints one word and separate flags, later versions print lists."""
    if isinstance(value, str):
        value = re.split(r"[+,\s]+", value)
    return [str(one).upper() for one in value or () if one] if isinstance(value, list | tuple) else []


def names(text: str) -> list[str]:
    """Expand a node list of Slurm, e.g. ``n[1-3,7],gpu-a``."""
    parts = (part.strip() for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text))  # split at commas outside brackets
    found = [name for part in parts if part and part != "(null)" for name in islice(_expanded(part), MAX_NODES)]
    return found[:MAX_NODES]


def _expanded(part: str) -> Iterator[str]:
    found = re.search(r"\[([^\]]*)\]", part)
    if found is None:
        yield part
        return
    for item in found[1].split(","):
        first, _, last = item.partition("-")
        span = range(int(first), int(last or first) + 1) if first.isdigit() and (last or first).isdigit() else ()
        for number in span:
            yield from _expanded(f"{part[: found.start()]}{number:0{len(first)}}{part[found.end() :]}")
