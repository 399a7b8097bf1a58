"""The cordons of nodes, kept in the history; the rules are in `holdfast.policies.nodes.cordons` and `holdfast.policies.nodes.quarantine`.

Each request is decided and written in one transaction that excludes all other requests about the cluster: SQLite's write lock, or an
advisory lock of PostgreSQL.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from sqlalchemy import func, or_
from sqlmodel import Session, col, select

from holdfast.detectors.codec import packed, unpacked
from holdfast.history.models import NodeCordon, ServiceTransition
from holdfast.history.store import History
from holdfast.policies.nodes.cordons import (
    Answer,
    Cordon,
    CordonChanged,
    CordonedFault,
    CordonKind,
    Node,
    Owner,
    QuarantineLimits,
    Rules,
    state_of,
)
from holdfast.policies.nodes.node_states import IN_SERVICE, NodeEvent, NodeState
from holdfast.policies.nodes.quarantine import settle

Act = Callable[[Node, QuarantineLimits], Answer]
"""A request: from a node and the limits of its cluster to the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CordonTable:
    """The cluster that nodes belong to."""

    cluster: str
    names: Collection[str]
    """All nodes of the cluster; a share of them may be isolated."""
    rules: Rules


def apply(history: History, table: CordonTable, node: str, act: Act, *, now: float) -> Answer:
    """Apply a request to *node* at *now* (seconds since 1970) and write what it changes. Raise `HistoryError` or `NotWritable`.

    What has expired by then takes effect first.
    """
    with history.session(immediate=True) as session:
        if session.get_bind().dialect.name == "postgresql":  # on SQLite the write lock is held already
            key = int.from_bytes(hashlib.sha256(f"holdfast cordons {table.cluster}".encode()).digest()[:8], "big", signed=True)
            session.scalar(select(func.pg_advisory_xact_lock(key)))
        current = _read(session, table, node, now)
        while (expired := settle(current, now, table.rules)) is not None:
            _write(session, table.cluster, current, expired)
            current = expired.node
        limits = QuarantineLimits(size=len(table.names), isolated=_isolated(session, table, node), rules=table.rules)
        answer = act(current, limits)
        if isinstance(answer, CordonChanged):
            _write(session, table.cluster, current, answer)
        return answer


def nodes(history: History, table: CordonTable, *, now: float) -> dict[str, Node]:
    """Return the nodes that ever had a cordon, by name, as they are at *now*; nothing is written.

    `Node.back` is set only for nodes whose newest transition was the return to service.
    """
    with history.session() as session:
        cordons = _active(session, table.cluster)
        newest = _newest_transitions(session, table.cluster)
    found = {}
    for name in {*cordons, *newest}:
        node = _node(name, cordons.get(name, []), newest.get(name))
        while (expired := settle(node, now, table.rules)) is not None:
            node = expired.node
        found[name] = node
    return found


def history_of(history: History, cluster: str, node: str) -> list[NodeCordon]:
    """Return all cordons that *node* ever had, by number."""
    query = select(NodeCordon).where(col(NodeCordon.cluster) == cluster, col(NodeCordon.node) == node)
    with history.session() as session:
        return list(session.exec(query.order_by(col(NodeCordon.number))))


# -- reading ------------------------------------------------------------------------------------------------------------


def _active(session: Session, cluster: str) -> dict[str, list[NodeCordon]]:
    """Return the active cordons of a cluster by node."""
    found: dict[str, list[NodeCordon]] = {}
    for row in session.exec(select(NodeCordon).where(col(NodeCordon.cluster) == cluster, col(NodeCordon.ended_at).is_(None))):
        found.setdefault(row.node, []).append(row)
    return found


def _newest_transitions(session: Session, cluster: str) -> dict[str, ServiceTransition]:
    greatest = (
        select(col(ServiceTransition.node).label("node"), func.max(col(ServiceTransition.number)).label("number"))
        .where(col(ServiceTransition.cluster) == cluster)
        .group_by(col(ServiceTransition.node))
        .subquery()
    )
    same = (col(ServiceTransition.node) == greatest.c.node) & (col(ServiceTransition.number) == greatest.c.number)
    query = select(ServiceTransition).join(greatest, same).where(col(ServiceTransition.cluster) == cluster)
    return {one.node: one for one in session.exec(query)}


