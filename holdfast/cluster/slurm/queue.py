"""Which of the jobs in Slurm's queue are allocations of ours."""

from __future__ import annotations

from typing import Final

from holdfast.cluster.slurm.allocation_request import MARK, label_of
from holdfast.cluster.slurm.commands import asked
from holdfast.cluster.slurm.parsing import FORMAT, Allocation, allocations
from holdfast.cluster.slurm.transport import user
from holdfast.errors import SlurmRefused

LOOK: Final = ("squeue", "--noheader", f"--format={FORMAT}")


def in_queue(job: str, name: str, outer: str | None) -> list[Allocation]:
    """Return the allocations of a job (its id, and what it is called), or all of this user's; and that numbered *outer*."""
    named = [f"--name={label_of(name)}"] if name else []
    found = [one for one in allocations(asked(*LOOK, f"--user={user()}", *named)) if _is_of(job, one)]
    if outer is not None:
        found += [one for one in allocations(_told_of(outer)) if one.id == outer]
    return found


def _is_of(job: str, one: Allocation) -> bool:
    return one.comment == f"{MARK}{job}" if job else one.comment.startswith(MARK)


def _told_of(outer: str) -> str:
    try:
        return asked(*LOOK, f"--jobs={outer}")
    except SlurmRefused:  # it is over
        return ""
