"""The plan of a running job's cluster, read anew when its file changes: maintenance windows, and where notices are to be seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from holdfast.control.config.file_watcher import FileChange, FileWatcher
from holdfast.report.wording import duration, moment
from holdfast.spec import Cluster
from holdfast.spec.load import reread_cluster
from holdfast.spec.maintenance import Maintenance

ANEW: Final = frozenset({"maintenance", "notice"})
"""Fields that hold for jobs that run already; the others are those that the job was submitted with."""


class ClusterFile:
    """The cluster as its file says now, and news of it."""

    def __init__(self, cluster: Cluster) -> None:
        """Begin with *cluster*, which stays in force as long as its file cannot be used."""
        self.present, self._submitted = cluster, cluster
        self._news = FileChange()
        self._told = False
        self._follower: FileWatcher[Cluster] | None = None
        if cluster.plan is not None:
            file = Path(cluster.plan)
            self._follower = FileWatcher(file, reread_cluster, self._accept, self._refuse, name=f"plan of {cluster.name}")
            self._follower.begin()

    def close(self) -> None:
        """Look no more."""
        if self._follower is not None:
            self._follower.close()

    def news(self) -> list[str]:
        """Return what there is to tell since the last time, in words."""
        return self._news.take()

    def _refuse(self, problems: str) -> None:
        self._news.append(f"cluster file {problems}. Its maintenance and its notice as they were before stay in force")

    def _accept(self, found: Cluster, was_refused: bool) -> None:  # noqa: FBT001 (the follower's word)
        differences, before = [], self.present
        if found.maintenance != before.maintenance:
            differences.append(f"maintenance: {_in_words(found.maintenance)} (was: {_in_words(before.maintenance)})")
        if found.notice != before.notice:
            differences.append("notice")
        self.present = before.model_copy(update={name: getattr(found, name) for name in ANEW})
        if differences:
            self._news.append(f"cluster file {before.plan} has changed, and holds from now on: {'; '.join(differences)}")
        elif was_refused:
            self._news.append(f"cluster file {before.plan} can be used again, and says what is in force already")
        strange = [name for name in self._others(found) if not self._told]
        if strange:
            self._told = True
            self._news.append(f"cluster file {before.plan} also says something else of {', '.join(strange)}: that holds for jobs to come")

    def _others(self, found: Cluster) -> list[str]:
        """Return what else differs from what the job was submitted with."""
        if found.kind != self._submitted.kind:
            return ["kind"]
        return [name for name in type(found).model_fields if name not in ANEW and getattr(found, name) != getattr(self._submitted, name)]


def _in_words(plan: Sequence[Maintenance]) -> str:
    """Return the windows of *plan* as a sentence lists them."""
    return ", ".join(_window(one) for one in plan) or "none"


def _window(one: Maintenance) -> str:
    where = ", ".join([*one.nodes, *one.domains]) or "all nodes"
    again = "" if one.every is None else f", every {duration(one.every.total_seconds())}"
    return f"{one.reason} of {where} from {moment(one.begins.timestamp())} for {duration(one.lasts.total_seconds())}{again}"
