"""Files as the ranks of a job write them for `holdfast report --profile`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGAN = 1_795_270_000.0
STEP = 0.2
COPIED = {"steps": 120, "taken": 100, "given_up": 2, "copied": 0.5, "overlapped": 0.45, "paused": 0.05, "prepared": 0.02, "slowed": 0.07}


def rank_file(rank: int, world: int, **more: Any) -> dict[str, Any]:
    """Return what rank *rank* of *world* reports: it waits for a stage, gradients and the vote; its copy is overlapped but for its end."""
    late = 0.001 * rank
    return {
        "format": 1,
        "rank": rank,
        "world": world,
        "node": f"node-{rank // 2}",
        "generation": 1,
        "time": BEGAN + 1,
        "step": 120,
        "seconds": STEP,
        "idle": 0.05,
        "windows": [
            {"number": 1, "kind": "pipeline", "begin": 0.02, "length": 0.03},
            {"number": 3, "kind": "vote", "begin": 0.19, "length": 0.005},
        ],
        "timeline": [[0.02 + late, 0.06 + late, "pipeline", 1], [0.15, 0.16, "gradients", 2], [0.19, 0.199, "vote", 3]],
        "took": STEP,
        "began": BEGAN + late,
        "copies": [[0.02 + late, 0.05 + late, True], [0.17, 0.18, False]],
        "operations": [],
        "plan": {
            "every": 1,
            "beside": 0.0,
            "step": STEP,
            "idle": 0.05,
            "copy": 0.005,
            "overlapped": 0.005,
            "pause": 0.0,
            "overhead": 0.0,
            "reason": "all of it fits into 1 of 2 windows of the step",
            "upto": {"1": 12},
            "slices": 12,
        },
        "counts": {**COPIED, "trained": 24.0, "size": 1_000_000, "newest": 119},
        "every": 1,
        "layout": {"shard": "0", "copies": [rank], "role": list(range(world)), "groups": [["0", list(range(world))]], "sharded": False},
        **more,
    }


def placed(rank: int, world: int, copies: Sequence[int], *, sharded: bool = False, **more: Any) -> dict[str, Any]:
    """Return the file of a rank whose state *copies* hold."""
    layout = {"shard": str(min(copies)), "copies": list(copies), "role": [], "groups": [], "sharded": sharded}
    return rank_file(rank, world, layout=layout, **more)


def write(checkpoints: Path, *files: dict[str, Any]) -> Path:
    """Write *files* below the folder *checkpoints*, which is returned."""
    folder = checkpoints / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    for one in files:
        (folder / f"rank-{one['rank']:05d}.json").write_text(json.dumps(one))
    return checkpoints


def pipeline_files(operations: Sequence[Sequence[Sequence[Any]]]) -> list[dict[str, Any]]:
    """Return the files of the ranks of one pipeline that do these *operations*."""
    return [rank_file(rank, len(operations), operations=list(done)) for rank, done in enumerate(operations)]
