"""Digests of parameters: any bit shows, and checks cost what they may."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast.runtime import agent_client
from holdfast.runtime.telemetry import rank_status, replica_checksums
from holdfast.runtime.telemetry.progress import section
from holdfast.runtime.telemetry.replica_checksums import MAX_SHARE, MIN_INTERVAL, ReplicaChecksums, checksums_of
from holdfast.runtime.telemetry.wait_windows import StepTimer, WaitWindows
from tests.runtime.agent_double import AgentDouble


@given(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8]), st.integers(1, 70), st.integers(0, 9), st.data())
def test_any_single_bit_changes_the_sum(dtype: torch.dtype, size: int, offset: int, data: st.DataObject) -> None:
    """Of tensors of any type and size, also of those that begin in the middle of others."""
    whole = torch.arange(size + offset).to(dtype)
    part = whole[offset:]
    before = checksums_of({"w": part})
    raw = part.view(torch.uint8)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksums_of({"w": part}) != before


def test_checksums_identify_the_tensor() -> None:
    """And are the same for the same values wherever they lie."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    before = checksums_of(dict(model.named_parameters()))
    with torch.no_grad():
        model.get_parameter("1.weight")[0, 1] += 1
    after = checksums_of(dict(model.named_parameters()))
    assert [name for name in before if before[name] != after[name]] == ["1.weight"]
    turned = torch.arange(12.0).reshape(3, 4).t()
    assert checksums_of({"w": turned}) == checksums_of({"w": turned.contiguous()})
    assert checksums_of({}) == {}


@pytest.fixture
def connected_agent(agent: AgentDouble, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentDouble]:
    """Provide an agent to which this process is connected."""
    for name, value in agent.environment.items():
        monkeypatch.setenv(name, value)
    ours = agent_client.AgentLink.from_env()
    for module in (replica_checksums, rank_status, agent_client):
        monkeypatch.setattr(module, "link", lambda: ours)
    yield agent
    ours.mute()


def test_digests_are_reported_at_their_steps_and_checksums_on_request(connected_agent: AgentDouble) -> None:
    """Of the newest checks only: older ones are not requested."""
    model = nn.Linear(4, 4)
    checker = ReplicaChecksums(model, {"HOLDFAST_CHECK_EVERY": "4"})
    for step in range(26):
        checker.check(step, "p")
    found = connected_agent.wait_for("check", 6)
    assert [one["step"] for one in found] == [4, 8, 12, 16, 20, 24]
    assert {(one["digest"], one["shard"]) for one in found} == {(found[0]["digest"], "p")}
    for step in (4, 24):
        rank_status.answer_queries()({"do": "sums", "step": step})
    (answer,) = connected_agent.wait_for("sums")
    assert answer["step"] == 24
    assert answer["sums"] == checksums_of(dict(model.named_parameters()))


@pytest.mark.parametrize(("setting", "steps"), [("0", []), ("auto", [MIN_INTERVAL]), ("", [MIN_INTERVAL])])
def test_checks_can_be_turned_off(connected_agent: AgentDouble, setting: str, steps: list[int]) -> None:
    """And are on by default."""
    checker = ReplicaChecksums(nn.Linear(2, 2), {"HOLDFAST_CHECK_EVERY": setting})
    for step in range(MIN_INTERVAL + 1):
        checker.check(step, "")
    agent_client.link().report("end")
    connected_agent.wait_for("end")
    assert [one["step"] for one in connected_agent.of("check")] == steps


def test_parameters_of_an_unsupported_kind_end_the_checks_and_not_the_training(
    connected_agent: AgentDouble, caplog: pytest.LogCaptureFixture
) -> None:
    """A tensor without values stands for unsupported kinds of parameters."""
    checker = ReplicaChecksums(nn.Linear(2, 2, device="meta"), {})
    for step in range(MIN_INTERVAL, 4 * MIN_INTERVAL, MIN_INTERVAL):
        checker.check(step, "")
    assert checker.every == 0
    assert "cannot be compared" in caplog.text


@given(st.floats(1e-6, 10.0), st.floats(1e-3, 60.0))
def test_checks_stay_below_their_cost_limit_and_all_ranks_can_meet(cost: float, seconds: float) -> None:
    """The least power of two that the cost allows: of two ranks the rarer one's steps are the other's too."""
    checker = ReplicaChecksums(nn.Linear(2, 2), {})
    checker._costs.append(cost)
    checker._choose_interval(seconds)
    assert checker.every % MIN_INTERVAL == 0
    assert (checker.every // MIN_INTERVAL).bit_count() == 1
    assert cost <= MAX_SHARE * checker.every * seconds or checker.every == replica_checksums.MAX_INTERVAL
    assert checker.every == MIN_INTERVAL or cost > MAX_SHARE * checker.every / 2 * seconds


def test_a_step_is_split_into_work_waits_and_data() -> None:
    """Time between two steps belongs to neither, and a step with a section in it is not reported."""
    windows = WaitWindows()
    timer = StepTimer(windows)
    assert timer.end() is None
    timer.begin()
    windows.sums |= {"gradients": 0.25, "vote": 0.5, "data": 0.125}
    measured = timer.end()
    assert measured is not None
    assert (measured["talk"], measured["data"]) == (0.75, 0.125)
    timer.begin()
    assert timer.end() is not None
    assert timer.end()["talk"] == 0.0  # type: ignore[index]
    timer.begin()
    with section("evaluation"):
        pass
    assert timer.end() is None
