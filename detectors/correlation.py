"""Faults that follow from several observations: on shared infrastructure, recurring on one device, or a peer that several ranks name.

`associations.toml` defines the kinds, the number of nodes and the time window.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from holdfast.detectors.associations import ASSOCIATIONS, Accused, Family, Repeats, Shared, traits_of
from holdfast.detectors.catalogue import CATALOGUE, Attribution, Fault, FaultKey, RecommendedAction, fault_kind
from holdfast.detectors.causes import device_in, device_of, peers_in
from holdfast.detectors.evidence import LogLine, Sample
from holdfast.detectors.nodes.gpu_readings import Xid, XidEvent

if TYPE_CHECKING:
    from holdfast.detectors.diagnosis import PastFailure

_MAX_SEARCHED: Final = 256
"""Maximum number of faults to search for peers that do not answer."""
_NAMED: Final = 4
"""Maximum number of names in a quote."""


def _lines(text: str, nodes: int = 2, rank: int | None = None) -> tuple[LogLine, ...]:
    return tuple(LogLine(text=text, at=number / 10, node=f"n{number}", rank=rank) for number in range(nodes))


def _xids(node: str, code: int, times: int) -> tuple[XidEvent, ...]:
    return tuple(
        XidEvent(node=node, at=float(n), xid=Xid(code=code, bus="0000:4e:00.0", text=f"pid={n}, name=python")) for n in range(times)
    )


_DOWN: Final = "mlx5_core 0000:3b:00.0 ens1f0np0: Link down"
_STALE: Final = "nfs: server 10.0.0.9 not responding, timed out"

_define = partial(fault_kind, source="diagnosis", recommended_action=RecommendedAction.RESTART)
SWITCH: Final = _define(
    id="network-switch-failed",
    title="The links of several nodes went down at once: the switch they share failed",
    component="network",
    attributed_to=Attribution.NETWORK,
    action="look at the switch or router that these nodes share; the nodes themselves are healthy",
    unhealthy=Sample(_lines(_DOWN)),
    healthy=Sample(_lines(_DOWN, nodes=1)),
    weight=94,
)
STORAGE_SERVICE: Final = _define(
    id="storage-service-failed",
    title="Several nodes lost the same storage at once: the service failed, not the nodes",
    component="network file system",
    attributed_to=Attribution.STORAGE,
    action="look at the storage service and the network to it; the nodes themselves are healthy",
    unhealthy=Sample(_lines(_STALE)),
    healthy=Sample(_lines(_STALE, nodes=1)),
    weight=90,
)
SUSPECT_GPU: Final = _define(
    id="gpu-suspect",
    title="Kernels fail again and again on one GPU, and on no other",
    component="gpu",
    source="diagnosis, history",
    recommended_action=RecommendedAction.EVICT,
    attributed_to=Attribution.GPU,
    action="take the node out and test the GPU: the same code runs on the others",
    reference="https://docs.nvidia.com/deploy/xid-errors/",
    unhealthy=Sample(_xids("n0", 13, 3)),
    healthy=Sample((*_xids("n0", 13, 2), *_xids("n1", 13, 1))),
    weight=92,
    confused_with=("user-error",),
)
BLAMED: Final = _define(
    id="peer-blamed",
    title="Several ranks report that one peer does not answer",
    component="communication",
    attributed_to=Attribution.NODE,
    action="restart the workers; replace the named node if it happens again",
    unhealthy=Sample(
        evidence=tuple(
            LogLine(text="NCCL WARN NET/IB : Got completion from peer n7<4791> with status=12", at=n / 10, node=f"n{n}", rank=n)
            for n in range(2)
        )
    ),
    healthy=Sample(_lines("NCCL WARN NET/IB : Got completion from peer n7<4791> with status=12", nodes=1, rank=0)),
    weight=45,
)


def inferred(
    faults: Sequence[Fault], past: Iterable[PastFailure], members: int, places: Mapping[str, str], signals: Mapping[FaultKey, str]
) -> Iterator[Fault]:
    """Yield the faults that follow from *faults* and the job's *past* failures; *members* is the number of nodes with ranks.

    *signals*: those of *faults* that one line does not prove, to the second signal that confirms them.
    """
    faults = [fault for fault in faults if not fault.is_ruled_out]
    for shared in ASSOCIATIONS.shared:
        seen = _of(shared.of, faults)
        yield from _shared(shared, seen, members, signals if len(seen) < len(faults) else None)
    for repeats in ASSOCIATIONS.repeats:
        yield from _repeated(repeats, _of(repeats.of, faults), past)
    for accused in ASSOCIATIONS.accused:
        yield from _accused(accused, _of(accused.of, faults), places)


def _of(family: Family, faults: Iterable[Fault]) -> list[Fault]:
    faults = list(faults)
    kinds = {name for name in {fault.kind for fault in faults} if family.takes(traits_of(name))}
    return sorted((fault for fault in faults if fault.kind in kinds), key=lambda fault: (fault.at, fault.node or ""))


def _shared(rule: Shared, faults: list[Fault], members: int, signals: Collection[FaultKey] | None) -> Iterator[Fault]:
    """Yield a fault of shared infrastructure: enough nodes have the fault within the window before the newest one.

    *signals*: what is confirmed by other faults; None if there are no others.
    """
    if not faults:
        return
    within = [fault for fault in faults if fault.node and fault.at >= faults[-1].at - rule.window]
    nodes = sorted({fault.node for fault in within if fault.node})
    if len(nodes) < max(rule.nodes, rule.share * members):
        return
    if signals is not None and all(fault.needs_proof and fault.key not in signals for fault in within):
        return  # lines that healthy nodes may write, and what the ranks show has another cause
    span = within[-1].at - within[0].at
    quote = f"{within[0].kind} on {_few(nodes)} within {span:.1f} s: {within[0].quote}"[:500]
    yield Fault(kind=rule.kind, at=within[0].at, quote=quote, signature=rule.kind, source=_sources(within))


def _repeated(rule: Repeats, faults: list[Fault], past: Iterable[PastFailure]) -> Iterator[Fault]:
    """Yield a fault of the only device on which the failures recur."""
    seen: dict[tuple[str | None, str], list[float]] = defaultdict(list)
    for fault in faults:
        seen[fault.node, device_of(fault)].append(fault.at)
    newest = max((fault.at for fault in faults), default=0.0)
    for old in past:
        if old.kind in CATALOGUE and rule.of.takes(traits_of(old.kind)) and newest - old.at <= rule.window:
            seen[old.node, device_in(old.device) or old.device].append(old.at)
    if len(seen) != 1:
        return
    ((node, device), times), *_ = seen.items()
    if node and faults and len(times) >= rule.times:
        where = f"device {device}" if device else "one GPU"
        quote = f"{len(times)} times on {where} of {node} within {max(times) - min(times):.0f} s, and nowhere else: {faults[0].quote}"[:500]
        yield Fault(
            kind=rule.kind,
            at=faults[0].at,
            node=node,
            quote=quote,
            signature=f"{rule.kind} {device}",
            source=f"diagnosis of {_sources(faults)}",  # no line of theirs says it
            device=device,
        )


def _accused(rule: Accused, faults: list[Fault], places: Mapping[str, str]) -> Iterator[Fault]:
    """Yield a fault of the peer that most ranks on other nodes name."""
    by_peer: dict[tuple[str, int | None], list[Fault]] = defaultdict(list)
    for fault in faults[:_MAX_SEARCHED]:
        for name in peers_in(f"{fault.quote}\n{fault.detail}"):
            node = places.get(name, "" if name.startswith("rank ") or places else name)
            if node and node != fault.node:
                by_peer[node, _rank(name)].append(fault)
    ranked = sorted(by_peer.items(), key=lambda item: (-len(_observers(item[1])), item[0][0], item[0][1] or 0))
    if not ranked or len(_observers(ranked[0][1])) < rule.observers:
        return
    (node, rank), reports = ranked[0]
    ranks = f"{len(_observers(reports))} ranks ({_few(sorted({fault.target for fault in reports}))})"
    quote = f"{ranks} report that {f'rank {rank} on {node}' if rank is not None else node} does not answer: {reports[0].quote}"[:500]
    yield Fault(kind=rule.kind, at=reports[0].at, node=node, rank=rank, quote=quote, signature=rule.kind, source=_sources(reports))


def _observers(faults: Iterable[Fault]) -> set[tuple[str | None, int | None]]:
    return {(fault.node, fault.rank) for fault in faults}


def _rank(name: str) -> int | None:
    return int(name.removeprefix("rank ")) if name.startswith("rank ") else None


def _sources(faults: Iterable[Fault]) -> str:
    return _few(sorted({fault.source for fault in faults if fault.source})) or "diagnosis"


def _few(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
