"""DeepSpeed's ZeRO under Holdfast: it resumes from its own checkpoint, with groups of either kind, and refuses another number of ranks."""

from __future__ import annotations

import pytest

from tests.frameworks import needs
from tests.runtime.chaos import fault
from tests.runtime.flow_double import FlowDouble, Workers

needs("deepspeed")


def test_zero_resumes_bit_equal_and_refuses_fewer_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A killed rank, in PyTorch's own groups and in managed ones: its checkpoint is complete, steps and sections are reported."""
    workers = Workers("examples.deepspeed_zero")
    told = []
    for chaos, groups in (([], "auto"), ([fault(1, "begin", 8)], "managed")):
        folder = tmp_path_factory.mktemp("f")
        flow = FlowDouble(workers, folder, "saves_itself", "deepspeed", ranks=2, stride=1, chaos=chaos, groups=groups).begin()
        if chaos:
            flow.until_dead(1)
            assert flow.hear("exception", 0)["peer_lost"]
            flow.restart()
        ended = flow.finish()
        assert ended.status == [0, 0], flow.logs()
        told.append((ended.told, ended.losses))
        assert not flow.of("groups"), "no rank says that it can be repaired"
        assert {one["name"] for one in flow.of("section")} == {"checkpoint of DeepSpeed"}
        (level,) = {(one["level"], one["text"]) for one in flow.of("level")}
        assert level[0] == "unchanged"
        assert "after a fault all ranks restart from its own checkpoint" in level[1]
        if chaos:
            assert "resumed after step 6" in flow.logs()
            flow.ranks = 1
            flow.restart()
            assert flow.until(lambda: flow.workers.ended().get(flow.pids[0]), "the end of rank 0") == 1
            assert "The checkpoint being loaded used a DP world size of 2 but the current world size is 1" in flow.hear("exception", 0)["message"]
        flow.close()
    workers.close()
    assert told[0] == told[1]
    assert sorted(told[0][1][0]) == list(range(1, 11))
