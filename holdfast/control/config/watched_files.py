"""The policy file and the cluster file of a running job, read again when they change.

A thread reads them, as no recovery may wait for a file server that does not answer.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, Generic, TypeVar

from holdfast.errors import BadFile
from holdfast.log import note
from holdfast.policies.recovery.policy import BASE, NAMED, Policy
from holdfast.report.text.policy_text import changes
from holdfast.report.text.wording import duration, moment
from holdfast.spec import Cluster, TrainingJob
from holdfast.spec.cluster_settings import Maintenance
from holdfast.spec.files.load import reread_cluster
from holdfast.spec.job import is_policy_file
from holdfast.spec.policy import load_policy, under_job

log = logging.getLogger("holdfast.control")

INTERVAL: Final = 1.0
"""Seconds between two checks of a file."""
DECISION_WAIT: Final = 0.05
"""Seconds that a decision waits for a check, at most: a local file takes a millisecond."""
LIVE_FIELDS: Final = frozenset({"maintenance", "preemption_notice"})
"""Fields of the cluster file that apply to running jobs; the others stay as the job was submitted with them."""

T = TypeVar("T")


class FileWatcher(Generic[T]):
    """Passes on the content of a file each time it changes, and each problem with it once."""

    def __init__(
        self, file: Path, read: Callable[[Path], T], accept: Callable[[T, bool], None], reject: Callable[[str], None], *, name: str
    ) -> None:
        """*accept* gets the content, and whether the file was unusable before; *reject* gets the problem, in one line."""
        self.file, self._read, self._accept, self._reject = file, read, accept, reject
        self.rejected = ""
        """The problem that was reported last, while the file is unusable."""
        self._mark: tuple[int, ...] = ()
        self._closed, self._wake, self._changed = threading.Event(), threading.Event(), threading.Condition()
        self._begun = self._done = 0
        """Checks that have begun, and those that are done."""
        self._thread = threading.Thread(target=self._follow, name=name, daemon=True)

    def begin(self) -> None:
        """Start to check the file."""
        self._thread.start()

    def close(self) -> None:
        """Check no more."""
        self._closed.set()
        self._wake.set()

    def check_now(self) -> None:
        """Have the file checked before a decision; one that cannot be read within `DECISION_WAIT` changes nothing.

        A check that is under way may have read the file before its last change: the next one counts.
        """
        if self._thread.is_alive():
            with self._changed:
                next_check = self._begun + 1
                self._wake.set()
                self._changed.wait_for(lambda: self._done >= next_check, DECISION_WAIT)

    def _follow(self) -> None:
        doubtful = False
        while not self._closed.is_set():
            self._wake.wait(INTERVAL)
            self._wake.clear()
            with self._changed:
                self._begun += 1
            doubtful = self._check(doubtful=doubtful)
            with self._changed:
                self._done = self._begun
                self._changed.notify_all()

    def _check(self, *, doubtful: bool) -> bool:
        """Read the file if it changed; return True when it is unusable for the first time: somebody may still be writing it."""
        mark = _mark(self.file)
        if mark == self._mark and not doubtful:
            return False
        try:
            value = self._read(self.file)
        except BadFile as error:
            first = not doubtful or mark != self._mark
            self._mark = mark
            if not first and str(error) != self.rejected:
                self.rejected = str(error)
                self._reject(in_one_line(self.rejected))
            return first
        self._mark = mark
        was_rejected, self.rejected = bool(self.rejected), ""
        self._accept(value, was_rejected)
        return False


def in_one_line(problems: str) -> str:
    """Return the text of a `BadFile` in one line."""
    first, *more = problems.splitlines()
    return f"{first}: " + "; ".join(line.strip() for line in more)


def _mark(file: Path) -> tuple[int, ...]:
    """Return what changes with the content of *file*; empty when there is none."""
    try:
        found = os.stat(file)  # noqa: PTH116 (no difference, and no second object)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


class _WatchedFile(Generic[T]):
    """A file's messages for people, which one thread adds and another takes."""

    def __init__(self) -> None:
        self._messages: deque[str] = deque()
        self._watcher: FileWatcher[T] | None = None

    def close(self) -> None:
        """Check the file no more."""
        if self._watcher is not None:
            self._watcher.close()

    def check_now(self) -> None:
        """Have the file checked before a decision."""
        if self._watcher is not None:
            self._watcher.check_now()

    def news(self) -> list[str]:
        """Return the messages since the last call."""
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self._messages.popleft())
        return taken


