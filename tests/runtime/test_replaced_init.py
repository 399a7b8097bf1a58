"""`init_process_group` as the launcher replaces it: what scripts get that know nothing of `holdfast.join`."""

from __future__ import annotations

from tests.runtime.chaos import fault
from tests.runtime.flow_double import Ended, Job, assert_undisturbed


def test_a_script_with_a_session_and_torchs_own_call_has_lost_ranks_replaced(job: Job, undisturbed_run: Ended) -> None:
    """The other ranks keep their processes, and no weight differs from an undisturbed run's: with rank 0 lost, and with another."""
    flow = job("init", groups="auto", chaos=[fault(1, "backward", 5), fault(0, "forward", 9)])
    first = dict(flow.pids)
    for rank, others in ((1, {0, 2, 3}), (0, {2, 3})):
        flow.until_dead(rank)
        flow.regroup([rank])
        flow.mended()
        assert {flow.pids[other] for other in others} == {first[other] for other in others}
    assert_undisturbed(flow, undisturbed_run)
    assert flow.of("exception") == []
    assert {(one["level"], one["pid"] in first.values()) for one in flow.of("level")} == {
        ("managed-groups", True),
        ("managed-groups", False),
    }
    assert (flow.folder / "rank-0.log").read_text().count("holdfast: process groups and state are managed") == 2
