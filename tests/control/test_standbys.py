"""The pool of standbys: where they wait, in which roles, and what their ends mean."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from holdfast.control.agents.events import StandbyExited, StandbyReady
from holdfast.control.nodes.hot_spares import MOST_LOSSES, HotSparePool, HotSpareRequest, places_for
from holdfast.errors import CommandRejected

ROLES = ((0,), (1, 2, 3))


class Agents:
    """Stands for a fleet: remembers orders, and answers them as told."""

    def __init__(self, *nodes: str, refuses: bool = False, epoch: int = 1) -> None:
        self.nodes, self.refuses, self.epoch = list(nodes), refuses, epoch
        self.orders: list[tuple[str, str, Any]] = []
        self.agents: dict[str, object] = {}

    def alive(self) -> list[str]:
        """Return the nodes."""
        return self.nodes

    def agent(self, node: str) -> object:
        """Return what stands for the agent of *node*, if it lives."""
        return self.agents.setdefault(node, object()) if node in self.nodes else None

    def send_command_async(self, node: str, verb: str, *, standbys: Any) -> Future[Any]:
        """Take an order."""
        self.orders.append((node, verb, standbys))
        answer: Future[Any] = Future()
        if self.refuses:
            answer.set_exception(CommandRejected(node, verb, "there is no warm starter"))
        else:
            answer.set_result({})
        return answer


def a_pool(*nodes: str, refuses: bool = False, epoch: int = 1) -> tuple[HotSparePool, Agents, list[str]]:
    """Return an empty pool, its agents, and where its remarks go."""
    agents, job_events = Agents(*nodes, refuses=refuses, epoch=epoch), list[str]()
    return HotSparePool(agents, job_events.append), agents, job_events  # type: ignore[arg-type]


def wanted(world: int = 4) -> HotSpareRequest:
    """Return what standbys of a job with two roles are for."""
    return HotSpareRequest(
        roles=ROLES, world=world, environment=lambda rank, number, role: {"RANK": str(rank), "N": str(number), "P": str(role)}
    )


def ready(facts: dict[str, Any]) -> StandbyReady:
    """Return the event that a standby has parked."""
    return StandbyReady.of({"event": "standby.ready", **facts})


def gone(facts: dict[str, Any]) -> StandbyExited:
    """Return the event that a standby has ended."""
    return StandbyExited.of({"event": "standby.exited", **facts})


def started(agents: Agents) -> list[tuple[str, int, str]]:
    """Return node, number and role of each standby that was ordered."""
    return [(node, one["id"], one["environment"]["P"]) for node, verb, standbys in agents.orders if verb == "standby" for one in standbys]


def test_standbys_wait_on_spare_nodes_first_and_then_beside_workers_in_turn() -> None:
    """As many as a node has room for, the emptiest first; none where there is no node."""
    assert places_for(3, {"a": 0, "b": 0, "s": 2}, ["a", "b"], {}) == ["s", "s", "a"]
    assert places_for(5, {"a": 0, "b": 0, "s": 2}, ["a", "b"], {}) == ["s", "s", "a", "b", "a"]
    assert places_for(3, {"a": 1, "b": 0, "s": 2}, ["a", "b"], {}) == ["s", "s", "a"]
    assert places_for(1, {"a": 0, "s": 2, "t": 2}, ["a"], {}) == ["s"]
    assert places_for(2, {}, [], {}) == []


def test_standbys_stay_where_they_are_as_long_as_no_place_is_better() -> None:
    """Of two spare nodes, or two with workers, the one that holds it; a spare node rather than beside workers."""
    assert places_for(1, {"a": 0, "s": 2, "t": 2}, ["a"], {"t": 1}) == ["t"]
    assert places_for(1, {"a": 0, "b": 0}, ["a", "b"], {"b": 1}) == ["b"]
    assert places_for(1, {"a": 0, "b": 0, "s": 1}, ["a", "b"], {"b": 1}) == ["s"]


def test_a_standby_beside_workers_goes_once_one_has_parked_on_a_spare_node() -> None:
    """Not before: until then it is the only one."""
    pool, agents, job_events = a_pool("a", "s")
    pool.maintain(["a"], wanted())
    pool.note_ready(ready({"id": 0, "role": 1}))
    for _ in range(2):
        pool.maintain(["s"], wanted())
    assert started(agents) == [("a", 0, "1"), ("s", 1, "1")]
    assert [one.id for one in pool.ready(4)] == [0]
    pool.note_ready(ready({"id": 1, "role": 1}))
    pool.maintain(["s"], wanted())
    assert agents.orders[-1] == ("a", "drop", [0])
    pool.note_exited(gone({"id": 0, "ordered": True}))
    pool.maintain(["s"], wanted())
    assert [one.id for one in pool.ready(4)] == [1]
    assert len(agents.orders) == 3
    assert not [words for words in job_events if "takes its place" in words]


def test_a_standby_stays_while_the_node_that_is_to_have_another_cannot_be_reached() -> None:
    """It is not known to wait there."""
    pool, agents, _ = a_pool("a")
    pool.maintain(["a"], wanted())
    pool.note_ready(ready({"id": 0, "role": 1}))
    pool.maintain(["away"], wanted())
    assert [one.id for one in pool.ready(4)] == [0]
    assert len(agents.orders) == 1


def test_the_largest_role_gets_the_first_standby() -> None:
    """Then in turn; each with the environment of a rank of its role."""
    pool, agents, _ = a_pool("s", "a")
    pool.maintain(["s", "s", "a"], wanted())
    assert started(agents) == [("s", 0, "1"), ("s", 1, "1"), ("a", 2, "0")]
    assert agents.orders[0][2][0]["environment"]["RANK"] == "1"
    pool.maintain(["s", "s", "a"], wanted())
    assert len(started(agents)) == 3


def test_what_is_taken_or_lost_is_replaced_in_its_role_and_a_loss_is_remarked() -> None:
    """It is no incident: no rank was hurt."""
    pool, agents, job_events = a_pool("s")
    pool.maintain(["s", "s"], wanted())
    pool.note_ready(ready({"id": 0, "role": 1}))
    assert [one.id for one in pool.ready(4)] == [0]
    pool.take([0])
    pool.note_exited(gone({"id": 1, "signal": 9, "code": None, "ordered": False}))
    pool.maintain(["s", "s"], wanted())
    assert [one[:2] for one in started(agents)][2:] == [("s", 2), ("s", 3)]
    assert job_events == ["standby 0 on s is warm and parked", "standby 1 on s was ended by signal 9; another one takes its place"]


def test_standbys_of_an_agent_that_another_one_followed_are_no_more() -> None:
    """They ended with it: who counts on them loses a recovery's attempt."""
    pool, agents, _ = a_pool("s")
    pool.maintain(["s"], wanted())
    pool.note_ready(ready({"id": 0, "role": 1}))
    agents.agents["s"] = object()
    assert pool.ready(4) == ()
    pool.maintain(["s"], wanted())
    assert [one[:2] for one in started(agents)] == [("s", 0), ("s", 1)]


