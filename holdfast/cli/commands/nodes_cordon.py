"""`holdfast nodes hold`, `release`, `readmit` and `retire`: a person's word about a node."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import click
from pydantic_core import PydanticCustomError

from holdfast.cli.actor import signature
from holdfast.cli.commands.nodes import views_of
from holdfast.cli.output import clock, hint, say, say_json
from holdfast.cluster import names_of
from holdfast.errors import NodeNotChanged, UnknownNode
from holdfast.history import cordons as record
from holdfast.history.cordons import CordonTable
from holdfast.history.cordons import apply as apply_cordon
from holdfast.history.store import History
from holdfast.report.wording import NOTHING
from holdfast.spec import Cluster, LocalCluster, load_cluster
from holdfast.spec.durations import CURE, parse
from policies.cordons import Answer, CordonChanged, Node, OperatorRequest, Owner, QuarantineLimits
from policies.quarantine import hold, readmit, release, retire


@dataclass(frozen=True, slots=True, kw_only=True)
class CordonRequest:
    """What a person wants of a node."""

    node: str
    reason: str
    lasts: str | None = None
    """For how long it is to be held."""
    number: int | None = None
    """The one hold that is meant."""


def _hold(node: Node, word: OperatorRequest, wish: CordonRequest) -> Answer:
    return hold(node, word, until=None if wish.lasts is None else word.at + seconds_in(wish.lasts, "--for"))


def _release(node: Node, word: OperatorRequest, wish: CordonRequest) -> Answer:
    return release(node, word, wish.number)


def _readmit(node: Node, word: OperatorRequest, wish: CordonRequest) -> Answer:
    return readmit(node, word, wish.number)


def _retire(node: Node, word: OperatorRequest, _: CordonRequest) -> Answer:
    return retire(node, word)


VERBS: Final[dict[str, Callable[[Node, OperatorRequest, CordonRequest], Answer]]] = {
    "hold": _hold,
    "release": _release,
    "readmit": _readmit,
    "retire": _retire,
}


def change(verb: str, wish: CordonRequest, cluster_file: Path | None, *, as_json: bool) -> int:
    """Carry out a person's word about a node, and tell how the node is then; raise an `OperatorError` where it cannot be."""
    cluster = load_cluster(cluster_file) if cluster_file else LocalCluster()
    now, place = time.time(), CordonTable(cluster=cluster.name, names=names_of(cluster), rules=cluster.quarantine.rules)
    word = OperatorRequest(owner=Owner(name=signature(), person=True), reason=wish.reason, at=now)
    if wish.lasts is not None:
        seconds_in(wish.lasts, "--for")
    history = History.open()
    try:
        refuse_a_stranger(history, place, wish.node, now)
        answer = apply_cordon(history, place, wish.node, partial(_said, verb, word, wish), now=now)
    finally:
        history.close()
    if not isinstance(answer, CordonChanged):
        raise NodeNotChanged(wish.node, cluster.name, answer.why)
    _tell(cluster, answer, as_json=as_json)
    if cluster.kind == "slurm":
        from holdfast.cluster.slurm.drains import follow  # noqa: PLC0415 (most clusters are not Slurm's)

        for words in follow(cluster, answer.node):
            hint(words)
    return 0


def _said(verb: str, word: OperatorRequest, wish: CordonRequest, node: Node, _: QuarantineLimits) -> Answer:
    return VERBS[verb](node, word, wish)


def seconds_in(text: str, option: str) -> float:
    """Return the seconds of a duration that *option* names; raise click's `BadParameter` where it is none."""
    try:
        seconds = parse(text).total_seconds()
    except PydanticCustomError:
        seconds = 0.0
    if seconds <= 0:
        raise click.BadParameter(f"'{text}' is no duration of more than nothing. {CURE}.", param_hint=f"'{option}'")
    return seconds


def refuse_a_stranger(history: History, place: CordonTable, node: str, now: float) -> None:
    """Refuse a name that neither the cluster has nor the history, as a node that left the cluster may still be held."""
    if node not in place.names and node not in record.nodes(history, place, now=now):
        raise UnknownNode(node, place.cluster, tuple(difflib.get_close_matches(node, place.names, n=3) or list(place.names)[:5]))


def _tell(cluster: Cluster, done: CordonChanged, *, as_json: bool) -> None:
    node, hold_ends = done.node, next((one.until for one in done.node.holds if one.number == done.hold), None)
    before = done.moves[0].before if done.moves else node.state
    if as_json:
        facts = {"cluster": cluster.name, "node": node.name, "before": before, "state": node.state, "hold": done.hold}
        say_json({**facts, "owner": done.owner.name, "reason": done.reason, "until": hold_ends})
        return
    moved = f"{before} -> {node.state}" if done.moves else f"{node.state}, as before"
    ends = f", until {clock(hold_ends)}" if hold_ends is not None else ""
    say(f"{node.name}: {moved} (hold {done.hold}, by {done.owner.name}{ends})")
    job = next((view.job for view in views_of(cluster) if view.name == node.name), None) if node.is_isolated else None
    if job and job != NOTHING:
        hint(f"Job '{job}' trains on {node.name} and goes on there. `holdfast drain {node.name}` has it leave.")
