"""What is held against nodes, on record: read whole, and changed by one word at a time, however many programs and persons speak at once.

A word is weighed and written in one transaction that nobody else's can cross: SQLite's write lock, or a lock of PostgreSQL for the cluster.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from sqlalchemy import func, or_
from sqlmodel import Session, col, select

from detectors.codec import packed, unpacked
from holdfast.history.models import NodeCordon, ServiceTransition
from holdfast.history.store import History
from policies.cordons import Answer, Cordon, CordonChanged, CordonedFault, CordonKind, Node, Owner, QuarantineLimits, Rules, state_of
from policies.node_states import IN_SERVICE, NodeEvent, NodeState
from policies.quarantine import settle

Act = Callable[[Node, QuarantineLimits], Answer]
"""What is said of a node: from the node and the cluster around it to what comes of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CordonTable:
    """Where a node belongs."""

    cluster: str
    names: Collection[str]
    """All nodes of the cluster: of them a share may be isolated."""
    rules: Rules


def say(history: History, place: CordonTable, node: str, act: Act, *, now: float) -> Answer:
    """Weigh a word about *node* at *now* (seconds since 1970), and keep what comes of it. Raise `HistoryError` or `NotWritable`.

    What has run out by then comes about first.
    """
    with history.session(immediate=True) as session:
        _one_at_a_time(session, place.cluster)
        present = _settled(session, place, _node(session, place, node, now), now)
        answer = act(present, QuarantineLimits(size=len(place.names), isolated=_isolated(session, place, node), rules=place.rules))
        if isinstance(answer, CordonChanged):
            _keep(session, place.cluster, present, answer)
        return answer


def nodes(history: History, place: CordonTable, *, now: float) -> dict[str, Node]:
    """Return the nodes that ever had a hold, by name, as they are at *now*; nothing is written.

    When a node came back to service is told of those alone whose newest move that was.
    """
    with history.session() as session:
        rows = session.exec(select(NodeCordon).where(col(NodeCordon.cluster) == place.cluster, col(NodeCordon.ended_at).is_(None))).all()
        newest = _newest_moves(session, place.cluster)
    holds: dict[str, list[NodeCordon]] = {}
    for row in rows:
        holds.setdefault(row.node, []).append(row)
    found = {}
    for name in {*holds, *newest}:
        node = _made(name, holds.get(name, []), newest.get(name))
        while (done := settle(node, now, place.rules)) is not None:
            node = done.node
        found[name] = node
    return found


def holds(history: History, cluster: str, node: str) -> list[NodeCordon]:
    """Return all holds that *node* ever had, in the order of their numbers."""
    query = select(NodeCordon).where(col(NodeCordon.cluster) == cluster, col(NodeCordon.node) == node)
    with history.session() as session:
        return list(session.exec(query.order_by(col(NodeCordon.number))))


# -- reading ------------------------------------------------------------------------------------------------------------


def _newest_moves(session: Session, cluster: str) -> dict[str, ServiceTransition]:
    greatest = (
        select(col(ServiceTransition.node).label("node"), func.max(col(ServiceTransition.number)).label("number"))
        .where(col(ServiceTransition.cluster) == cluster)
        .group_by(col(ServiceTransition.node))
        .subquery()
    )
    same = (col(ServiceTransition.node) == greatest.c.node) & (col(ServiceTransition.number) == greatest.c.number)
    return {
        one.node: one
        for one in session.exec(select(ServiceTransition).join(greatest, same).where(col(ServiceTransition.cluster) == cluster))
    }


def _node(session: Session, place: CordonTable, name: str, now: float) -> Node:
    """Return one node with all that its next move may depend on."""
    here = (col(NodeCordon.cluster) == place.cluster, col(NodeCordon.node) == name)
    since = now - max(place.rules.window, place.rules.doubt_window)
    rows = session.exec(select(NodeCordon).where(*here, or_(col(NodeCordon.ended_at).is_(None), col(NodeCordon.at) >= since))).all()
    greatest = session.exec(select(func.max(col(NodeCordon.number)), func.max(col(NodeCordon.newest_test))).where(*here)).one()
    moved = (col(ServiceTransition.cluster) == place.cluster, col(ServiceTransition.node) == name)
    newest = session.exec(select(ServiceTransition).where(*moved).order_by(col(ServiceTransition.number).desc()).limit(1)).first()

    def last(*where: object) -> float:
        if newest is None:
            return 0.0
        return float(session.exec(select(func.max(col(ServiceTransition.at))).where(*moved, *where)).one() or 0.0)  # type: ignore[arg-type]

    node = _made(name, [one for one in rows if one.ended_at is None], newest)
    failed = (col(ServiceTransition.event) == NodeEvent.FAILED, col(ServiceTransition.at) >= since)
    taken_out = (CordonKind.QUARANTINE, CordonKind.RETIREMENT)
    return Node(
        name=name,
        state=node.state,
        since=node.since,
        back=last(col(ServiceTransition.after) == NodeState.HEALTHY),
        moves=node.moves,
        number=max(one or 0 for one in greatest),
        holds=node.holds,
        doubts=_times(one for one in rows if one.kind == CordonKind.DOUBT),
        quarantines=_times(one for one in rows if one.kind in taken_out and not one.person),
        failures=()
        if newest is None
        else tuple(session.exec(select(ServiceTransition.at).where(*moved, *failed).order_by(col(ServiceTransition.at)))),
        pardoned=last(col(ServiceTransition.before) == NodeState.RETIRED),
    )


