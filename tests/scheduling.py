"""Which worker of pytest-xdist runs what, and when: the longest files first, so that no worker is left alone with one at the end.

A file stays together on one worker where its tests share a fixture that is made once for all of them; any other file that takes long goes
test by test. How long a file takes stands in `durations.json`, which ``pytest --record-durations`` writes anew.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Final

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

ROOT: Final = Path(__file__).parents[1]
STORED: Final = Path(__file__).with_name("durations.json")
SPLIT_SECONDS: Final = 10.0
"""A file that takes longer goes test by test, unless its tests share a fixture."""
SHARED: Final = ('scope="module"', 'scope="class"')


def durations() -> dict[str, float]:
    """Return the seconds that each file takes, as recorded; a file that is not there is a new one, or takes less than a second."""
    return {file: float(seconds) for file, seconds in json.loads(STORED.read_text()).items()}


class LongestFirst(LoadScopeScheduling):  # type: ignore[misc]
    """Hands out files, or the tests of a long file one by one, in the order of how long the file takes."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        self.workqueue = Queue(durations())
        self._seconds = durations()
        self._together: dict[str, bool] = {}

    def _split_scope(self, nodeid: str) -> str:
        file = file_of(nodeid)
        if file not in self._together:
            self._together[file] = self._seconds.get(file, 0.0) <= SPLIT_SECONDS or shares(ROOT / file)
        return file if self._together[file] else nodeid


class Queue(OrderedDict[str, dict[str, bool]]):
    """Units of work by name; the one that is taken first is of the file that takes longest."""

    def __init__(self, seconds: dict[str, float]) -> None:
        super().__init__()
        self._seconds = seconds

    def popitem(self, last: bool = True) -> tuple[str, dict[str, bool]]:  # noqa: FBT001, FBT002 (as the base has it)
        """Take the unit of the longest file; of several, the one that was put in first."""
        unit = max(self, key=lambda name: self._seconds.get(file_of(name), 0.0))
        return unit, self.pop(unit)


def file_of(nodeid: str) -> str:
    """Return the file of a test."""
    return nodeid.partition("::")[0]


def shares(file: Path) -> bool:
    """Return whether the tests in *file* share a fixture that is made once for all of them."""
    return any(words in file.read_text() for words in SHARED)


@pytest.hookimpl(optionalhook=True)  # with `-p no:xdist` nobody declares it
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LongestFirst | None:
    """Take the place of xdist's own scheduler, unless the command line names one with ``--dist``."""
    return LongestFirst(config, log) if config.getoption("dist") == "load" else None


class Recorder:
    """Adds up how long the tests of each file take, and writes that down at the end."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of a test."""
        self._seconds[file_of(report.nodeid)] += report.duration  # type: ignore[assignment]

    def pytest_sessionfinish(self) -> None:
        """Write what was measured over what was known of the same files; forget files that are gone."""
        known = durations() | self._seconds
        kept = {file: round(seconds) for file, seconds in sorted(known.items()) if seconds >= 1 and (ROOT / file).exists()}
        STORED.write_text(json.dumps(kept, indent=1) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that records durations."""
    parser.addoption("--record-durations", action="store_true", help="write down how long each file takes, for the order of the next runs")


def pytest_configure(config: pytest.Config) -> None:
    """Record durations where all reports come together, if asked to."""
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())