def _read(session: Session, table: CordonTable, name: str, now: float) -> Node:
    """Return one node with everything that its next transition may depend on."""
    here = (col(NodeCordon.cluster) == table.cluster, col(NodeCordon.node) == name)
    since = now - max(table.rules.window, table.rules.suspicion_window)
    rows = session.exec(select(NodeCordon).where(*here, or_(col(NodeCordon.ended_at).is_(None), col(NodeCordon.at) >= since))).all()
    greatest = session.exec(select(func.max(col(NodeCordon.number)), func.max(col(NodeCordon.newest_test))).where(*here)).one()
    of_node = (col(ServiceTransition.cluster) == table.cluster, col(ServiceTransition.node) == name)
    newest = session.exec(select(ServiceTransition).where(*of_node).order_by(col(ServiceTransition.number).desc()).limit(1)).first()

    def last(*where: object) -> float:
        if newest is None:
            return 0.0
        return float(session.exec(select(func.max(col(ServiceTransition.at))).where(*of_node, *where)).one() or 0.0)  # type: ignore[arg-type]

    node = _node(name, [one for one in rows if one.ended_at is None], newest)
    failed = (col(ServiceTransition.event) == NodeEvent.FAILED, col(ServiceTransition.at) >= since)
    failures = select(ServiceTransition.at).where(*of_node, *failed).order_by(col(ServiceTransition.at))
    removed = (CordonKind.QUARANTINE, CordonKind.DECOMMISSION)
    return Node(
        name=name,
        state=node.state,
        since=node.since,
        back=last(col(ServiceTransition.after) == NodeState.HEALTHY),
        transitions=node.transitions,
        number=max(one or 0 for one in greatest),
        cordons=node.cordons,
        suspicions=tuple(sorted(one.at for one in rows if one.kind == CordonKind.SUSPICION)),
        quarantines=tuple(sorted(one.at for one in rows if one.kind in removed and not one.person)),
        failures=() if newest is None else tuple(session.exec(failures)),
        pardoned=last(col(ServiceTransition.before) == NodeState.DECOMMISSIONED),
    )


def _node(name: str, rows: Iterable[NodeCordon], newest: ServiceTransition | None) -> Node:
    """Return a node from its active cordons and its newest transition."""
    cordons = tuple(_cordon(one) for one in sorted(rows, key=lambda one: one.number))
    number = max([0, *(max(one.number, one.test) for one in cordons)])
    since, count = (newest.at, newest.number) if newest is not None else (0.0, 0)
    returned = newest is not None and newest.after == NodeState.HEALTHY and newest.before not in IN_SERVICE
    back = since if returned else 0.0
    return Node(name=name, state=state_of(cordons), since=since, back=back, transitions=count, number=number, cordons=cordons)


def _cordon(row: NodeCordon) -> Cordon:
    return Cordon(
        number=row.number,
        kind=CordonKind(row.kind),
        owner=Owner(name=row.owner, person=row.person),
        reason=row.reason,
        evidence=tuple(row.evidence),
        faults=tuple(unpacked(CordonedFault, one) for one in row.faults),
        at=row.at,
        until=row.until,
        drains=row.drains,
        leave_by=row.leave_by,
        test=row.test,
        test_until=row.test_until,
    )


def _isolated(session: Session, table: CordonTable, but: str) -> int:
    """Return how many nodes of the cluster *but* one are out of service."""
    active = _active(session, table.cluster)
    states = {name: state_of([_cordon(row) for row in rows]) for name, rows in active.items() if name != but and name in table.names}
    return sum(state not in IN_SERVICE for state in states.values())


# -- writing ------------------------------------------------------------------------------------------------------------


def _write(session: Session, cluster: str, before: Node, change: CordonChanged) -> None:
    """Write the difference to *before*: cordons added, changed and ended, and the transitions."""
    old, new = {one.number: one for one in before.cordons}, {one.number: one for one in change.node.cordons}
    for number, cordon in new.items():
        if number not in old:
            session.add(
                NodeCordon(
                    cluster=cluster,
                    node=before.name,
                    number=cordon.number,
                    kind=cordon.kind,
                    owner=cordon.owner.name,
                    person=cordon.owner.person,
                    reason=cordon.reason,
                    evidence=list(cordon.evidence),
                    faults=packed(cordon.faults),
                    at=cordon.at,
                    until=cordon.until,
                    drains=cordon.drains,
                    leave_by=cordon.leave_by,
                    test=cordon.test,
                    newest_test=cordon.test,
                    test_until=cordon.test_until,
                )
            )
        elif cordon != old[number]:
            row = _row(session, cluster, before.name, number)
            row.until, row.test, row.test_until = cordon.until, cordon.test, cordon.test_until
            row.reason, row.leave_by = cordon.reason, cordon.leave_by
            row.evidence, row.faults = list(cordon.evidence), packed(cordon.faults)
            row.newest_test = max(row.newest_test, cordon.test)
    for number in old.keys() - new.keys():
        row = _row(session, cluster, before.name, number)
        row.ended_at, row.ended_by, row.ended_reason = change.at, change.owner.name, change.reason
        row.test, row.test_until = 0, None
    for transition in change.transitions:
        session.add(
            ServiceTransition(
                cluster=cluster,
                node=before.name,
                number=change.node.transitions,
                at=transition.at,
                before=transition.before,
                event=transition.event,
                after=transition.after,
                owner=transition.owner.name,
                person=transition.owner.person,
                reason=transition.reason,
                cordon=transition.cordon,
            )
        )
    session.flush()


def _row(session: Session, cluster: str, node: str, number: int) -> NodeCordon:
    here = (col(NodeCordon.cluster) == cluster, col(NodeCordon.node) == node, col(NodeCordon.number) == number)
    return session.exec(select(NodeCordon).where(*here)).one()
