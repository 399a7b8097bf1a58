"""How a flow ends that cannot do its work: in words. Of what is raised Prefect shows tracebacks, in the worker's log and in its UI."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Final

from prefect.client.schemas.objects import State
from prefect.exceptions import CancelledRun, FailedRun
from prefect.states import Failed

from holdfast.errors import HoldfastError
from holdfast.prefect.output import prepare_output

OF_A_WORKER: Final = "PREFECT__FLOW_RUN_ID"
"""Set by Prefect in the environment of a flow run that it starts itself."""


def ended_in_words(work: Callable[[], State]) -> State:
    """Do the *work* of a flow, and end it as failed, in the error's own words, where it cannot be done.

    A program that runs a flow itself gets the error.
    """
    prepare_ending()
    try:
        return work()
    except HoldfastError as error:
        return failed_in_words(error)


def prepare_ending() -> None:
    """Have no traceback shown of a flow that ends in words."""
    prepare_output()
    logging.getLogger("prefect.flow_runs").addFilter(_untraced)


def failed_in_words(error: HoldfastError) -> State:
    """Return the failed state that says *error*; raise it where a program runs the flow itself."""
    if OF_A_WORKER not in os.environ:
        raise error
    return Failed(message=str(error))


def _untraced(record: logging.LogRecord) -> bool:
    """Let a failed flow run be told in its own words, without a traceback through Prefect, and no cancelled one as an error."""
    ended = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    if isinstance(ended, FailedRun):
        record.msg, record.args, record.exc_info, record.exc_text = str(ended), (), None, None
    return not isinstance(ended, CancelledRun)
