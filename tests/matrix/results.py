"""The stored results: which tests passed with which torch, by what they prove."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from packaging.version import Version

from holdfast.torch_versions import FIRST, LAST

FILE: Final = Path(__file__).with_name("results.jsonl")

VERSIONS: Final = tuple(f"{FIRST[0]}.{minor}" for minor in range(FIRST[1], LAST[1] + 1))
"""The versions of torch that are supported; of each the newest patch release is taken."""

UNCHANGED, STATE, GROUPS, FRAMEWORKS = "unchanged scripts", "managed state", "managed groups", "frameworks"
LEVELS: Final = (UNCHANGED, STATE, GROUPS, FRAMEWORKS)
"""What a user relies on; each test proves one of them."""

INTEGRATION: Final[Mapping[str, str]] = {
    "test_early_launch.py": UNCHANGED,
    "test_faults.py": UNCHANGED,
    "test_memory_recovery.py": STATE,
    "test_first_exchanges.py": GROUPS,
    "test_groups_option.py": GROUPS,
    "test_takeover_flow.py": GROUPS,
    "test_lightning.py": FRAMEWORKS,
}
"""The tests of tests/integration that run with each version, and what they prove."""

RUNTIME: Final[Mapping[str, str]] = {
    **dict.fromkeys(("test_heartbeat.py", "test_init.py", "test_peer_loss.py", "test_script_scan.py"), UNCHANGED),
    **dict.fromkeys(("test_examples.py", "test_threads.py", "test_world.py"), UNCHANGED),
    **dict.fromkeys(("test_elastic.py", "test_rank_status.py", "test_replaced_init.py", "test_successor.py"), GROUPS),
    **dict.fromkeys(("test_accelerate.py", "test_huggingface.py", "test_lightning.py"), FRAMEWORKS),
}
"""What tests of tests/runtime prove; those named ``test_groups_*`` are of managed groups, all others of managed state."""


def level_of(file: str) -> str:
    """Return what the tests in *file*, a path below tests/, prove."""
    folder, _, name = file.rpartition("/")
    if folder.endswith("integration"):
        return INTEGRATION[name]
    return RUNTIME.get(name) or (GROUPS if name.startswith("test_groups_") else STATE)


@dataclass(slots=True)
class Level:
    """How the tests of one level ended."""

    passed: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    """Why each failed, by its name."""
    repeated: list[str] = field(default_factory=list)
    """Those among the passed ones that passed only when they were run again, alone."""

    @property
    def passes(self) -> bool:
        """Whether the level can be relied on: a level without a test that passed cannot."""
        return self.passed > 0 and not self.failed


@dataclass(slots=True)
class Result:
    """A run of the tests with one version of torch."""

    torch: str
    python: str
    levels: dict[str, Level]

    @classmethod
    def of(cls, line: str) -> Result:
        """Return the result in a *line* of JSON. Raise ``ValueError``, ``KeyError`` or ``TypeError`` when it is none."""
        found = json.loads(line)
        return cls(found["torch"], found["python"], {name: Level(**one) for name, one in found["levels"].items()})

    def line(self) -> str:
        """Return it as a line of JSON."""
        return json.dumps(asdict(self))

    @property
    def key(self) -> tuple[str, str]:
        """Return what another run of the same kind replaces: torch and Python without their patch releases."""
        return _minor(self.torch), _minor(self.python)


def read(path: Path = FILE) -> list[Result]:
    """Return the stored results, the newest torch first; none where there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return sorted((Result.of(line) for line in lines), key=lambda one: (Version(one.torch), Version(one.python)), reverse=True)


def store(result: Result, path: Path = FILE) -> None:
    """Store *result* in place of an earlier one for these versions."""
    kept = [one for one in read(path) if one.key != result.key]
    path.write_text("".join(f"{line}\n" for line in sorted(one.line() for one in (*kept, result))))


def missing(results: Iterable[Result]) -> list[str]:
    """Return the supported versions of torch that no result is for."""
    run = {one.key[0] for one in results}
    return [version for version in VERSIONS if version not in run]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
