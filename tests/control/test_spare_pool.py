"""When spare nodes are looked for; one that starts just when the controller detaches is left to the next controller: up, or idle."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.cluster import open_cluster
from holdfast.control.agents.pool import AgentPool
from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.supervise import control_job
from holdfast.errors import AgentDisconnected
from holdfast.history import History, queries
from holdfast.history.models import Lease
from holdfast.spec import LocalCluster, TrainingJob
from tests.waiting import wait_until


@pytest.fixture
def cluster(tmp_path: Path) -> LocalCluster:
    """Return a node on which nothing runs."""
    return LocalCluster(name="c", nodes=1, directory=str(tmp_path))


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[socket.socket]:
    """Listen on the node in the place of its agent, and send nothing."""
    (tmp_path / "node-0").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "node-0" / "agent.sock"))
        listening.listen()
        listening.settimeout(60)
        yield listening


def test_a_controller_that_detaches_finishes_starting_nodes_first(
    holdfast_home: Path, cluster: LocalCluster, silent: socket.socket
) -> None:
    """The lease is released after that, and what became of the node is recorded."""
    assert holdfast_home.is_dir()
    spec, history = TrainingJob(name="freed", command=["true"], preflight=False), History.open()

    def has_event(words: str) -> bool:
        return any(words in one.text for one in queries.job_events(history, job))

    def hang_up() -> None:
        wait_until(lambda: has_event("detaches"), seconds=60)
        silent.close()
        asked.close()

    with closing(history), control_job(spec, cluster) as run:
        assert isinstance(run, JobController)
        job = run.job.id
        run.nodes.spare_pool._reported = False  # as once all nodes were there
        run.nodes.spare_pool.poll(0.0)
        asked, _ = silent.accept()
        run.detach.request("the test says so")
        hanging_up = threading.Thread(target=hang_up)
        hanging_up.start()
    with closing(History.open()) as history:
        hanging_up.join()
        assert "spare pool" not in {one.name for one in threading.enumerate()}
        assert has_event("(node-0: ")
        with history.session() as session:
            lease = session.get(Lease, job)
            assert lease is not None
            assert lease.expires_at == 0.0


@pytest.mark.long
def test_a_dropped_node_is_tried_at_once_when_it_answers_again(holdfast_home: Path, cluster: LocalCluster, silent: socket.socket) -> None:
    """Otherwise it waits for its turn, so that a node that never starts is not tried all the time."""
    assert holdfast_home.is_dir()

    def tried(run: JobController, at: float) -> bool:
        run.nodes.spare_pool.poll(at)
        begun = run.nodes.spare_pool._thread
        if begun is None or not begun.is_alive():
            return False
        silent.accept()[0].close()
        begun.join()
        return True

    with control_job(TrainingJob(name="short", command=["true"], preflight=False), cluster) as run:
        assert isinstance(run, JobController)
        assert tried(run, 100.0)
        run.agents.uncleaned.add("node-0")
        assert not tried(run, 100.1)
        run.agents.uncleaned.discard("node-0")
        assert tried(run, 100.2)
        assert not tried(run, 100.3)


def test_a_closed_pool_starts_no_agent(cluster: LocalCluster, tmp_path: Path) -> None:
    """A thread may still be at work."""
    spec = TrainingJob(name="freed", command=["true"])
    fleet = AgentPool(open_cluster(cluster), {"job": "1", "name": spec.name}, epoch=1)
    fleet.close(end=False)
    with pytest.raises(AgentDisconnected) as closed:
        fleet.bring_up("node-0")
    assert closed.value.node == "node-0"
    assert not (tmp_path / "node-0").exists()


@pytest.mark.parametrize(
    "look",
    [
        lambda pool: pool.alive(),
        lambda pool: pool.connected(),
        lambda pool: pool.disconnected(),
        lambda pool: pool.silent(0.0),
        lambda pool: pool.all_silent(3600.0),
        lambda pool: pool.last_contact,
        lambda pool: pool.cut_off(),
        lambda pool: pool.reconnecting(),
    ],
    ids=["alive", "connected", "disconnected", "silent", "all-silent", "last-contact", "cut-off", "reconnecting"],
)
def test_a_node_that_comes_up_while_the_controller_looks_at_the_others_does_not_end_it(
    look: Callable[[AgentPool], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that brings it up may run between any two of them."""
    pool = AgentPool(cast("Any", SimpleNamespace(remote=True, is_reachable=lambda _: True, close=lambda: None)), {"job": "j"}, epoch=1)

    class Seen(SimpleNamespace):
        """A client of an agent; as soon as somebody looks at it, one more node has come up."""

        def __getattribute__(self, name: str) -> Any:
            pool.clients.setdefault("n2", cast("Any", SimpleNamespace(**vars(other))))
            return super().__getattribute__(name)

    other = SimpleNamespace(lost_reason=None, is_unreachable=False, disconnected_since=None, failed_attempts=0, last_received=0.0)
    pool.clients |= {name: cast("Any", Seen(**vars(other))) for name in ("n0", "n1")}
    look(pool)
    assert set(pool.clients) == {"n0", "n1", "n2"}
    monkeypatch.setattr(pool, "clients", {})
    pool.close(end=False)
