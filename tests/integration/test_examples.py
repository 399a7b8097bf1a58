"""Each example runs clean: neither a long evaluation nor a long save that it never declared is a fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.history import queries
from tests.integration.stage import Stage

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = Path(__file__).with_name("with_pauses.py")
FILES = sorted(path for path in EXAMPLES.glob("*.yaml") if "script:" in path.read_text())
STEPS = ["--steps", "24"]
SMALL = [*STEPS, "--width", "16", "--layers", "2", "--context", "16"]
ARGS = {
    "plain_ddp": STEPS,
    **dict.fromkeys(("fsdp2", "byte_gpt", "pipeline_data", "elastic"), SMALL),
    "accelerate_loop": ["--epochs", "1"],
    "accumulate": STEPS,
    "hugging_face": ["--epochs", "3", "--sequences", "320"],
}
"""Of each example, so that it makes 24 steps or somewhat more."""


def described(path: Path, workdir: Path) -> dict[str, Any]:
    """Return the job of an example on two ranks in *workdir*, with pauses."""
    job: dict[str, Any] = yaml.safe_load(path.read_text())
    del job["cluster"], job["name"]
    args = [str(EXAMPLES / job["script"]), *ARGS[path.stem]]
    return job | {"script": str(SCRIPT), "args": args, "workdir": str(workdir), "nnodes": 2, "nproc_per_node": 1}


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_an_example_with_long_pauses_reports_no_fault(stage: Stage, path: Path, tmp_path: Path) -> None:
    """Many median steps on one rank, then on all: a job that reports its steps says so in its history, and nothing is done about it."""
    name = path.stem.replace("_", "-")
    play = stage.play(name, **described(path, tmp_path))
    assert play.ends() == 0, play.log()
    assert (play.state(), play.kinds()) == ("COMPLETED", []), play.log()
    for words in ("rank 0 pauses after 12 steps", "rank 0 pauses after 18 steps", "rank 1 pauses after 18 steps"):
        assert words in play.log()
    assert len(queries.generations(stage.history, play.job.id)) == 1
    assert [fault.kind for fault in queries.faults(stage.history, play.job.id) if "hang" in fault.kind or fault.rank is not None] == []
    reported = [one.text for one in queries.job_events(stage.history, play.job.id) if one.text.startswith("no rank made progress for ")]
    assert bool(reported) == (name != "plain-ddp"), reported
