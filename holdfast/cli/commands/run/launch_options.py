"""The job that the command line of `holdfast run` and `holdfast init` describes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import click
from pydantic import ValidationError

from holdfast.cli.output import hint
from holdfast.cli.parser.launch import is_job_file
from holdfast.errors import BadFile, BadParameters, Problem
from holdfast.history.models import Job
from holdfast.plurals import plural
from holdfast.spec import Cluster, LocalCluster, TrainingJob
from holdfast.spec.files.load import draft_of
from holdfast.spec.files.problems import shown
from holdfast.spec.launch_options import LaunchOptions, Program, change, review_options, separate_values
from holdfast.spec.nproc import counted

OWN: Final = frozenset(
    {"--cluster", "--detach", "--log-ranks", "--nnodes", "--nproc-per-node", "--nproc_per_node", "--spare-nodes", "--hot-spares"}
)
"""Options that a script hardly has: among its arguments they are meant for Holdfast."""
OF_A_SCRIPT: Final[Mapping[str, str]] = {"module": "--module", "no_python": "--no-python", "standalone": "--standalone"}
"""Options that say how a script is run, and mean nothing with a job file."""


def options_of(target: str, given: Mapping[str, Any]) -> LaunchOptions:
    """Return what the command line says about the job."""
    program: Program = "module" if given["module"] else "command" if given["no_python"] else "script"
    if given["module"] and given["no_python"]:
        raise click.UsageError("--module and --no-python contradict each other: give one of them.")
    named = {one.name: given[one.name] for one in fields(LaunchOptions) if one.name in given}
    return LaunchOptions(**{**named, "program": program, "target": target})


def launched(target: str, cluster_file: Path | None, default_cluster: Path | None, given: Mapping[str, Any]) -> tuple[TrainingJob, Cluster]:
    """Return the job and the cluster that the command line describes; raise `BadFile` or `BadParameters` with all problems.

    The *default_cluster* stands in where nothing else names a cluster.
    """
    options = options_of(target, given)
    if options.standalone and cluster_file is not None:
        raise click.UsageError("--standalone and --cluster contradict each other: give one of them.")
    if options.program == "script" and is_job_file(target):
        _refuse_with_a_file(target, options, given)
        draft = change(draft_of(target, cluster_file, default_cluster), options)
        if draft.problems or draft.job is None:
            raise BadFile(shown(target), tuple(draft.problems))
    else:
        draft = review_options(options, cluster_file or (None if options.standalone else default_cluster))
        if draft.problems or draft.job is None:
            raise BadParameters(tuple(draft.problems))
        warn_of_misplaced(options)
    warn_of_joined_arguments(draft.job)
    cluster = draft.cluster or LocalCluster()
    return counted(draft.job, cluster), cluster


def warn_of_misplaced(options: LaunchOptions) -> None:
    """Say so if the script gets what looks like an option of ours."""
    if misplaced := sorted(OWN.intersection(options.arguments)):
        hint(f"{misplaced[0]} follows the script, so the script gets it. Options of `holdfast` stand before the script")


def warn_of_joined_arguments(job: TrainingJob) -> None:
    """Warn if an argument of the script holds an option and its value: argparse would take both for the option's name."""
    field, arguments = ("command", job.command[1:]) if job.command else ("args", job.args)
    for one in separate_values(arguments):
        option, value = one.split(maxsplit=1)
        said = json.dumps([shown(option), shown(value)])
        hint(f"{field}: '{shown(one)}' is one argument, with a space in it. If it is an option and its value, write two: {said}")


def _refuse_with_a_file(target: str, options: LaunchOptions, given: Mapping[str, Any]) -> None:
    """Refuse what only a script can have."""
    if options.arguments:
        raise click.UsageError(
            f"'{shown(target)}' is a job file, and takes no arguments such as '{options.arguments[0][:80]}'. Write them in its `args`."
        )
    used = next((name for key, name in OF_A_SCRIPT.items() if given[key]), None)
    if used is not None:
        raise click.UsageError(f"{used} is for a script, and '{shown(target)}' is a job file. Leave it out.")


def refuse_other_program(job: TrainingJob, earlier: Job | None) -> None:
    """Refuse *job*, which is named after its script, if an *earlier* job of that name ran another one: their checkpoints would mix."""
    if earlier is None:
        return
    try:
        before = TrainingJob.model_validate(earlier.spec)
    except ValidationError:  # of another version
        return
    if (ran := _program(before)) != _program(job):
        reason = f"'{job.name}' is the name of an earlier job, which ran {ran}"
        raise BadParameters((Problem(field="--name", reason=reason, cure=f"Name this one, e.g. `--name {job.name[:60]}-2`"),))


def _program(job: TrainingJob) -> str:
    """Return what *job* runs, without its arguments."""
    if job.script is not None:
        return str(job.inside(job.script))
    return f"-m {job.module}" if job.module is not None else str((job.command or [""])[0])


def shown_ranks(given: Mapping[str, Any], job: TrainingJob) -> str | None:
    """Return the ranks whose output is shown, as `--log-ranks` names them, by that option or by one of torchrun's; None: none was given."""
    local = {name: given[key] for key, name in (("tee", "--tee"), ("local_ranks_filter", "--local-ranks-filter")) if given[key] is not None}
    log_ranks: str | None = given["log_ranks"]
    if len(local) + (log_ranks is not None) > 1 or not local:
        if local:
            raise click.UsageError(
                f"{' and '.join([*local, *(['--log-ranks'] if log_ranks is not None else [])])} contradict each other: give one of them."
            )
        return log_ranks
    (option, text), *_ = local.items()
    if option == "--tee" and text in {"0", "1", "2", "3"}:
        return "none" if text == "0" else "all"
    if not isinstance(job.nproc_per_node, int):
        raise click.UsageError(f"{option} needs the number of ranks on each node, which is counted at launch. Use --log-ranks.")
    wanted = set[int]()
    for part in text.split(","):
        rank, colon, stream = part.strip().partition(":")
        is_of_option = bool(colon) == (option == "--tee") and (not colon or stream in {"0", "1", "2", "3"})
        if not rank.isdecimal() or not is_of_option or int(rank) >= job.nproc_per_node:
            example = "`3`, or `0:3,1:3` for local ranks" if option == "--tee" else "`0,1`"
            raise click.UsageError(
                f"{option} does not accept '{text[:80]}' with {plural(job.nproc_per_node, 'rank')} on each node. Write {example}."
            )
        if stream != "0":
            wanted.add(int(rank))
    every = [str(node * job.nproc_per_node + rank) for node in range(job.max_nodes) for rank in sorted(wanted)]
    return ",".join(every) or "none"
