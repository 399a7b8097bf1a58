"""The policy of a running job, read anew when its file changes."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from holdfast.control.config.file_watcher import FileChange, FileWatcher, in_a_line
from holdfast.errors import BadFile
from holdfast.log import note
from holdfast.report.policy_text import changes
from holdfast.spec import TrainingJob
from holdfast.spec.job import is_policy_file
from holdfast.spec.load_policy import load_policy, under_job
from policies.policy import BASE, NAMED, Policy

log = logging.getLogger("holdfast.control")


class WatchedPolicy:
    """The policy in force, and news of it."""

    def __init__(self, spec: TrainingJob, folder: Path) -> None:
        """Begin with what *spec* names; where its file cannot be used, with what was in force last, of which *folder* keeps a copy."""
        self._spec, self._kept = spec, folder / "policy-in-force.yaml"
        self._news = FileChange()
        self._follower: FileWatcher[Policy] | None = None
        if not is_policy_file(spec.policy):
            self.present = under_job(NAMED[spec.policy], spec)
            return
        self._follower = FileWatcher(Path(spec.policy), self._read, self._accept, self._refuse, name=f"policy of {spec.name}")
        self.present = self._first(self._follower)
        self._follower.begin()

    def close(self) -> None:
        """Look no more."""
        if self._follower is not None:
            self._follower.close()

    def news(self) -> list[str]:
        """Return what there is to tell since the last time, in words."""
        return self._news.take()

    def check_now(self) -> None:
        """Have the file looked at before a decision; one that cannot be read within a moment changes nothing."""
        if self._follower is not None:
            self._follower.check_now()

    def _first(self, follower: FileWatcher[Policy]) -> Policy:
        file = follower.file
        try:
            return self._read(file)
        except BadFile as error:
            follower.refused = str(error)
        said = f"policy file {in_a_line(follower.refused)}"
        with suppress(BadFile):
            before = replace(under_job(load_policy(self._kept), self._spec), name=str(file))
            self._news.append(f"{said}. What was in force before stays in force")
            return before
        self._news.append(f"{said}. Policy '{BASE}' is in force until it is mended")
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

    def _refuse(self, problems: str) -> None:
        self._news.append(f"policy file {problems}. The policy as it was before stays in force")

    def _accept(self, policy: Policy, was_refused: bool) -> None:  # noqa: FBT001 (the follower's word)
        differences, self.present = changes(self.present, policy), policy
        if differences:
            self._news.append(f"policy file {policy.name} has changed, and holds from the next decision on: {'; '.join(differences)}")
        elif was_refused:
            self._news.append(f"policy file {policy.name} can be used again, and says what is in force already")
