"""What all tests share: a home of their own, time limits, and the promise that nothing is left running."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from holdfast.host import gpu_assignment
from holdfast.testing.orphans import leftovers, memstores
from tests.leftovers import memory
from tests.runtime import ranks
from tests.runtime.flow_double import Workers
from tests.scheduling import pytest_addoption, pytest_configure, pytest_xdist_make_scheduler  # noqa: F401 (hooks: the order of tests)
from tests.shared import run_folder
from tests.skips import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401 (hooks: what may be skipped)
from tests.waiting import wait_until

gc.disable()  # until all tests are collected: a fifth of that, and it finds next to nothing
settings.register_profile("shared machine", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")  # how long an example takes says more of the machine than of the code

INTEGRATION_SECONDS = 300
INTEGRATION = Path(__file__).parent / "integration"


KEPT = ("HOLDFAST_MEMSTORE_ROOT", "HOLDFAST_KERNEL_LOG")
"""Variables that every test has, and what it starts."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in integration/ and give it more time, unless the test names its own."""
    for item in items:
        if item.path.is_relative_to(INTEGRATION):
            item.add_marker(pytest.mark.integration)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(INTEGRATION_SECONDS))


def pytest_collection_finish() -> None:
    """Collect garbage again, but for what stays to the end: modules and tests."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def nothing_left_in_memory() -> Iterator[Path]:
    """Have all memory stores made in a folder of this run; fail the run when one outlives all tests."""
    place = memory()
    os.environ["HOLDFAST_MEMSTORE_ROOT"] = str(place)
    os.environ["HOLDFAST_KERNEL_LOG"] = os.devnull  # the machine's own has what other tests and strangers do to it
    yield place
    left = memstores(place)
    shutil.rmtree(place)
    for name in KEPT:
        del os.environ[name]
    assert not left, "Left in memory:\n" + "\n".join(left)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_running(tmp_path_factory: pytest.TempPathFactory, nothing_left_in_memory: Path) -> Iterator[None]:
    """Fail the run when a process that a test started outlives all tests."""
    yield
    base = tmp_path_factory.getbasetemp()
    wait_until(lambda: not leftovers(base), seconds=60, explain=lambda: "Left running:\n" + "\n".join(leftovers(base)))


@pytest.fixture(scope="session")
def torch_imported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give the socket of a process that has imported what ranks need, once for all workers: three seconds and a half of a core."""
    with ranks.torch_imported(run_folder(tmp_path_factory) / "torch") as server:
        yield server


@pytest.fixture(scope="session")
def workers(torch_imported: Path) -> Iterator[Workers]:
    """Give a process that forks workers of managed groups with torch already imported."""
    server = Workers(torch_imported)
    yield server
    server.close()


@pytest.fixture(scope="session", autouse=True)
def _no_signal_ignored() -> Iterator[None]:
    """Take back what `nohup` and a shell's `&` have their command ignore: what a test starts ends by it, as for anybody else."""
    ignored = [number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT) if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="session", autouse=True)
def _no_terminal_around() -> Iterator[None]:
    """Take away the caller's size of a terminal, which overrules that of a test's own: readline exports it to what pytest-xdist starts."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("COLUMNS", "LINES"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_cluster_around() -> Iterator[None]:
    """Take away the name of the Kubernetes node that the tests run on: its conditions would be those of their nodes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NODE_NAME", raising=False)
        yield


@pytest.fixture(autouse=True)
def _no_gpus_to_share_out(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Show GPUs to nothing but the tests that are for them: jobs of many local nodes are refused where there are few."""
    if gpu_assignment.visible_gpus() and request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv(gpu_assignment.VISIBLE, "")


@pytest.fixture
def holdfast_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give Holdfast a fresh home with a short path, and take away what the caller's shell says about Holdfast and Prefect."""
    for name in [name for name in os.environ if name.startswith(("HOLDFAST_", "PREFECT_")) and name not in KEPT]:
        monkeypatch.delenv(name)
    home = tmp_path_factory.mktemp("h")
    monkeypatch.setenv("HOLDFAST_HOME", str(home))
    return home
