"""All that Prometheus is told at one moment."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from sqlalchemy import func
from sqlmodel import Session, col, select

from holdfast import __version__
from holdfast.history.models import LastLook, NodeMove, Question, ServiceMove
from holdfast.history.store import History
from holdfast.metrics import jobs
from holdfast.metrics.exposition import Family
from policies.node_states import NodeState
from policies.states import State


def collect(history: History, accounts: jobs.Accounts | None = None) -> list[Family]:
    """Return every family, read from *history* now; *accounts* are kept from one call to the next by who calls often."""
    begin = time.monotonic()
    shown = jobs.shown(history, now=time.time())
    found = [_build(), _by_state(shown), *jobs.standing(history, shown), *jobs.steering(history, shown)]
    with history.session() as session:
        found += [*jobs.troubles(session, shown), *jobs.keeping(history, session, shown), *_nodes(session), _questions(session)]
    found += jobs.accounts(history, shown, accounts or jobs.Accounts())
    took = Family("holdfast_collect_duration_seconds", "gauge", "What it took to read all this from the history.")
    took.add(time.monotonic() - begin)
    return [*found, took]


def _build() -> Family:
    found = Family("holdfast_build_info", "gauge", "The version of Holdfast that tells all this.")
    found.add(1, version=__version__)
    return found


def _by_state(shown: Sequence[jobs.Shown]) -> Family:
    """Return how many jobs are in each state; those that ended long ago are in none."""
    found, counted = (
        Family("holdfast_jobs", "gauge", "Jobs by state: live ones, and those that ended in the last seven days."),
        Counter(one.state for one in shown),
    )
    for state in State:
        found.add(counted[state], state=state.lower())
    return found


def _nodes(session: Session) -> list[Family]:
    """Return how many nodes of each cluster are in each state, and what was thought of them when they were last looked at."""
    states = Family("holdfast_nodes", "gauge", "Nodes that the history knows, by whether they may be given to jobs.")
    verdicts = Family("holdfast_node_verdicts", "gauge", "Nodes by what the last look from outside found.")
    known: dict[tuple[str, str], str] = {}
    for model in (NodeMove, LastLook):
        for cluster, node in session.exec(select(col(model.cluster), col(model.node)).distinct()):
            known[cluster, node] = NodeState.HEALTHY
    same = select(col(ServiceMove.cluster), col(ServiceMove.node), func.max(col(ServiceMove.number)).label("number"))
    newest = same.group_by(col(ServiceMove.cluster), col(ServiceMove.node)).subquery()
    wanted = select(ServiceMove).join(
        newest,
        (col(ServiceMove.cluster) == newest.c.cluster)
        & (col(ServiceMove.node) == newest.c.node)
        & (col(ServiceMove.number) == newest.c.number),
    )
    for move in session.exec(wanted):
        known[move.cluster, move.node] = move.after
    counted = Counter((cluster, state) for (cluster, _), state in known.items())
    for cluster in sorted({cluster for cluster, _ in known}):
        for state in NodeState:
            states.add(counted[cluster, state], cluster=cluster, state=state.value)
    looks = Counter((row.cluster, str(row.verdict.get("standing", "unknown"))) for row in session.exec(select(LastLook)))
    for (cluster, standing), times in sorted(looks.items()):
        verdicts.add(times, cluster=cluster, verdict=standing)
    return [states, verdicts]


def _questions(session: Session) -> Family:
    found = Family("holdfast_questions_open", "gauge", "Questions that wait for a person's answer (`holdfast approve`).")
    found.add(session.exec(select(func.count()).select_from(Question).where(col(Question.answered_at).is_(None))).one())
    return found
