"""`holdfast init`: write a commented job file for a script."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from holdfast.cli.commands.run.launch_options import options_of, warn_of_joined_arguments, warn_of_misplaced
from holdfast.cli.output import echo, echo_json
from holdfast.cli.parser.launch import is_job_file
from holdfast.errors import BadParameters, NotWritable
from holdfast.spec.json_schemas import FOLDER
from holdfast.spec.launch_options import commented_text, review_options


def init(target: str, *, output: Path | None, force: bool, as_json: bool, **given: Any) -> int:  # noqa: ANN401 (options of the command)
    """Write the job file of the script *target* and the options *given* to *output*."""
    if is_job_file(target) and not (given["module"] or given["no_python"]):
        raise click.UsageError(f"'{target}' is a job file already. Name the training script.")
    options = options_of(target, given)
    draft = review_options(options, None)
    if draft.problems:
        raise BadParameters(tuple(draft.problems), "no job file was written")
    warn_of_misplaced(options)
    assert draft.job is not None
    warn_of_joined_arguments(draft.job)
    file = output or Path(f"{draft.job.name}.yaml" if options.program != "script" else f"{Path(target).stem}.yaml")
    _write(file, commented_text(options, FOLDER / "job.json"), force=force)
    if as_json:
        echo_json({"file": str(file), "name": draft.job.name})
    else:
        echo(f"{file} written. Run it: holdfast run {file}")
    return 0


def _write(file: Path, text: str, *, force: bool) -> None:
    """Write a new file; with *force* replace one that exists."""
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL)
    try:
        with os.fdopen(os.open(file, flags, 0o666), "w", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        raise click.UsageError(f"'{file}' exists. Replace it with --force, or name another file with -o.") from None
    except OSError as error:
        raise NotWritable("the job file", str(file), error.strerror or str(error)) from error
