"""Run an example as it is, but begin certain steps only when the test lets it: what is to be broken can be looked at before.

``gated.py FOLDER STEP,STEP EXAMPLE ARGUMENTS``: step 20 begins once there is a file ``FOLDER/gate-20``.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

from holdfast.runtime.session import Session, Step

EXAMPLES = Path(__file__).parents[2] / "examples"
folder, gates, example = Path(sys.argv[1]), {int(one) for one in sys.argv[2].split(",")}, sys.argv[3]
begin = Session._begin_step


def held(self: Session, *, warming_up: bool = False) -> Step:
    """Wait at the gate of the step that is to begin, if there is one, and go on."""
    step = self.steps_done + 1
    while not warming_up and step in gates and not (folder / f"gate-{step}").exists():
        time.sleep(0.005)
    return begin(self, warming_up=warming_up)


Session._begin_step = held  # type: ignore[method-assign]
sys.path.insert(0, str(EXAMPLES))
sys.argv = [str(EXAMPLES / example), *sys.argv[4:]]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    Session._begin_step = begin  # type: ignore[method-assign]
