"""Run examples/elastic.py with steps in which each rank rests for a while, as a host does while its GPU computes.

    train_resting.py SECONDS [arguments of the example]

Ranks of several nodes that are one machine fight for its cores; a step that rests is as long as those of real jobs and takes none.
"""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.measuring import ROOT
from holdfast.runtime.session import Session

SECONDS = float(sys.argv[1])
_shares = Session.micro_batches


def _rested(self: Session, **given: Any) -> Iterator[Any]:  # noqa: ANN401 (as `Session.micro_batches` has it)
    time.sleep(SECONDS)
    yield from _shares(self, **given)


Session.micro_batches = _rested  # type: ignore[method-assign]
sys.path.insert(0, str(ROOT / "examples"))
sys.argv = [str(ROOT / "examples" / "elastic.py"), *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
