"""The cost of a snapshot at every step, and its benefit in a recovery.

- ``0.25``, ``0.5``, ``2.0``: ours in idle windows, beside `torch.save` and `torch.distributed.checkpoint.async_save`, with a state whose
  copy takes that share of a step's idle time. Two stages of a pipeline (1F1B, real matrices), each pinned to one core, so that a stage's
  bubble is idle time and not another rank's CPU time. Modes take turns in blocks of steps, in an order drawn anew for every round.
  All modes write to memory, so that no disk is measured.
- ``stages``: the same for 4 and 8 stages whose compute is a timed sleep, and their step beside a model of it (pipeline_model.py).
- ``saturated``: four ranks of DDP that share fewer cores, which have no idle time: torchrun, managed groups alone, and snapshots at their
  defaults, in blocks that take turns (saturated.py).
- ``checksum``: gigabytes a second of the checksum of a snapshot, of a plain copy, and of both, slice by slice as they are taken.
- ``load``: a rank's state loaded from its node's memory, another node's, and disk (loading.py).
- ``resume``: steps lost and time to resume under a real flow, by where the state was (resuming.py).

How overheads are computed: the slowest rank counts in each step. The n-th step of a block is compared with the n-th step of the block of
training alone of the same round; the figure is the median of these ratios, its interval (95 %) from drawing whole rounds anew, for steps of
one block are not independent. ``whole`` beside it compares the means of all steps: it shows what a median would hide.

    python -m benchmarks.checkpoint --json FILE [--rounds N] [--only PART ...]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import loading, saturated
from benchmarks.driver import Driver, Starter
from benchmarks.measuring import prefect, wait_for
from benchmarks.pipeline_model import costs_of, step_seconds
from benchmarks.resuming import SAVE_EVERY, Resumes
from holdfast.memstore.shared_memory import SLICE_BYTES
from holdfast.runtime.snapshots.checksum import sum_of

SCRIPT: Final = Path(__file__).with_name("train_stages.py")
BLOCK: Final = 4
RIVALS: Final = ("sync", "thread", "process")
OFTEN: Final = ("none", "ours") * 2
"""Blocks of a round that bound a small difference: more of them than of the rivals, whose cost nobody overlooks."""
FITS: Final = ("0.25", "0.5")
DOES_NOT: Final = "2.0"
PARTS: Final = (*FITS, DOES_NOT, "stages", "saturated", "checksum", "load", "resume")
STAGES: Final = (4, 8)
FORWARD: Final = 0.01
"""Seconds of a sleeping stage's forward; its backward takes twice as long."""
MEGABYTE: Final = 2**20
OVERHEAD: Final = 0.01
HIDDEN: Final = 0.95
TIMES_LESS: Final = 10
WITHIN: Final = 0.1
LOST: Final = 1

Line = dict[str, Any]
Rounds = list[list[float]]
"""Ratios by round."""


def run(place: Path, ranks: int, *, policy: str = "skip", **options: Any) -> list[dict[str, Any]]:  # noqa: ANN401 (options of the script)
    """Run the stages; return the report of each."""
    place.mkdir()
    memstore, out = place / "memstore", place / "out"
    memstore.mkdir(mode=0o700)
    out.mkdir()
    argv = [str(SCRIPT), "--place", str(out)]
    for name, value in options.items():
        argv += [f"--{name}", *(map(str, value) if isinstance(value, list | tuple) else [str(value)])]
    fork_server = Starter(place)
    given = {
        "HOLDFAST_MEMSTORE": str(memstore),
        "HOLDFAST_NODE": "node",
        "OMP_NUM_THREADS": "1",
        "HOLDFAST_SAVE_EVERY": "0",
        "HOLDFAST_MEMORY_POLICY": policy,
    }
    driver = Driver(fork_server, place / "job", argv, ranks, given)
    try:
        paths = [out / f"rank-{rank}.json" for rank in range(ranks)]
        wait_for(lambda: all(path.exists() for path in paths), f"the end of {ranks} stages", every=0.2, seconds=600)
        wait_for(lambda: len(driver.said("finished")) == ranks, f"the goodbyes of {ranks} stages", every=0.05)
        return [json.loads(path.read_text()) for path in paths]
    finally:
        driver.close()
        fork_server.close()


# -- figures ------------------------------------------------------------------------------------------------------------


def steps_of(reports: Sequence[Mapping[str, Any]]) -> dict[str, Rounds]:
    """Return the seconds of every step of the slowest rank, by mode and round; several blocks of a mode in one round count as one."""
    found: dict[str, dict[int, list[float]]] = {}
    for blocks in zip(*(rank["blocks"] for rank in reports), strict=True):
        steps = [max(one) for one in zip(*(block["steps"] for block in blocks), strict=True)]
        found.setdefault(blocks[0]["mode"], {}).setdefault(blocks[0]["round"], []).extend(steps)
    return {mode: [one for _, one in sorted(rounds.items())] for mode, rounds in found.items()}


