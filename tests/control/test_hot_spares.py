"""The pool of hot spares: on which nodes they wait, in which roles, and what their exits cause."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from holdfast.control.agents.events import HotSpareExited, HotSpareReady
from holdfast.control.migration.live import LiveChange
from holdfast.control.nodes.hot_spares import MAX_LOSSES, HotSparePool, HotSpareRequest, HotSpareState, places_for
from holdfast.control.recovery.in_process import reschedule, worker_facts
from holdfast.control.state.rank_table import SpareLocalRanks
from holdfast.errors import CommandRejected
from holdfast.policies.recovery.escalation import Decision, Placement, RecoveryAction
from tests.control.bare_controller import bare_controller
from tests.mentions import mentions

ROLES = ((0,), (1, 2, 3))


class Agents:
    """A pool of agents that records commands, and answers them as a test says."""

    def __init__(self, *nodes: str, refuses: bool = False, epoch: int = 1) -> None:
        self.nodes, self.refuses, self.epoch = list(nodes), refuses, epoch
        self.full: set[str] = set()
        """Nodes whose agents refuse hot spares, as all of their GPUs have ranks."""
        self.orders: list[tuple[str, str, Any]] = []
        self.agents: dict[str, object] = {}

    def alive(self) -> list[str]:
        """Return the nodes."""
        return self.nodes

    def agent(self, node: str) -> object:
        """Return the client of the agent of *node*, unless it is lost."""
        return self.agents.setdefault(node, object()) if node in self.nodes else None

    def send_command_async(self, node: str, verb: str, *, hot_spares: Any) -> Future[Any]:
        """Record a command."""
        self.orders.append((node, verb, hot_spares))
        answer: Future[Any] = Future()
        if self.refuses:
            answer.set_exception(CommandRejected(node, "there is no warm starter", verb))
        else:
            refused = {str(one["id"]): "it would share the GPU of rank 0" for one in hot_spares} if node in self.full else {}
            answer.set_result({"refused": refused})
        return answer


def a_pool(*nodes: str, refuses: bool = False, epoch: int = 1) -> tuple[HotSparePool, Agents, list[str]]:
    """Return an empty pool, its agents, and its recorded events."""
    agents, job_events = Agents(*nodes, refuses=refuses, epoch=epoch), list[str]()
    return HotSparePool(agents, job_events.append), agents, job_events  # type: ignore[arg-type]


def wanted(world: int = 4) -> HotSpareRequest:
    """Return the request for hot spares of a job with two roles."""
    return HotSpareRequest(
        roles=ROLES, world=world, environment=lambda rank, number, role: {"RANK": str(rank), "N": str(number), "P": str(role)}
    )


def ready(facts: dict[str, Any]) -> HotSpareReady:
    """Return the event that a hot spare has warmed up."""
    return HotSpareReady.of({"event": "hot-spare.ready", **facts})


def exited(facts: dict[str, Any]) -> HotSpareExited:
    """Return the event that a hot spare has exited."""
    return HotSpareExited.of({"event": "hot-spare.exited", **facts})


def started(agents: Agents) -> list[tuple[str, int, str]]:
    """Return node, id and role of each hot spare that was started."""
    return [
        (node, one["id"], one["environment"]["P"])
        for node, verb, hot_spares in agents.orders
        if verb == "start-hot-spares"
        for one in hot_spares
    ]


def test_hot_spares_wait_on_spare_nodes_first_and_then_on_members_in_turn() -> None:
    """As many as a node has room for, the emptiest first; none where there is no node."""
    assert places_for(3, {"a": 0, "b": 0, "s": 2}, ["a", "b"], {}) == ["s", "s", "a"]
    assert places_for(5, {"a": 0, "b": 0, "s": 2}, ["a", "b"], {}) == ["s", "s", "a", "b", "a"]
    assert places_for(3, {"a": 1, "b": 0, "s": 2}, ["a", "b"], {}) == ["s", "s", "a"]
    assert places_for(1, {"a": 0, "s": 2, "t": 2}, ["a"], {}) == ["s"]
    assert places_for(2, {}, [], {}) == []


def test_hot_spares_stay_as_long_as_no_place_is_better() -> None:
    """Of two equal nodes the one that has it; a spare node rather than a member."""
    assert places_for(1, {"a": 0, "s": 2, "t": 2}, ["a"], {"t": 1}) == ["t"]
    assert places_for(1, {"a": 0, "b": 0}, ["a", "b"], {"b": 1}) == ["b"]
    assert places_for(1, {"a": 0, "b": 0, "s": 1}, ["a", "b"], {"b": 1}) == ["s"]


def test_a_ready_hot_spare_says_how_much_of_its_warm_up_came_from_the_recording() -> None:
    """One that had to make calls up is slower in its first step."""
    pool, _, job_events = a_pool("s")
    pool.maintain(["s"], wanted())
    pool.note_ready(ready({"id": 0, "role": 1, "seconds": 1.5, "coverage": {"calls": 9, "played": 8, "more": "x"}}))
    assert any(mentions(words, "hot spare 0", "s", "1.50 s", "8 of 9") for words in job_events)


def test_a_hot_spare_on_a_member_ends_once_one_has_warmed_up_on_a_spare_node() -> None:
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
    pool.note_exited(exited({"id": 0, "ordered": True}))
    pool.maintain(["s"], wanted())
    assert [one.id for one in pool.ready(4)] == [1]
    assert len(agents.orders) == 3
    assert not [words for words in job_events if "takes its place" in words]


def test_a_hot_spare_stays_while_the_node_of_its_successor_is_unreachable() -> None:
    """Whether one waits there is unknown."""
    pool, agents, _ = a_pool("a")
    pool.maintain(["a"], wanted())
    pool.note_ready(ready({"id": 0, "role": 1}))
    pool.maintain(["away"], wanted())
    assert [one.id for one in pool.ready(4)] == [0]
    assert len(agents.orders) == 1


def test_the_largest_role_gets_the_first_hot_spare() -> None:
    """Then in turn; each with the environment of a rank of its role."""
    pool, agents, _ = a_pool("s", "a")
    pool.maintain(["s", "s", "a"], wanted())
    assert started(agents) == [("s", 0, "1"), ("s", 1, "1"), ("a", 2, "0")]
    assert agents.orders[0][2][0]["environment"]["RANK"] == "1"
    pool.maintain(["s", "s", "a"], wanted())
    assert len(started(agents)) == 3


def test_a_taken_or_lost_hot_spare_is_replaced_in_its_role_and_a_loss_is_recorded() -> None:
    """It is no incident: no rank was affected."""
    pool, agents, job_events = a_pool("s")
    pool.maintain(["s", "s"], wanted())
    pool.note_ready(ready({"id": 0, "role": 1}))
    assert [one.id for one in pool.ready(4)] == [0]
    pool.take([0])
    pool.note_exited(exited({"id": 1, "signal": 9, "code": None, "ordered": False}))
    pool.maintain(["s", "s"], wanted())
    assert [one[:2] for one in started(agents)][2:] == [("s", 2), ("s", 3)]
    assert len(job_events) == 2
    assert mentions(job_events[0], "hot spare 0 on s")
    assert mentions(job_events[1], "hot spare 1 on s", "signal 9")


def test_hot_spares_end_with_their_agent() -> None:
    """A recovery that counted on them would lose an attempt."""
    pool, agents, _ = a_pool("s")
    pool.maintain(["s"], wanted())
    pool.note_ready(ready({"id": 0, "role": 1}))
    agents.agents["s"] = object()
    assert pool.ready(4) == ()
    pool.maintain(["s"], wanted())
    assert [one[:2] for one in started(agents)] == [("s", 0), ("s", 1)]


def test_hot_spares_of_another_world_size_are_dropped() -> None:
    """Their warm-up was for groups that no longer exist."""
    pool, agents, _ = a_pool("s")
    pool.maintain(["s"], wanted(4))
    pool.note_ready(ready({"id": 0, "role": 1}))
    assert pool.ready(3) == ()
    pool.maintain(["s"], wanted(3))
    assert ("s", "drop", [0]) in agents.orders
    pool.note_exited(exited({"id": 0, "ordered": True}))
    assert [one.id for one in pool.spares.values()] == [1]


def test_after_too_many_losses_no_more_are_started() -> None:
    """A script that cannot run as a hot spare must not use up the node."""
    pool, agents, job_events = a_pool("s", refuses=True)
    for _ in range(3 * MAX_LOSSES):
        pool.maintain(["s"], wanted())
    assert len(started(agents)) == MAX_LOSSES
    assert len(job_events) == MAX_LOSSES
    assert mentions(job_events[-1], "no more")


def test_a_reattached_pool_gives_no_id_twice() -> None:
    """The agents report the waiting ones; the next one has a new id."""
    pool, agents, _ = a_pool("s", "a")
    pool.reattach("s", {"4": {"pid": 1, "ready": True, "role": 0}}, 4)
    assert [(one.id, one.node, one.role) for one in pool.ready(4)] == [(4, "s", 0)]
    pool.maintain(["s", "a"], wanted())
    assert started(agents) == [("a", 5, "1")]


def test_a_controller_does_not_reuse_the_id_of_an_unreachable_hot_spare() -> None:
    """Both continue when its node answers after all; on nodes with a shared home folder the id names the log of each."""
    before, agents, _ = a_pool("away")
    before.maintain(["away"], wanted())
    ((_, old, _),) = started(agents)
    after, agents, _ = a_pool("s", epoch=2)
    after.maintain(["s"], wanted())
    ((_, new, _),) = started(agents)
    agents.nodes.append("away")
    after.reattach("away", {str(old): {"role": 1, "ready": True}}, 4)
    assert {number: one.node for number, one in after.spares.items()} == {old: "away", new: "s"}


def test_each_hot_spare_has_a_local_rank_of_its_own() -> None:
    """And so a GPU: neither a rank nor another hot spare of its node has it, and what has ended leaves its own."""
    pool, agents, _ = a_pool("s", "m")

    def request(ranks: dict[str, set[int]]) -> HotSpareRequest:
        return HotSpareRequest(
            roles=ROLES,
            world=4,
            environment=lambda rank, number, role: {"RANK": str(rank), "LOCAL_RANK": "0", "N": str(number), "P": str(role)},
            ranks_per_node=4,
            local_ranks=lambda node: ranks.get(node, set()),
        )

    pool.start("s", [0, 1, 1], request({}))
    pool.start("m", [0, 1, 1], request({"m": {0, 2}}))
    given = [(node, one["environment"]["LOCAL_RANK"]) for node, _, spares in agents.orders for one in spares]
    assert given[:5] == [("s", "0"), ("s", "1"), ("s", "2"), ("m", "1"), ("m", "3")]
    first = min(pool.spares)
    assert pool.spares[max(pool.spares)].local_rank is None  # the node has no more of them
    pool.take([first])
    (again,) = pool.start("s", [0], request({"s": {1}}))
    assert pool.spares[again].local_rank == 0
    after, _, _ = a_pool("s", epoch=2)
    after.reattach("s", {str(one.id): {"role": 1, "ready": True, "local_rank": str(one.local_rank)} for one in pool.spares.values()}, 4)
    assert {number: one.local_rank for number, one in after.spares.items() if one.node == "s"} == {
        number: one.local_rank for number, one in pool.spares.items()
    }, "the next controller gives none of them away"


def test_no_hot_spare_shares_the_gpu_of_a_rank() -> None:
    """The agent knows which ranks have GPUs open. Its node is asked again once its ranks are others; the others get theirs meanwhile."""
    pool, agents, job_events = a_pool("a", "b", "s")
    agents.full = {"a", "b"}
    ranks = {"a": {0, 1}, "b": {0, 1}}

    def request() -> HotSpareRequest:
        return HotSpareRequest(
            roles=ROLES,
            world=4,
            environment=lambda rank, number, role: {"RANK": str(rank), "N": str(number), "P": str(role)},
            ranks_per_node=2,
            local_ranks=lambda node: frozenset(ranks.get(node, ())),
        )

    for _ in range(4):
        pool.maintain(["s", "a", "b"], request())
    assert [(node, len(spares)) for node, verb, spares in agents.orders if verb == "start-hot-spares"] == [("s", 1), ("a", 1), ("b", 1)]
    assert [one.node for one in pool.spares.values()] == ["s"]
    assert [mentions(one, "share the GPU of rank 0", "spare nodes") for one in job_events] == [True, True], job_events
    agents.full, ranks["a"] = set(), {1}
    pool.maintain(["s", "a", "b"], request())
    assert sorted(one.node for one in pool.spares.values()) == ["a", "s"]


def test_a_recovery_knows_which_local_ranks_hot_spares_have(tmp_path: Path) -> None:
    """The one that takes a rank keeps its own, and the GPU of the one that waits on is left alone."""
    with bare_controller(tmp_path, {"a": [0, 1], "b": [2, 3]}, nproc_per_node=2, spare_nodes=1) as run:
        for number in (0, 1):
            run.nodes.hot_spares.spares[number] = HotSpareState(id=number, node="s", role=0, world=4, local_rank=number, ready=True)
        run.nodes.hot_spares.spares[2] = HotSpareState(id=2, node="b", role=0, world=4)
        assert run.nodes.local_ranks_of_spares({3: 1, 2: 9}) == SpareLocalRanks(taking={3: 1}, parked={"s": {0}}, per_node=2)
        seats = (Placement(rank=3, node="s", hot_spare=1),)
        reschedule(run, Decision(action=RecoveryAction.REPLACE_RANKS, reason="rank 3 was killed", seats=seats))
        assert run.generations.rank_table.places == {0: 0, 1: 1, 2: 0, 3: 1}
        assert worker_facts(run, "s", 3, seats[0])["environment"]["LOCAL_RANK"] == "1"
        run.nodes.hot_spares.take([1])
        seats = (Placement(rank=2, node="s"),)
        reschedule(run, Decision(action=RecoveryAction.REPLACE_RANKS, reason="rank 2 was killed", seats=seats))
        assert run.generations.rank_table.places[2] == 0, "the node has no third local rank"


def test_a_live_migration_knows_them_too(tmp_path: Path) -> None:
    """Its hot spares were started for it, and one may wait on its node already."""
    with bare_controller(tmp_path, {"a": [0, 1], "b": [2, 3]}, nproc_per_node=2, spare_nodes=1) as run:
        for number in (0, 1):
            run.nodes.hot_spares.spares[number] = HotSpareState(id=number, node="s", role=0, world=4, local_rank=number, ready=True)
        change = LiveChange(run)
        table = change._plan((Placement(rank=3, node="s", hot_spare=1),), frozenset({3}))
        assert table.places == {0: 0, 1: 1, 2: 0, 3: 1}
