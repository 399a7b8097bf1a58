"""Real ranks, and an agent that writes down what workers say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.agent_double import AgentDouble
from tests.runtime.flow_double import UNTIL, Ended, FlowDouble, Job, Workers, undisturbed
from tests.runtime.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(torch_imported: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Give a process that forks ranks with torch already imported."""
    server = Ranks(torch_imported, tmp_path_factory.mktemp("ranks"))
    yield server
    server.close()


@pytest.fixture
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentDouble]:
    """Give an agent's end of the worker protocol, on a real unix socket."""
    double = AgentDouble(tmp_path_factory.mktemp("a") / "s")
    yield double
    double.close()


@pytest.fixture(autouse=True)
def _no_agent_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what the caller's shell says about Holdfast and ranks away from the sessions in this process."""
    for name in ("SOCKET", "CHECKPOINT_DIR", "SAVE_EVERY", "KEEP", "GENERATION"):
        monkeypatch.delenv(f"HOLDFAST_{name}", raising=False)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def undisturbed_run(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Give one run of copies, all ranks the same model, that nothing disturbs."""
    return undisturbed(FlowDouble(workers, tmp_path_factory.mktemp("f"), "copies", UNTIL))


@pytest.fixture
def job(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Give what makes a job."""
    made: list[FlowDouble] = []

    def make(*arguments: object, script: str = "copies", **more: Any) -> FlowDouble:
        made.append(FlowDouble(workers, tmp_path_factory.mktemp("f"), script, UNTIL, *arguments, **more))
        return made[-1].begin()

    yield make
    for flow in made:
        flow.close()