def test_standbys_of_another_width_are_dropped() -> None:
    """Their warm-up was for groups that there are no more."""
    pool, agents, _ = a_pool("s")
    pool.maintain(["s"], wanted(4))
    pool.note_ready(ready({"id": 0, "role": 1}))
    assert pool.ready(3) == ()
    pool.maintain(["s"], wanted(3))
    assert ("s", "drop", [0]) in agents.orders
    pool.note_exited(gone({"id": 0, "ordered": True}))
    assert [one.id for one in pool.standbys.values()] == [1]


def test_after_too_many_losses_no_more_are_started() -> None:
    """A script that cannot stand by must not eat the node."""
    pool, agents, job_events = a_pool("s", refuses=True)
    for _ in range(3 * MOST_LOSSES):
        pool.maintain(["s"], wanted())
    assert len(started(agents)) == MOST_LOSSES
    assert len(job_events) == MOST_LOSSES
    assert "no more are started" in job_events[-1]


def test_a_pool_that_is_adopted_gives_no_number_twice() -> None:
    """The agents tell what waits; the next one has a new number."""
    pool, agents, _ = a_pool("s", "a")
    pool.reattach("s", {"4": {"pid": 1, "ready": True, "role": 0}}, 4)
    assert [(one.id, one.node, one.role) for one in pool.ready(4)] == [(4, "s", 0)]
    pool.maintain(["s", "a"], wanted())
    assert started(agents) == [("a", 5, "1")]


def test_a_flow_that_cannot_reach_a_standby_of_the_one_before_gives_its_number_to_no_other() -> None:
    """Both go on when its node answers after all; on nodes that share a home the number names the log that each writes."""
    before, agents, _ = a_pool("away")
    before.maintain(["away"], wanted())
    ((_, old, _),) = started(agents)
    after, agents, _ = a_pool("s", epoch=2)
    after.maintain(["s"], wanted())
    ((_, new, _),) = started(agents)
    agents.nodes.append("away")
    after.reattach("away", {str(old): {"role": 1, "ready": True}}, 4)
    assert {number: one.node for number, one in after.standbys.items()} == {old: "away", new: "s"}
