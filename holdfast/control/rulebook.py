"""The policy of a running job, read anew when its file changes: by a thread, as no recovery may wait for a file server that is away."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from holdfast.errors import BadFile
from holdfast.log import note
from holdfast.report.policy_words import changes
from holdfast.spec import TrainingJob
from holdfast.spec.job import is_policy_file
from holdfast.spec.load_policy import load_policy, under_job
from policies.policy import BASE, NAMED, Policy

log = logging.getLogger("holdfast.control")

EVERY: Final = 1.0
"""Seconds between two looks at the file."""
MOMENT: Final = 0.05
"""Seconds that a decision waits for a look at most: a local file takes a millisecond."""


class Rulebook:
    """The policy in force, and news of it."""

    def __init__(self, spec: TrainingJob, folder: Path) -> None:
        """Begin with what *spec* names; where its file cannot be used, with what was in force last, of which *folder* keeps a copy."""
        self._spec, self._kept = spec, folder / "policy-in-force.yaml"
        self._news: deque[str] = deque()
        self._seen: tuple[int, ...] = ()
        self._refused = ""
        """What was told of a file that cannot be used."""
        self._file = Path(spec.policy) if is_policy_file(spec.policy) else None
        self.present = under_job(NAMED[spec.policy], spec) if self._file is None else self._first(self._file)
        self._over, self._kick, self._looked = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"policy of {spec.name}", daemon=True)
        if self._file is not None:
            self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        self._kick.set()

    def news(self) -> list[str]:
        """Return what there is to tell since the last time, in words."""
        told = []
        with suppress(IndexError):
            while True:
                told.append(self._news.popleft())
        return told

    def look_now(self) -> None:
        """Have the file looked at before a decision; one that cannot be read within a moment changes nothing."""
        if self._file is not None and self._thread.is_alive():
            self._looked.clear()
            self._kick.set()
            self._looked.wait(MOMENT)

    def _first(self, file: Path) -> Policy:
        try:
            return self._read(file)
        except BadFile as error:
            self._refused = str(error)
        with suppress(BadFile):
            before = replace(under_job(load_policy(self._kept), self._spec), name=str(file))
            self._news.append(f"{_in_a_line(self._refused)}. What was in force before stays in force")
            return before
        self._news.append(f"{_in_a_line(self._refused)}. Policy '{BASE}' is in force until it is mended")
        return replace(under_job(NAMED[BASE], self._spec), name=str(file))

    def _read(self, file: Path) -> Policy:
        """Return what *file* says now, and keep a copy for flows to come."""
        policy = under_job(load_policy(file), self._spec)
        try:
            self._kept.parent.mkdir(parents=True, exist_ok=True)
            beside = self._kept.with_suffix(".new")
            beside.write_bytes(file.read_bytes())
            beside.replace(self._kept)
        except OSError as error:
            note(log, "policy.not-kept", job=self._spec.name, why=error)
        return policy

    def _follow(self) -> None:
        doubtful = False
        while not self._over.is_set():
            self._kick.wait(EVERY)
            self._kick.clear()
            doubtful = self._look(doubtful=doubtful)
            self._looked.set()

    def _look(self, *, doubtful: bool) -> bool:
        """Take what the file says now; tell whether it cannot be used, for the first time: perhaps somebody is still writing it."""
        assert self._file is not None
        mark = _mark(self._file)
        if mark == self._seen and not doubtful:
            return False
        try:
            policy = self._read(self._file)
        except BadFile as error:
            first = not doubtful or mark != self._seen
            self._seen = mark
            if not first and str(error) != self._refused:
                self._refused = str(error)
                self._news.append(f"{_in_a_line(self._refused)}. The policy as it was before stays in force")
            return first
        self._seen = mark
        self._accept(policy)
        return False

    def _accept(self, policy: Policy) -> None:
        differences, was_refused = changes(self.present, policy), bool(self._refused)
        self._refused, self.present = "", policy
        if differences:
            self._news.append(f"policy file {policy.name} has changed, and holds from the next decision on: {'; '.join(differences)}")
        elif was_refused:
            self._news.append(f"policy file {policy.name} can be used again, and says what is in force already")


def _mark(file: Path) -> tuple[int, ...]:
    """Return what changes with the content of *file*; nothing where there is none."""
    try:
        found = os.stat(file)  # noqa: PTH116 (no difference, and no second object)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _in_a_line(problems: str) -> str:
    first, *more = problems.splitlines()
    return f"policy file {first}: " + "; ".join(line.strip() for line in more)
