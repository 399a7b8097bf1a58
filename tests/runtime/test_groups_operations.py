"""What torch's own code asks of a group, a managed one does as gloo does; and no wait in it is without end."""

from __future__ import annotations

import pytest

from tests.runtime.flow_double import FlowDouble, Job, Workers


def test_every_operation_gives_what_stock_gloo_gives(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Collectives, messages, objects, functional and coalesced ones, on three ranks."""
    flow = FlowDouble(workers, tmp_path_factory.mktemp("f"), "operations", ranks=3).begin()
    ended = flow.finish()
    assert ended.status == [0, 0, 0], flow.logs()
    for told in ended.told:
        assert told["kinds"] == ["holdfast", "gloo"]
        different = {name: pair for name, pair in told["found"].items() if pair[0] != pair[1]}
        assert different == {}
        assert not [pair for pair in told["found"].values() if str(pair[1]).startswith("error")]
    flow.close()


def test_an_order_ends_a_wait_that_would_never_end(job: Job) -> None:
    """Rank 0 waits for a rank that lives and is stopped: the order alone ends that, as a loss of a peer and without an exception."""
    flow = job(script="waiting", ranks=2)
    flow.hear("waits", 0)
    flow.until_stopped(1)
    flow.send(0, {"do": "abandon", "generation": 1, "lost": [1]})
    pid = flow.pids[0]
    assert flow.until(lambda: 0 if pid not in flow.workers.ended() else [flow.workers.ended()[pid]], "the end of rank 0") == [0]
    flow.kill(1)
    told = flow.finish().told[0]
    assert told == {"told": [0.0, 0.0, 0.0], "lost": True, "why": "the flow has ended generation 1"}