class WatchedPolicy(_WatchedFile[Policy]):
    """The policy in force, and messages about its changes."""

    def __init__(self, spec: TrainingJob, folder: Path) -> None:
        """Begin with the policy that *spec* names; if its file is unusable, with the copy in *folder* of the last one in force."""
        super().__init__()
        self._spec, self._copy = spec, folder / "policy-in-force.yaml"
        if not is_policy_file(spec.policy):
            self.present = under_job(NAMED[spec.policy], spec)
            return
        self._watcher = FileWatcher(Path(spec.policy), self._read, self._on_accept, self._on_reject, name=f"policy of {spec.name}")
        self.present = self._first(self._watcher)
        self._watcher.begin()

    def _first(self, watcher: FileWatcher[Policy]) -> Policy:
        file = watcher.file
        try:
            return self._read(file)
        except BadFile as error:
            watcher.rejected = str(error)
        problem = f"policy file {in_one_line(watcher.rejected)}"
        with suppress(BadFile):
            before = replace(under_job(load_policy(self._copy), self._spec), name=str(file))
            self._messages.append(f"{problem}. The last policy that was in force is used again")
            return before
        self._messages.append(f"{problem}. Policy '{BASE}' is in force until the file is corrected")
        return replace(under_job(NAMED[BASE], self._spec), name=str(file))

    def _read(self, file: Path) -> Policy:
        """Return the policy in *file*, and keep a copy for later controllers."""
        policy = under_job(load_policy(file), self._spec)
        try:
            self._copy.parent.mkdir(parents=True, exist_ok=True)
            new = self._copy.with_suffix(".new")
            new.write_bytes(file.read_bytes())
            new.replace(self._copy)
        except OSError as error:
            note(log, "policy.not-kept", job=self._spec.name, why=error)
        return policy

    def _on_reject(self, problems: str) -> None:
        self._messages.append(f"policy file {problems}. The policy that was in force before stays in force")

    def _on_accept(self, policy: Policy, was_rejected: bool) -> None:  # noqa: FBT001 (the watcher's signature)
        differences, self.present = changes(self.present, policy), policy
        if differences:
            self._messages.append(f"policy file {policy.name} has changed; from the next decision on: {'; '.join(differences)}")
        elif was_rejected:
            self._messages.append(f"policy file {policy.name} is usable again, and equals the policy in force")


class ClusterFile(_WatchedFile[Cluster]):
    """The cluster as its file describes it now, and messages about its changes: maintenance windows, where notices are read."""

    def __init__(self, cluster: Cluster) -> None:
        """Begin with *cluster*, which stays in force as long as its file is unusable."""
        super().__init__()
        self.present, self._submitted = cluster, cluster
        self._others_reported = False
        if cluster.maintenance_file is not None:
            name = f"plan of {cluster.name}"
            self._watcher = FileWatcher(Path(cluster.maintenance_file), reread_cluster, self._on_accept, self._on_reject, name=name)
            self._watcher.begin()

    def _on_reject(self, problems: str) -> None:
        self._messages.append(f"cluster file {problems}. Its previous `maintenance` and `preemption_notice` stay in force")

    def _on_accept(self, found: Cluster, was_rejected: bool) -> None:  # noqa: FBT001 (the watcher's signature)
        differences, before = [], self.present
        if found.maintenance != before.maintenance:
            new, old = (", ".join(map(_window, plan)) or "none" for plan in (found.maintenance, before.maintenance))
            differences.append(f"maintenance: {new} (was: {old})")
        if found.preemption_notice != before.preemption_notice:
            differences.append("preemption_notice")
        self.present = before.model_copy(update={name: getattr(found, name) for name in LIVE_FIELDS})
        if differences:
            self._messages.append(f"cluster file {before.maintenance_file} has changed; from now on: {'; '.join(differences)}")
        elif was_rejected:
            self._messages.append(f"cluster file {before.maintenance_file} is usable again, and equals the plan in force")
        others = self._other_differences(found)
        if others and not self._others_reported:
            self._others_reported = True
            self._messages.append(
                f"cluster file {before.maintenance_file} also changes {', '.join(others)}: that applies to jobs submitted later"
            )

    def _other_differences(self, found: Cluster) -> list[str]:
        """Return the other fields that differ from what the job was submitted with."""
        if found.kind != self._submitted.kind:
            return ["kind"]
        fields = [name for name in type(found).model_fields if name not in LIVE_FIELDS]
        return [name for name in fields if getattr(found, name) != getattr(self._submitted, name)]


def _window(one: Maintenance) -> str:
    where = ", ".join([*one.nodes, *one.failure_domains]) or "all nodes"
    again = "" if one.interval is None else f", every {duration(one.interval.total_seconds())}"
    return f"{one.reason} of {where} from {moment(one.start.timestamp())} for {duration(one.duration.total_seconds())}{again}"
