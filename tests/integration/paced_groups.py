"""A script without torch that replaces ranks in its groups: it sends every message of that and of a planned migration over the real socket.

Ranks meet through files beside the checkpoints: those that live leave there where they stand, and all go on from the lowest step.
"""
# ruff: noqa: PLW0603, S102 (a script has globals; statements to run are the trouble that a test asks for)

import argparse
import importlib
import json
import os
import queue
import sys
import time
from pathlib import Path
from typing import Any

link = importlib.import_module("holdfast.runtime.agent_client").link
"""Not by an import statement: by that Holdfast knows a script that wants torch, and each node would have it imported for nothing."""

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--pace", type=float, default=0.02)
parser.add_argument("--each", default="", help="statement to run in each step; knows rank, generation, step, hot_spare")
parser.add_argument("--on", default="", help="statement to run on an order; knows order, rank, hot_spare, line")
given = parser.parse_args()

env = os.environ
hot_spare = env.get("HOLDFAST_HOT_SPARE")
joins = hot_spare is not None or env.get("HOLDFAST_FRESH") == "1"
folder = Path(env["HOLDFAST_CHECKPOINT_DIR"])
folder.mkdir(parents=True, exist_ok=True)
orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
each, on = compile(given.each, "each", "exec"), compile(given.on, "on", "exec")
rank, generation, step = int(env["RANK"]), int(env["HOLDFAST_GENERATION"]), 0
switch: dict[str, Any] | None = None
prepared: dict[str, Any] | None = None
assert env["HOLDFAST_TOKEN"]
line = link()


def put(path: Path, text: str) -> None:
    """Write a file whole."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)


def next_order(seconds: float | None) -> dict[str, Any] | None:
    """Return the next order, after what the test wants done on it."""
    try:
        order = orders.get(timeout=seconds) if seconds else orders.get_nowait() if seconds == 0 else orders.get()
    except queue.Empty:
        return None
    exec(on, globals() | {"order": order})
    return order


def await_regroup() -> None:
    """Wait, in a process that lives, for the next generation that can be joined."""
    while True:
        order = next_order(None)
        assert order is not None
        if order["do"] == "regroup" and regroup(order):
            return


def regroup(order: dict[str, Any]) -> bool:
    """Join a generation: meet the others, go on from the lowest step; return whether that came to something."""
    global rank, generation, step, joins, hot_spare
    begin = time.monotonic()
    env.update(order.get("environment") or {})
    was_new, rank, generation = joins, order["rank"], order["generation"]
    line.rank, line.generation = rank, generation
    assert order["token"] == env["HOLDFAST_TOKEN"]
    assert (rank in order["changed"]) is was_new
    if not was_new:
        put(folder / f"met-{generation}-{rank}", str(step))
    survivors = [other for other in range(order["world"]) if other not in order["changed"]]
    while not all((folder / f"met-{generation}-{other}").exists() for other in survivors):
        if not orders.empty():
            return False
        time.sleep(0.002)
    step = min(int((folder / f"met-{generation}-{other}").read_text()) for other in survivors)
    if was_new and joins:
        line.report("groups")
    if hot_spare is not None:
        line.report("coverage", calls=2, foreseen=2, kinds=1, first_met=[])
    joins, hot_spare = False, None
    line.mark("group", time.monotonic() - begin)
    line.mark("load", 0.0)
    line.report(
        "regrouped", generation=generation, step=step, seconds={"all": time.monotonic() - begin}, rebuilt=1, kept=0, source="live", bytes=8
    )
    line.resumed(step, None)
    return True


def carry_out_orders() -> None:
    """Carry out the orders that have come, at the boundary of two steps."""
    global switch, prepared
    while (order := next_order(0)) is not None:
        match order["do"]:
            case "abandon":
                line.report("broken", generation=generation, step=step, group="0", why="the flow has ended this generation")
                await_regroup()
            case "regroup":
                while not regroup(order):
                    await_regroup()
                    return
            case "prepare":
                prepared = order
                line.report("prepared", generation=order["generation"], seconds=0.01)
            case "switch" if prepared is not None:  # a joiner may find its rank handed over before it reads that it may go
                switch = order
            case "forget":
                prepared = switch = None


def change_over() -> None:
    """Go over to the generation that has been prepared, or leave."""
    global switch, prepared, generation
    assert switch is not None
    assert prepared is not None
    number = switch["generation"]
    if rank in prepared["leavers"]:
        put(folder / f"handed-{number}-{rank}", str(step))
        line.report("departed", step=step)
        line.flush(2.0)
        sys.exit(0)
    generation = line.generation = number
    line.report("switched", generation=number, step=step, seconds=0.01)
    switch = prepared = None


def park() -> None:
    """Wait as a hot spare for a rank: that of a lost process, or of one that leaves."""
    global rank, generation, step, joins, hot_spare
    roles = line_roles()
    line.report("parked", roles=roles, role=int(env["HOLDFAST_WAITING_ROLE"]), seconds=0.1, rss=1, coverage={})
    while True:
        order = next_order(None)
        assert order is not None
        if order["do"] == "regroup" and regroup(order):
            return
        if order["do"] == "prepare":
            env.update(order["environment"])
            line.report("prepared", generation=order["generation"], seconds=0.01)
            rank, number = order["rank"], order["generation"]
            handed = folder / f"handed-{number}-{rank}"
            while not handed.exists() and orders_allow():
                time.sleep(0.002)
            if not handed.exists():
                continue
            step, generation, joins, hot_spare = int(handed.read_text()), number, False, None
            line.rank, line.generation = rank, number
            line.report("switched", generation=number, step=step, seconds=0.01, bytes=8)
            line.resumed(step, None)
            return


def orders_allow() -> bool:
    """Return whether a joiner may go on waiting: a switch is what it waits for, anything else ends the wait."""
    order = next_order(0)
    return order is None or order["do"] == "switch"


def line_roles() -> list[list[int]]:
    """Return the roles that this hot spare received."""
    roles: list[list[int]] = json.loads(env["HOLDFAST_ROLES"])
    return roles


line.listen(orders.put)
line.hello()
if hot_spare is not None:
    park()
elif joins:
    await_regroup()
else:
    kept = folder / f"rank-{rank}"
    step = int(kept.read_text()) if kept.exists() else 0
    line.report("groups")
    put(folder / f"met-{generation}-{rank}", str(step))
    while not all((folder / f"met-{generation}-{other}").exists() for other in range(int(env["WORLD_SIZE"]))):
        time.sleep(0.002)
    line.resumed(step, kept if step else None)
done = 0
while step < given.steps:
    carry_out_orders()
    if switch is not None:
        change_over()
    begin = time.monotonic()
    step += 1
    exec(each, globals())
    time.sleep(given.pace)
    line.beat(step, 1.0 / step, time.monotonic() - begin, given.steps)
    put(folder / f"rank-{rank}", str(step))
    done += 1
    if done == 2 and rank == 0:
        line.report("roles", roles=[list(range(int(env["WORLD_SIZE"])))], recordings=str(folder))
line.finished(step)
