"""Settings of in-memory snapshots, and what nodes receive of them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from holdfast.control.config.worker_env import prepare_fields
from holdfast.history import Job
from holdfast.spec import LocalCluster, TrainingJob
from holdfast.spec.files.problems import problems_in
from holdfast.spec.files.units import parse_size
from holdfast.spec.job import MemoryPlan


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GB", 8 * 10**9), ("512MiB", 2**29), ("1.5 kb", 1500), ("7", 7), (7, 7), (7.0, 7), ("2G", None), ("1TiB", 2**40), ("64b", 64)],
)
def test_sizes_are_parsed(text: object, size: int | None) -> None:
    """A unit, or a bare number of bytes; half a unit could be either kind."""
    if size is None:
        with pytest.raises(Exception, match="amount of memory"):
            parse_size(text)
    else:
        assert parse_size(text) == size


@pytest.mark.parametrize("text", ["much", "", "-1GB", -1, True, None, [], "1..2GB", "GB", 1.5, "1e9", "9" * 30, 2**70])
def test_an_invalid_size_is_refused_with_the_cure(text: object) -> None:
    """The message shows how to write one; an empty field means no limit."""
    if text is None:
        return
    with pytest.raises(ValidationError) as refused:
        MemoryPlan.model_validate({"max_memory": text})
    (problem,) = problems_in(refused.value, MemoryPlan)
    assert problem.field == "max_memory"
    assert "8GB" in problem.cure


@pytest.mark.parametrize(
    "wrong",
    [
        {"interval": -1}, {"max_overhead": 0}, {"max_overhead": "200%"}, {"when_late": "hurry"}, {"max_pause": 0}, {"max_memory": 0},
        {"replicas": 2}, {"bandwidth": 0},
    ],
    ids=repr,
)  # fmt: skip
def test_what_cannot_be_is_refused_by_its_field(wrong: dict[str, Any]) -> None:
    """With a cure."""
    with pytest.raises(ValidationError) as refused:
        TrainingJob.model_validate({"name": "a", "script": "b.py", "checkpoint": {"memory": wrong}})
    (problem,) = problems_in(refused.value, TrainingJob)
    assert problem.field == f"checkpoint.memory.{next(iter(wrong))}"
    assert problem.cure


def order(**memory: Any) -> dict[str, Any]:
    """Return the order that prepares a node for a job."""
    spec = TrainingJob.model_validate({"name": "a", "script": "b.py", "checkpoint": {"memory": memory}})
    return prepare_fields(spec, LocalCluster(), Job(name="a", spec={}, cluster={}, directory="/", at=0.0))


@pytest.mark.usefixtures("holdfast_home")
def test_workers_and_nodes_get_the_settings_of_the_job() -> None:
    """A job that takes no snapshots has no memory store made."""
    sent = order(interval=3, when_late="pause", max_pause="50ms", max_memory="1GB")
    names = ("EVERY", "OVERHEAD", "POLICY", "PAUSE")
    assert [sent["environment"][f"HOLDFAST_MEMORY_{name}"] for name in names] == ["3", "0.01", "pause", "0.05"]
    assert sent["memory"] == {"limit": 10**9}
    assert order()["memory"] == {"limit": None}
    assert order(interval=0)["memory"] is None


def test_a_cluster_knows_only_domains_of_its_own_nodes() -> None:
    """A slip of the hand would leave two copies in one rack."""
    cluster = LocalCluster.model_validate({"nodes": 2, "failure_domains": {"node-0": "rack-a"}})
    assert cluster.failure_domains == {"node-0": "rack-a"}
    with pytest.raises(ValidationError) as refused:
        LocalCluster.model_validate({"nodes": 2, "failure_domains": {"node-2": "rack-a"}})
    (problem,) = problems_in(refused.value, LocalCluster)
    assert (problem.field, "node-1" in problem.cure) == ("failure_domains.node-2", True)
