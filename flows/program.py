"""The flow as a program: ``python -m flows.training_job SPEC.json`` runs one job to its end and exits with its verdict."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from prefect.states import State as FlowState

from holdfast.errors import HoldfastError, OperatorError
from holdfast.history import History, queries
from holdfast.spec import LocalCluster, TrainingJob

EXITS: Final = {"COMPLETED": 0, "FAILED": 1, "CANCELLED": 3}
REFUSED: Final = 2
UNFINISHED: Final = 4


def main(arguments: list[str], steer: Callable[..., FlowState]) -> int:
    """Run the job described by the file in *arguments*; the last line says what could not be done."""
    try:
        described = json.loads(Path(arguments[0]).read_text())
        job = TrainingJob.model_validate(described["job"])
        cluster = LocalCluster.model_validate(described["cluster"])
    except (IndexError, OSError, ValueError, KeyError) as error:
        print(f"holdfast: no usable description of a job: {error}", file=sys.stderr)  # noqa: T201
        return REFUSED
    try:
        steer(job, cluster, return_state=True)
    except OperatorError as error:
        print(f"holdfast: {error}", file=sys.stderr)  # noqa: T201
        return REFUSED
    except HoldfastError as error:
        print(f"holdfast: {error}", file=sys.stderr)  # noqa: T201
    except BaseException:  # noqa: BLE001 (Prefect's server may be away at the end: what counts is what the history says)
        traceback.print_exc()
    return _verdict(job.name)


def _verdict(job: str) -> int:
    """Return the exit status that the history's last word on the job asks for."""
    history = History.open()
    state: Any = queries.state_of(history, queries.newest_job(history, job).id)
    history.close()
    return EXITS.get(state.after if state else "", UNFINISHED)