def overheads(steps: Mapping[str, Rounds], mode: str) -> Rounds:
    """Return by how much each step of *mode* took longer than its like among the round's steps without."""
    pairs = zip(steps[mode], steps["none"], strict=True)
    return [[mine / bare - 1 for mine, bare in zip(one, none, strict=False)] for one, none in pairs]


def flat(rounds: Rounds) -> list[float]:
    """Return all values of all rounds."""
    return [value for one in rounds for value in one]


def interval(rounds: Rounds, draws: int = 2000) -> tuple[float, float]:
    """Return the bootstrap interval (95 %) of the median over all values of *rounds*, of which whole ones are drawn."""
    order = random.Random(7)  # noqa: S311 (resampling, the same every time)
    medians = sorted(statistics.median(flat(order.choices(rounds, k=len(rounds)))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def line(key: str, rounds: Rounds, goal: str, met: Callable[[float, float], bool] | None, **details: Any) -> Line:  # noqa: ANN401 (JSON)
    """Return one line of the result; *met* judges the median and the upper end of its interval."""
    low, high = interval(rounds)
    middle = statistics.median(flat(rounds))
    figures = {"median": round(middle, 5), "interval": [round(low, 5), round(high, 5)], "n": len(flat(rounds))}
    return {"key": key, **figures, "goal": goal, "met": None if met is None else met(middle, high), **details}


def singles(values: Sequence[float]) -> Rounds:
    """Return *values*, each a round of its own."""
    return [[one] for one in values]


def overlapped(reports: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the share of copy seconds inside of idle windows, for every round, over all ranks."""
    spent: dict[int, list[float]] = {}
    for rank in reports:
        for block in rank["blocks"]:
            if block["mode"] == "ours" and block["copied"]:
                one = spent.setdefault(block["round"], [0.0, 0.0])
                one[0] += block["overlapped"]
                one[1] += block["copied"]
    return [inside / whole for inside, whole in spent.values()]


# -- parts --------------------------------------------------------------------------------------------------------------


class Copies:
    """The speed of copies and the idle time of a step, measured once, and the state's size that follows from them."""

    def __init__(self, place: Path) -> None:
        first = run(place / "first", 2, policy="pause", rounds=4, block=BLOCK, ballast=32 * MEGABYTE, modes=["none", "ours"])
        blocks = [(rank, block) for rank in first for block in rank["blocks"]]
        self.speed = sum(rank["size"] * block["taken"] for rank, block in blocks) / sum(block["copied"] for _, block in blocks)
        self.idle = min(rank["idle"] for rank in first)

    def ballast(self, seconds: float) -> int:
        """Return the bytes that are copied in so many seconds."""
        return int(seconds * self.speed) // MEGABYTE * MEGABYTE


def at_ratio(place: Path, ratio: str, rounds: int, copies: Copies) -> list[Line]:
    """Measure all modes with a state whose copy takes *ratio* of the idle time of a step.

    Where it does not fit only the better `async_save` stands beside: the others take several times as long, and nobody would choose them.
    """
    fits = ratio in FITS
    rivals = RIVALS if fits else ("thread",)
    ballast = copies.ballast(float(ratio) * copies.idle)
    reports = run(place / f"ratio-{ratio}", 2, rounds=rounds, block=BLOCK, ballast=ballast, modes=[*OFTEN, *rivals])
    steps = steps_of(reports)
    by_mode = {mode: overheads(steps, mode) for mode in ("ours", *rivals)}
    middle = {mode: statistics.median(flat(one)) for mode, one in by_mode.items()}
    whole = {mode: round(statistics.mean(flat(steps[mode])) / statistics.mean(flat(steps["none"])) - 1, 5) for mode in by_mode}
    rival = min((mode for mode in rivals if mode != "sync"), key=middle.__getitem__)
    if fits:
        lines = [
            line(f"overhead_ours_{ratio}", by_mode["ours"], "interval <= 0.01", lambda _, high: high <= OVERHEAD, **facts(reports, ratio))
        ]
        if inside := overlapped(reports):  # on a machine that is busy with something else there may be no room for a snapshot
            lines.append(line(f"hidden_{ratio}", singles(inside), ">= 0.95", lambda share, _: share >= HIDDEN))
        times = middle[rival] / max(middle["ours"], 1e-4)
        judged = {"goal": f">= {TIMES_LESS}", "met": times >= TIMES_LESS}
        lines.append(
            {"key": f"async_over_ours_{ratio}", "median": round(times, 1), "interval": None, "n": len(flat(by_mode["ours"])), **judged}
        )
    else:
        goal = "not above async_save"
        lines = [line(f"overhead_ours_{ratio}", by_mode["ours"], goal, lambda *_: whole["ours"] <= whole[rival], **facts(reports, ratio))]
    lines += [line(f"overhead_{mode}_{ratio}", by_mode[mode], "beside ours", None) for mode in rivals]
    return [one | ({"whole": whole[mode]} if (mode := one["key"].split("_")[1]) in whole else {}) for one in lines]


def facts(reports: Sequence[Mapping[str, Any]], ratio: str) -> Line:
    """Return what a run of two stages was like."""
    blocks = [block for rank in reports for block in rank["blocks"] if block["mode"] == "ours"]
    return {
        "ratio": float(ratio),
        "state_MB": round(reports[0]["size"] / 1e6, 1),
        "step_s": round(reports[0]["step"], 4),
        "snapshots_per_step": round(sum(block["taken"] for block in blocks) / (BLOCK * len(blocks)), 3),
        "prepared_s": round(sum(block["prepared"] for block in blocks) / (BLOCK * len(blocks)), 6),
        "paused_s": round(sum(block["paused"] for block in blocks) / (BLOCK * len(blocks)), 6),
        "plan": [rank["plan"] and rank["plan"]["reason"] for rank in reports],
    }


def of_stages(place: Path, rounds: int, copies: Copies) -> list[Line]:
    """Measure pipelines of sleeping stages beside the model, whose costs come from two stages without a snapshot."""
    options: dict[str, Any] = {"block": BLOCK, "sleep": FORWARD, "width": 16, "layers": 1, "rows": 2}
    alone = run(place / "two", 2, rounds=rounds, modes=["none"], microbatches=8, trace=1, **options)
    costs = costs_of(alone)
    lines = []
    for stages in STAGES:
        micro = 2 * stages
        bare = (micro + stages - 1) * 3 * FORWARD
        predicted = step_seconds(stages, micro, costs)
        ballast = copies.ballast(0.25 * (stages - 1) * 3 * FORWARD / stages)
        reports = run(
            place / f"stages-{stages}", stages, rounds=rounds, ballast=ballast, modes=["none", "ours"], microbatches=micro, **options
        )
        steps = steps_of(reports)
        ratios = [[one / predicted for one in block] for block in steps["ours"]]
        more = {"simulated": "compute is a timed sleep", "model_s": round(predicted, 4), "bare_theory_s": round(bare, 4)}
        lines.append(line(f"step_over_model_{stages}_stages", ratios, "within 10 %", lambda one, _: abs(one - 1) <= WITHIN, **more))
        of_ours = overheads(steps, "ours")
        lines.append(
            line(f"overhead_ours_{stages}_stages", of_ours, "interval <= 0.01", lambda _, high: high <= OVERHEAD, **facts(reports, "0.25"))
        )
    return lines


def loads(rounds: int, megabytes: int, disk: Path) -> list[Line]:
    """Measure what loading a state takes, by where it lies."""
    found, setting = loading.rounds(rounds, megabytes, disk)
    seconds = {source: [one["seconds"] for one in found if one["source"] == source] for source in loading.SOURCES}
    dropped = max(one["cached"] for one in found if one["source"] == "disk")
    lines = [line(f"load_{source}_s", singles(values), "", None, **setting) for source, values in seconds.items()]
    for source in ("memory", "replica"):
        times = [disk / mine for disk, mine in zip(seconds["disk"], seconds[source], strict=True)]
        met = (lambda one, _: one >= TIMES_LESS) if source == "memory" else None
        goal = f">= {TIMES_LESS}" if met else "beside memory"
        lines.append(line(f"disk_over_{source}", singles(times), goal, met, cached_after_eviction=dropped))
    return lines


def resumes(place: Path, megabytes: int, faults: int, environment: dict[str, str]) -> list[Line]:
    """Measure what faults cost under a real flow, by where the state is."""
    found = Resumes(place, environment, megabytes=megabytes, faults=faults).all()
    lines = []
    for source in dict.fromkeys(one["source"] for one in found):
        mine = [one for one in found if one["source"] == source]
        lost, most = [float(one["steps_lost"]) for one in mine], max(one["steps_lost"] for one in mine)
        goal = f"at most {LOST}" if source != "disk" else f"a checkpoint every {SAVE_EVERY} steps"
        actions = sorted({str(one["action"]) for one in mine})
        judge = (lambda _, __, most=most: most <= LOST) if source != "disk" else None
        lines.append(line(f"steps_lost_{source}", singles(lost), goal, judge, most=most, actions=actions))
        lines.append(line(f"resume_{source}_s", singles([one["seconds"] for one in mine]), "", None, step_s=mine[0]["step"]))
    return lines


def in_turns(place: Path, rounds: int) -> list[Line]:
    """Measure jobs that take turns on saturated cores: how much longer their steps are, and how much more CPU time they take."""
    found, reports = saturated.rounds(place, rounds)
    own = [one["slowed"] / one["trained"] for one in reports]
    facts = {"snapshots_every": reports[0]["every"], "reported_overhead": round(max(own), 5), "measured": reports[0]["measured"]}
    lines = []
    for kind, beside in (("managed", "torchrun"), ("snapshots", "without"), ("snapshots", "torchrun")):
        for figure in saturated.FIGURES:
            ratios = [one[kind][figure] / one[beside][figure] - 1 for one in found]
            limited = (kind, beside, figure) == ("snapshots", "without", "seconds")
            judge = (lambda middle, _: middle <= OVERHEAD) if limited else None
            goal = f"<= {OVERHEAD}" if limited else ""
            more = {"range": [round(min(ratios), 4), round(max(ratios), 4)], **(facts if kind == "snapshots" else {})}
            lines.append(line(f"{kind}_over_{beside}_{figure}", singles(ratios), goal, judge, **more))
    return lines


def checksums(rounds: int, megabytes: int = 64) -> list[Line]:
    """Measure the checksum of a snapshot in one thread, by its CPU time."""
    source = torch.randint(0, 256, (megabytes * SLICE_BYTES,), dtype=torch.uint8)
    copy = torch.empty_like(source)

    def gigabytes_per_second(*, copies: bool, sums: bool) -> float:
        begin = time.thread_time()
        for at in range(0, len(source), SLICE_BYTES):
            if copies:
                ctypes.memmove(copy.data_ptr() + at, source.data_ptr() + at, SLICE_BYTES)
            if sums:
                sum_of(source[at : at + SLICE_BYTES])
        return len(source) / (time.thread_time() - begin) / 1e9

    ways = {"checksum": (False, True), "copy": (True, False), "copy_and_checksum": (True, True)}
    gigabytes_per_second(copies=True, sums=True)  # the memory is there, and the weights are drawn
    measured = [{name: gigabytes_per_second(copies=copies, sums=sums) for name, (copies, sums) in ways.items()} for _ in range(rounds)]
    return [line(f"{name}_GB_per_s", singles([one[name] for one in measured]), "", None) for name in ways]


def _measured(given: argparse.Namespace) -> list[Line]:
    """Measure all parts that are wanted."""
    lines: list[Line] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-", dir="/dev/shm") as folder:
        place = Path(folder)
        copies = Copies(place) if {*FITS, DOES_NOT, "stages"} & set(given.only) else None
        if copies is not None:
            for ratio in [one for one in (*FITS, DOES_NOT) if one in given.only]:
                lines += at_ratio(place, ratio, given.rounds, copies)
            if "stages" in given.only:
                lines += of_stages(place, max(4, given.rounds // 6), copies)
        if "saturated" in given.only:
            lines += in_turns(place, max(4, given.rounds // 5))
    if "checksum" in given.only:
        lines += checksums(given.rounds)
    if "load" in given.only:
        lines += loads(given.loads, given.megabytes, given.disk)
    if "resume" in given.only:
        with (
            tempfile.TemporaryDirectory(prefix="hf-bench-", dir=given.disk, ignore_cleanup_errors=True) as folder,
            prefect(Path(folder)) as env,
        ):
            lines += resumes(Path(folder), given.megabytes // 3, given.faults, env)
    return lines


def main() -> None:
    """Measure and write one line a key."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="write the figures here, an object a line")
    parser.add_argument("--rounds", type=int, default=50, help=f"rounds of blocks of {BLOCK} steps for each mode")
    parser.add_argument("--loads", type=int, default=10, help="loads from each place")
    parser.add_argument("--faults", type=int, default=6, help="faults under a real flow for each place of the state")
    parser.add_argument("--megabytes", type=int, default=300, help="state of a rank that is loaded; under a flow a third of it")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk to load from")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    given = parser.parse_args()
    lines = _measured(given)
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text("".join(json.dumps(one) + "\n" for one in lines))
    for one in lines:
        print(f"{one['key']:28} {one['median']:9.4f}  {one['interval']}  n={one['n']}  goal {one['goal']}: {one['met']}")


if __name__ == "__main__":
    main()
