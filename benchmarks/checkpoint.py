"""What it costs to keep the state at every step: ours in idle windows, beside `torch.save` and `torch.distributed.checkpoint.async_save`.

Two stages of a pipeline (1F1B, real matrices), each pinned to one core, so that a stage's bubble is idle time and not another rank's
processor time. Modes take turns in blocks of steps, in an order drawn anew for every round; a block of each is compared with the block of
training alone of the same round (paired). All modes write to memory, so that no disk is measured. Sizes of the state are chosen by the
ratio of copy time to idle time, as a first run measures them. Nothing is simulated, except in the runs of 4 and 8 stages, where the compute
of a stage is a timed sleep.

    python -m benchmarks.checkpoint --json FILE [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.driver import Driver, Starter
from benchmarks.measuring import wait_for

SCRIPT: Final = Path(__file__).with_name("train_stages.py")
BLOCK: Final = 5
RIVALS: Final = ("sync", "thread", "process")
FITS: Final = (0.25, 0.5)
DOES_NOT: Final = 2.0
MEGABYTE: Final = 2**20


def run(place: Path, ranks: int, **options: Any) -> list[dict[str, Any]]:  # noqa: ANN401 (options of the script)
    """Run the stages; return what each has told."""
    place.mkdir()
    vault, out = place / "vault", place / "out"
    vault.mkdir(mode=0o700)
    out.mkdir()
    argv = [str(SCRIPT), "--place", str(out)]
    for name, value in options.items():
        argv += [f"--{name}", *(map(str, value) if isinstance(value, list | tuple) else [str(value)])]
    starter = Starter(place)
    given = {"HOLDFAST_VAULT": str(vault), "HOLDFAST_NODE": "node", "OMP_NUM_THREADS": "1", "HOLDFAST_SAVE_EVERY": "0"}
    driver = Driver(starter, place / "job", argv, ranks, given)
    try:
        told = [out / f"rank-{rank}.json" for rank in range(ranks)]
        wait_for(lambda: all(path.exists() for path in told), f"the end of {ranks} stages", every=0.2)
        return [json.loads(path.read_text()) for path in told]
    finally:
        driver.close()
        starter.close()


def overheads(told: list[dict[str, Any]], mode: str) -> list[float]:
    """Return, for every round, by how much a block of *mode* took longer than the round's block without; the slowest rank counts."""
    rounds: dict[int, dict[str, float]] = {}
    for rank in told:
        for block in rank["blocks"]:
            times = rounds.setdefault(block["round"], {})
            times[block["mode"]] = max(times.get(block["mode"], 0.0), block["seconds"])
    return [times[mode] / times["none"] - 1 for times in rounds.values()]