def _times(rows: Iterable[NodeCordon]) -> tuple[float, ...]:
    return tuple(sorted(one.at for one in rows))


def _made(name: str, rows: Iterable[NodeCordon], newest: ServiceTransition | None) -> Node:
    held = tuple(_hold(one) for one in sorted(rows, key=lambda one: one.number))
    number = max([0, *(max(one.number, one.test) for one in held)])
    since, count = (newest.at, newest.number) if newest is not None else (0.0, 0)
    came_back = newest is not None and newest.after == NodeState.HEALTHY and newest.before not in IN_SERVICE
    back = since if came_back else 0.0
    return Node(name=name, state=state_of(held), since=since, back=back, moves=count, number=number, holds=held)


def _hold(row: NodeCordon) -> Cordon:
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


def _isolated(session: Session, place: CordonTable, aside: str) -> int:
    """Return how many nodes of the cluster are out of service, one *aside*."""
    query = select(NodeCordon).where(col(NodeCordon.cluster) == place.cluster, col(NodeCordon.ended_at).is_(None))
    held: dict[str, list[Cordon]] = {}
    for row in session.exec(query):
        held.setdefault(row.node, []).append(_hold(row))
    return sum(state_of(each) not in IN_SERVICE for name, each in held.items() if name != aside and name in place.names)


# -- writing ------------------------------------------------------------------------------------------------------------


def _one_at_a_time(session: Session, cluster: str) -> None:
    """Let no two words about one cluster be weighed at once; SQLite's write lock is held already."""
    if session.get_bind().dialect.name == "postgresql":
        key = int.from_bytes(hashlib.sha256(f"holdfast holds {cluster}".encode()).digest()[:8], "big", signed=True)
        session.scalar(select(func.pg_advisory_xact_lock(key)))


def _settled(session: Session, place: CordonTable, node: Node, now: float) -> Node:
    while (done := settle(node, now, place.rules)) is not None:
        _keep(session, place.cluster, node, done)
        node = done.node
    return node


def _keep(session: Session, cluster: str, before: Node, done: CordonChanged) -> None:
    """Write the difference between *before* and what was done: holds opened, changed and ended, and the move."""
    old, new = {one.number: one for one in before.holds}, {one.number: one for one in done.node.holds}
    for number, hold in new.items():
        if number not in old:
            session.add(_row(cluster, before.name, hold))
        elif hold != old[number]:
            row = _open_row(session, cluster, before.name, number)
            row.until, row.test, row.test_until = hold.until, hold.test, hold.test_until
            row.reason, row.leave_by = hold.reason, hold.leave_by
            row.evidence, row.faults = list(hold.evidence), packed(hold.faults)
            row.newest_test = max(row.newest_test, hold.test)
    for number in old.keys() - new.keys():
        row = _open_row(session, cluster, before.name, number)
        row.ended_at, row.ended_by, row.ended_reason, row.test, row.test_until = done.at, done.owner.name, done.reason, 0, None
    for move in done.moves:
        session.add(
            ServiceTransition(
                cluster=cluster,
                node=before.name,
                number=done.node.moves,
                at=move.at,
                before=move.before,
                event=move.event,
                after=move.after,
                owner=move.owner.name,
                person=move.owner.person,
                reason=move.reason,
                hold=move.hold,
            )
        )
    session.flush()


def _row(cluster: str, node: str, hold: Cordon) -> NodeCordon:
    return NodeCordon(
        cluster=cluster,
        node=node,
        number=hold.number,
        kind=hold.kind,
        owner=hold.owner.name,
        person=hold.owner.person,
        reason=hold.reason,
        evidence=list(hold.evidence),
        faults=packed(hold.faults),
        at=hold.at,
        until=hold.until,
        drains=hold.drains,
        leave_by=hold.leave_by,
        test=hold.test,
        newest_test=hold.test,
        test_until=hold.test_until,
    )


def _open_row(session: Session, cluster: str, node: str, number: int) -> NodeCordon:
    here = (col(NodeCordon.cluster) == cluster, col(NodeCordon.node) == node, col(NodeCordon.number) == number)
    return session.exec(select(NodeCordon).where(*here)).one()
