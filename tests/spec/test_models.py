"""What a user may write, and that it keeps its meaning on the way to the flow."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from holdfast.spec import LocalCluster, TrainingJob
from holdfast.spec.files.units import format_duration, parse_duration


def parts(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Give *model* and every model that one of its fields is."""
    yield model
    for info in model.model_fields.values():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from parts(info.annotation)


FIELDS = [(part, name) for model in (TrainingJob, LocalCluster) for part in parts(model) for name in part.model_fields]


@pytest.mark.parametrize(("part", "name"), FIELDS, ids=lambda value: value if isinstance(value, str) else value.__name__)
def test_every_field_explains_itself(part: type[BaseModel], name: str) -> None:
    """The Prefect UI shows the description with the field."""
    assert (part.model_fields[name].description or "").endswith(".")


def test_a_form_shows_defaults_that_it_may_send_back() -> None:
    """Every default in the schema is a value that the model accepts, durations as text."""
    timeouts = TrainingJob.model_json_schema()["$defs"]["Timeouts"]["properties"]
    shown = {name: field["default"] for name, field in timeouts.items()}
    assert shown["startup"] == "30m"
    job = TrainingJob.model_validate({"name": "a", "script": "b.py", "timeouts": shown})
    assert job == TrainingJob(name="a", script="b.py")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("5m", 300), ("2h", 7200), ("1d", 86400), ("1h30m", 5400), ("250ms", 0.25), ("1.5 s", 1.5), (0, 0), ("0", 0), (0.0, 0),
     ("1d 2h", 93600)],
)  # fmt: skip
def test_durations_are_parsed(text: object, seconds: float) -> None:
    """Numbers with units; zero needs none."""
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text",
    [
        "soon",
        "",
        "-1s",
        -1,
        7,
        0.25,
        "12",
        "PT30M",
        "5 minutes",
        "5x",
        True,
        None,
        float("nan"),
        float("inf"),
        1e300,
        "1:30",
        "P",
        "PT",
        [],
        "٣s",
    ],
)
def test_an_invalid_duration_is_refused_with_the_cure(text: object) -> None:
    """The message shows how to write one."""
    with pytest.raises(ValidationError) as refused:
        TrainingJob.model_validate({"name": "a", "script": "b", "timeouts": {"lease": text}})
    assert "90s" in refused.value.errors()[0]["ctx"]["cure"]


@given(st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=36500)))
def test_a_duration_survives_being_written(duration: timedelta) -> None:
    """What `format_duration` writes, `parse_duration` reads back to the microsecond."""
    assert parse_duration(format_duration(duration)) == duration


def test_a_job_survives_being_written() -> None:
    """The flow gets the job as JSON and sees the same one."""
    job = TrainingJob.model_validate({"name": "a", "command": ["x"], "nnodes": "2:3", "timeouts": {"hang_min": "250ms"}})
    assert TrainingJob.model_validate(job.model_dump(mode="json")) == job
    assert TrainingJob.model_validate_json(job.model_dump_json()) == job


def test_a_job_that_names_no_least_never_shrinks() -> None:
    """A number is both the minimum and the maximum."""
    for nnodes, least, most in ((3, 3, 3), ("3", 3, 3), ("1:3", 1, 3), (" 02 : 4 ", 2, 4), ("2:2", 2, 2)):
        job = TrainingJob(name="a", script="b", nnodes=nnodes)
        assert (job.min_nodes, job.max_nodes) == (least, most)
        assert TrainingJob.model_validate(job.model_dump(mode="json")) == job


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "Big Model"}, {"name": "a-"}, {"name": "x" * 64}, {"name": ""}, {"nnodes": 0}, {"nnodes": "two"},
        {"nproc_per_node": True}, {"nnodes": "2:1"}, {"checkpoint": {"keep": 1}}, {"checkpoint": {"interval": -1}},
        {"checkpoint": {"interval": "often"}}, {"checkpoint": {"interval": "100"}}, {"checkpoint": {"interval": True}},
        {"checkpoint": {"interval": 1.5}},
        {"checkpoint": {"min_interval": 0}}, {"checkpoint": {"interval": "auto", "min_interval": 9, "max_interval": 8}},
        {"checkpoint": {"max_interval": 9}},
        {"env": {"RANK": "0"}}, {"env": {"HOLDFAST_JOB": "x"}}, {"env": {"A=B": "x"}}, {"env": {"A": "\0"}},
        {"script": None}, {"command": ["x"]}, {"script": None, "command": []}, {"script": ""}, {"policy": "bold"}, {"surprise": 1},
        {"script": None, "command": ["x"], "args": ["y"]}, {"timeouts": {"hang_multiplier": 1}},
        {"timeouts": {"hang_multiplier": float("inf")}},
        {"timeouts": {"lease": 0}}, {"max_recoveries_without_progress": 0}, {"args": "x"}, {"workdir": ""}, {"env": {"A": "\ud800"}},
    ],
    ids=repr,
)  # fmt: skip
def test_what_no_job_can_be_is_refused(wrong: dict[str, Any]) -> None:
    """Each change alone invalidates a valid job."""
    right = {"name": "a", "script": "b.py"}
    TrainingJob.model_validate(right)
    with pytest.raises(ValidationError):
        TrainingJob.model_validate(right | wrong)


@pytest.mark.parametrize(
    ("plan", "first"),
    [({}, 100), ({"interval": 0}, 0), ({"interval": 7}, 7), ({"interval": "auto"}, 100), ({"interval": "auto", "max_interval": 20}, 20),
     ({"interval": "auto", "min_interval": 500}, 500)],
)  # fmt: skip
def test_checkpoints_begin_as_written_or_with_a_hundred_steps_within_the_limits(plan: dict[str, Any], first: int) -> None:
    """`auto` has measured nothing yet."""
    job = TrainingJob.model_validate({"name": "a", "script": "b.py", "checkpoint": plan})
    assert job.checkpoint.first == first
    assert TrainingJob.model_validate_json(job.model_dump_json()) == job


def test_a_value_never_changes() -> None:
    """Whoever holds a job holds what the user wrote."""
    with pytest.raises(ValidationError):
        TrainingJob(name="a", script="b").name = "c"  # type: ignore[misc]
