"""Slurm's own commands, each with a deadline. Every word is an item of its own: no shell reads any."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Final

from holdfast.errors import NoSlurm, SlurmRefused, SlurmUnavailable
from holdfast.own_variables import without_added
from holdfast.redaction import is_secret

SECONDS: Final = 20.0
"""How long a command may take: a controller that is busy answers after seconds."""

PASSING: Final = re.compile(
    r"unable to contact|socket timed out|temporarily unable|connection (refused|reset|timed out)|communication|zero bytes|"
    r"try again|backup controller|job violates accounting/qos policy|qosmax|assocgrp|protocol authentication|address already in use",
    re.IGNORECASE,
)
"""What Slurm's commands say of troubles that pass by themselves: a controller that is away, a limit that is reached now."""
PLACE: Final = ("SLURM_", "SLURMD_", "PREFECT_", "SSH_", "HOLDFAST_HISTORY", "HOLDFAST_PREFECT_")
"""Beginnings of names that tell where this process runs, or whom it talks to: wrong for what is begun elsewhere."""


def environment() -> dict[str, str]:
    """Return the environment that Slurm's commands get, and hand on to the nodes: ours, without our own place and without secrets.

    Slurm keeps a job's environment in files of its own.
    """
    found = {name: value for name, value in without_added(os.environ).items() if not name.startswith(PLACE) and not is_secret(name)}
    if (conf := os.environ.get("SLURM_CONF")) is not None:
        found["SLURM_CONF"] = conf
    return found


def asked(*argv: str, seconds: float = SECONDS, given: str | None = None, extra: Mapping[str, str] | None = None) -> str:
    """Return what a command of Slurm's says; raise `SlurmUnavailable` when it may say otherwise later, `SlurmRefused` when it will not."""
    program = shutil.which(argv[0])
    if program is None:
        raise NoSlurm(argv[0])
    words = {**environment(), "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s", **(extra or {})}  # times as seconds since 1970: no zone to guess
    try:
        # From /: scontrol writes scripts into the folder that it is called in, where it can.
        done = subprocess.run(
            [program, *argv[1:]],
            input=given,
            env=words,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            cwd="/",
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SlurmUnavailable(argv[0], f"no answer within {seconds:g} s") from None
    except OSError as error:
        raise SlurmUnavailable(argv[0], str(error)) from error
    if done.returncode == 0:
        return done.stdout
    why = " ".join((done.stderr or done.stdout).split()) or f"status {done.returncode}"
    raise (SlurmUnavailable if PASSING.search(why) else SlurmRefused)(argv[0], why[:500])
