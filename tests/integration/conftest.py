"""Real servers, each started once for all integration tests, on free ports and in folders of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.host.gpu_assignment import VISIBLE, visible_gpus
from holdfast.host.ports import free_port
from tests.imported import imported
from tests.integration.flow_server import IMPORTS, Flows
from tests.integration.stage import Stage
from tests.runtime.flow_double import Workers
from tests.shared import locked, run_folder, shared_server
from tests.waiting import wait_until

START_SECONDS = 90
"""Prefect migrates a fresh database first: 5 s on a quiet machine, many times that on a busy one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefectServer:
    """A Prefect server of our own."""

    url: str
    """Of the API."""
    environment: dict[str, str]
    """For processes that talk to it; their Holdfast home lies in the tests' folder too."""

    @property
    def home(self) -> Path:
        """Return the Holdfast home of the processes that use `environment`."""
        return Path(self.environment["HOLDFAST_HOME"])


def answers(url: str) -> bool:
    """Say whether the API at *url* is up."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:  # noqa: S310 (our own http address)
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="session")
def prefect_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give an empty database of Prefect's: migrated once for all workers, as that is ten seconds of a processor."""
    place = run_folder(tmp_path_factory) / "prefect-template"
    place.mkdir(exist_ok=True)
    with locked(place / "lock"):
        if not (place / "made").exists():
            bare = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
            command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]
            subprocess.run(command, env={**bare, "PREFECT_HOME": str(place)}, check=True, capture_output=True)
            (place / "made").touch()
    return place / "prefect.db"


@contextmanager
def prefect_server_in(place: Path, places: pytest.TempPathFactory, database: Path) -> Iterator[PrefectServer]:
    """Have a Prefect server with its files in *place*; all who name the same place share it."""
    place.mkdir(exist_ok=True)
    with locked(place / "made"):
        if not (place / "port").exists():
            shutil.copy(database, place)
            (place / "port").write_text(str(free_port()))
    port = (place / "port").read_text()
    url = f"http://127.0.0.1:{port}/api"
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "HOLDFAST_"))}
    own = bare | {
        "PREFECT_HOME": str(place),
        "PREFECT_API_URL": url,
        "PREFECT_CLI_COLORS": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        **({VISIBLE: ""} if visible_gpus() else {}),  # as `_no_gpus_to_share_out`, for what is started once for all
    }
    environment = own | {
        "HOLDFAST_MEMSTORE_ROOT": os.environ["HOLDFAST_MEMSTORE_ROOT"],
        "HOLDFAST_KERNEL_LOG": os.environ["HOLDFAST_KERNEL_LOG"],
        "HOLDFAST_HOME": str(places.mktemp("h")),
    }
    command = [sys.executable, "-m", "holdfast.prefect.serve", "--host", "127.0.0.1", "--port", port]
    with shared_server(place, command, own, lambda: answers(url), START_SECONDS):
        yield PrefectServer(url=url, environment=environment)


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory, prefect_database: Path) -> Iterator[PrefectServer]:
    """Have one Prefect server for all workers: what a test asks of it names the test's own jobs, clusters and deployments."""
    with prefect_server_in(run_folder(tmp_path_factory) / "prefect", tmp_path_factory, prefect_database) as server:
        yield server


@contextmanager
def flows_in(place: Path, server: PrefectServer) -> Iterator[Flows]:
    """Give what starts flows that talk to *server*; all who name the same place share what takes them long to import."""
    with imported(place, server.environment, *IMPORTS) as ready:
        flows = Flows(ready, server.environment)
        yield flows
        flows.close()


@pytest.fixture(scope="session")
def flows(prefect_server: PrefectServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flows]:
    """Give what starts flows that talk to the Prefect server."""
    with flows_in(run_folder(tmp_path_factory) / "flows", prefect_server) as flows:
        yield flows


@pytest.fixture
def stage(prefect_server: PrefectServer, flows: Flows, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Give an empty stage, and see to it that a job that has ended left nothing running."""
    home = tmp_path_factory.mktemp("s")
    stage = Stage(home, prefect_server.environment | {"HOLDFAST_HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[2])}, flows)
    yield stage
    left = [*stage.left(), *stage.kept()] if all(play.process.poll() is not None for play in stage.plays) else []
    stage.close()
    assert not left


@pytest.fixture(scope="session")
def alone(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Give what runs a script and its arguments on two ranks, or on more, to their end, with neither flow nor agent around them."""

    def run(*argv: object, ranks: int = 2) -> None:
        folder, size = tmp_path_factory.mktemp("a"), str(ranks)
        world = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        words, places = [str(one) for one in argv], map(str, range(ranks))
        pids = {workers.fork(words, {**world, "RANK": rank, "LOCAL_RANK": rank}, folder / f"rank-{rank}.log") for rank in places}
        ended: dict[int, int] = {}

        def over() -> bool:
            ended.update(workers.ended())
            return ended.keys() >= pids

        wait_until(over, seconds=200)
        assert {ended[pid] for pid in pids} == {0}, [path.read_text() for path in folder.glob("*.log")]

    return run
