"""A managed script without torch: it steps at a steady pace, saves a number, and gets into the trouble that its arguments describe.

It speaks to the agent through the runtime's own link, as `holdfast.session` does.
"""

import argparse
import importlib
import os
import signal
import sys
import time
from pathlib import Path

link = importlib.import_module("holdfast.runtime.agent_client").link
"""Not by an import statement: by that Holdfast knows a script that wants torch, and each node would have it imported for nothing."""

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--pace", type=float, default=0.05)
parser.add_argument("--first", default="", help="statement to run before the first step")
parser.add_argument("--each", default="", help="statement to run in each step; knows rank, generation, step, node")
given = parser.parse_args()

rank, generation, node = int(os.environ["RANK"]), int(os.environ["HOLDFAST_GENERATION"]), os.environ["HOLDFAST_NODE"]
kept = Path(os.environ["HOLDFAST_CHECKPOINT_DIR"]) / f"rank-{rank}"
kept.parent.mkdir(parents=True, exist_ok=True)
end = Path("last-step")
"""A test writes there where the script is to end, once it has seen what it wants to see (`Play.finishes`)."""
step = int(kept.read_text()) if kept.exists() else 0
line = link()
line.hello()
exec(given.first)  # noqa: S102 (the trouble that a test asks for)
line.resumed(step, kept if step else None)
knows = {"os": os, "signal": signal, "sys": sys, "time": time, "line": line, "rank": rank, "generation": generation, "node": node}
each = compile(given.each, "each", "exec")
while step < (int(end.read_text()) if end.exists() else given.steps):
    begin = time.monotonic()
    step += 1
    exec(each, knows | {"step": step})  # noqa: S102 (the trouble that a test asks for)
    time.sleep(given.pace)
    line.beat(step, 1.0 / step, time.monotonic() - begin, given.steps)
    beside = kept.with_suffix(".new")
    beside.write_text(str(step))
    beside.replace(kept)
line.finished(step)