def interval(values: Sequence[float], draws: int = 4000) -> tuple[float, float]:
    """Return the bootstrap interval (95 %) of the median of *values*."""
    order = random.Random(7)  # noqa: S311 (resampling, the same every time)
    medians = sorted(statistics.median(order.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def key(name: str, values: Sequence[float], goal: str, met: bool | None, **details: Any) -> dict[str, Any]:  # noqa: ANN401, FBT001 (JSON)
    """Return one line of the result."""
    low, high = interval(values)
    figures = {"median": round(statistics.median(values), 5), "interval": [round(low, 5), round(high, 5)], "n": len(values)}
    return {"key": name, **figures, "goal": goal, "met": met, **details}


def hidden(told: list[dict[str, Any]]) -> list[float]:
    """Return the share of copy seconds inside of idle windows, for every round, over all ranks."""
    rounds: dict[int, list[float]] = {}
    for rank in told:
        for block in rank["blocks"]:
            if block["mode"] == "ours" and block["copied"]:
                one = rounds.setdefault(block["round"], [0.0, 0.0])
                one[0] += block["hidden"]
                one[1] += block["copied"]
    return [inside / whole for inside, whole in rounds.values()]


def at_ratio(place: Path, ratio: float, rounds: int, speed: float, idle: float) -> list[dict[str, Any]]:
    """Measure all modes with a state whose copy takes *ratio* of the idle time of a step."""
    ballast = int(ratio * idle * speed) // MEGABYTE * MEGABYTE
    told = run(place / f"ratio-{ratio}", 2, rounds=rounds, block=BLOCK, ballast=ballast)
    ours = overheads(told, "ours")
    fits = ratio in FITS
    blocks = [block for rank in told for block in rank["blocks"] if block["mode"] == "ours"]
    taken = sum(block["taken"] for block in blocks) / (BLOCK * len(blocks))
    facts = {
        "ratio": ratio,
        "state_MB": round(told[0]["size"] / 1e6, 1),
        "step_s": round(told[0]["step"], 4),
        "steps_each": rounds * BLOCK,
        "snapshots_per_step": round(taken, 3),
        "predicted": [rank["plan"] and round(rank["plan"]["overhead"], 4) for rank in told],
        "plan": [rank["plan"] and rank["plan"]["because"] for rank in told],
    }
    rivals = {mode: overheads(told, mode) for mode in RIVALS}
    best_async = min(statistics.median(rivals["thread"]), statistics.median(rivals["process"]))
    high = interval(ours)[1]
    goal = "interval <= 0.01" if fits else "not above async_save"
    lines = [key(f"overhead_ours_{ratio}", ours, goal, high <= 0.01 if fits else statistics.median(ours) <= best_async, **facts)]  # noqa: PLR2004 (the goal)
    lines += [key(f"overhead_{mode}_{ratio}", values, "beside ours", None) for mode, values in rivals.items()]
    if fits:
        inside = hidden(told)
        lines.append(key(f"hidden_{ratio}", inside, ">= 0.95", statistics.median(inside) >= 0.95))  # noqa: PLR2004 (the goal)
        gains = [min(one, other) / max(mine, 1e-4) for mine, one, other in zip(ours, rivals["thread"], rivals["process"], strict=True)]
        lines.append(key(f"async_over_ours_{ratio}", gains, ">= 10", statistics.median(gains) >= 10))  # noqa: PLR2004 (the goal)
    return lines


def of_stages(place: Path, stages: int, rounds: int, speed: float) -> dict[str, Any]:
    """Measure a pipeline of sleeping stages against the model: idle time of a step by the theory of pipelines."""
    forward, micro = 0.01, 2 * stages
    predicted = (micro + stages - 1) * 3 * forward  # a backward takes twice a forward
    ballast = int(0.25 * (stages - 1) * 3 * forward * speed / stages) // MEGABYTE * MEGABYTE
    options = {"rounds": rounds, "block": 3, "sleep": forward, "microbatches": micro, "width": 16, "layers": 1, "rows": 2}
    told = run(place / f"stages-{stages}", stages, ballast=ballast, modes=["none", "ours"], **options)
    measured = [block["seconds"] / 3 for block in told[0]["blocks"] if block["mode"] == "ours"]
    ratios = [one / predicted for one in measured]
    within = abs(statistics.median(ratios) - 1) <= 0.1  # noqa: PLR2004 (the goal)
    overhead = statistics.median(overheads(told, "ours"))
    return key(
        f"step_over_model_{stages}_stages", ratios, "within 10 %", within, simulated="compute is a timed sleep", overhead=round(overhead, 4)
    )


def main() -> None:
    """Measure and write one line a key."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="write the figures here, an object a line")
    parser.add_argument("--rounds", type=int, default=40, help=f"rounds of blocks of {BLOCK} steps for each mode")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-", dir="/dev/shm") as folder:
        place = Path(folder)
        first = run(place / "first", 2, rounds=4, block=BLOCK, ballast=32 * MEGABYTE, modes=["none", "ours"])
        copied = sum(block["copied"] for rank in first for block in rank["blocks"])
        speed = sum(rank["size"] * block["taken"] for rank in first for block in rank["blocks"]) / copied
        idle = min(rank["idle"] for rank in first)
        lines = [line for ratio in (*FITS, DOES_NOT) for line in at_ratio(place, ratio, given.rounds, speed, idle)]
        lines += [of_stages(place, stages, max(4, given.rounds // 4), speed) for stages in (4, 8)]
    given.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for line in lines:
        print(f"{line['key']:28} {line['median']:9.4f}  {line['interval']}  n={line['n']}  goal {line['goal']}: {line['met']}")


if __name__ == "__main__":
    main()
