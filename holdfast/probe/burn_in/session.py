"""The checks' program on one node, as who gives it orders sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from detectors.burn_in_results import Check, CheckMark
from detectors.codec import MalformedData, unpacked
from holdfast.probe.burn_in.bundle import program
from holdfast.probe.remote.errors import NoAnswer, ProbeFailed
from holdfast.probe.remote.program import Interpreter, RemoteProgram

START: Final = 30.0
"""Seconds that an interpreter may need to start on a busy node."""
OVERTIME: Final = 60.0
"""Seconds that an order may take beyond what it was given: at the lowest priority, beside training, and torch takes long to load."""
PINGS: Final = 9
"""Questions about a node's clock; the quickest answer counts."""


class BurnInSession:
    """A program on a node that carries out orders. One thread at a time may use it."""

    def __init__(self, node: str, interpreter: Interpreter, *, nice: int = 0) -> None:
        """Send the program and wait until it is ready; raise `NoAnswer` when it does not come up."""
        self.node = node
        until = time.monotonic() + START
        try:
            with _named():
                self._program = RemoteProgram(interpreter, program(nice), until)
                self.facts: dict[str, Any] = self._program.answer("ready", until)
        except BaseException:
            interpreter.close()
            raise

    def ask(self, do: str, *, seconds: float, **facts: object) -> list[Check]:
        """Have an order carried out that works for *seconds*; where no answer comes, it is blind."""
        try:
            mark = self.begin(do, seconds=seconds, **facts)
            return self.checks(mark, time.monotonic() + seconds + 2 * OVERTIME)
        except NoAnswer as error:
            return [Check(name=do, mark=CheckMark.SKIPPED, words=str(error))]

    def begin(self, do: str, *, seconds: float, **facts: object) -> str:
        """Give an order; return the mark under which its answers come."""
        with _named():
            return self._program.begin(time.monotonic() + START, do=do, seconds=seconds, limit=seconds + OVERTIME, **facts)

    def checks(self, mark: str, until: float) -> list[Check]:
        """Return the checks that an order ended with."""
        try:
            return [unpacked(Check, one) for one in self.answer(mark, until)]
        except (MalformedData, TypeError) as error:
            raise ProbeFailed(f"its answer makes no sense: {error}") from error

    def answer(self, mark: str, until: float) -> Any:  # noqa: ANN401 (any JSON)
        """Return the next answer under *mark*, by *until* (monotonic)."""
        with _named():
            return self._program.answer(mark, until)

    def offset(self, now: Callable[[], float] = time.time) -> tuple[float, float]:
        """Return by how many seconds the node's clock is ahead of *now*, and by how many that may be wrong."""
        with _named():
            return self._program.clock_offset(PINGS, START, now)

    def close(self) -> None:
        """End the program and all that it started."""
        self._program.close()


@contextmanager
def _named() -> Iterator[None]:
    """Say which program gave no answer. It speaks against nobody yet: the order was not carried out."""
    try:
        yield
    except NoAnswer as error:
        raise ProbeFailed(f"the program of checks ended or could not be reached: {error}") from error
