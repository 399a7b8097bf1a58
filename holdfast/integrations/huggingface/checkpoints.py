"""The Trainer's own checkpoints: which of them are complete.

A Trainer writes into the final folder and never looks whether a save was interrupted: its ``get_last_checkpoint`` takes the newest folder.
What is missing there is then left out silently (the optimizer's state), or ends the script.
"""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Final

SENTINEL: Final = "checkpoint-is-incomplete.txt"
"""A file that transformers leaves in a checkpoint that it has not completed."""
_FOLDER: Final = re.compile(r"checkpoint-(\d+)")
_WEIGHTS: Final = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
_INDICES: Final = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_LENGTH_BYTES: Final = 8


def steps_of(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in *folder*, newest first, complete or not."""
    try:
        found = [_FOLDER.fullmatch(one.name) for one in folder.iterdir() if one.is_dir()]
    except OSError:
        return []
    return sorted((int(one[1]) for one in found if one), reverse=True)


def path_of(folder: Path, step: int) -> Path:
    """Return where the checkpoint of *step* is."""
    return folder / f"checkpoint-{step}"


def problem_of(checkpoint: Path, ranks: int, *, weights_only: bool = False) -> str:
    """Return what is wrong with *checkpoint*, of so many *ranks*; empty when it is complete. *weights_only*: it holds no optimizer."""
    if not checkpoint.is_dir():
        return "there is no such folder"
    if (checkpoint / SENTINEL).exists():
        return f"{SENTINEL} says that its save was interrupted"
    try:
        step = json.loads((checkpoint / "trainer_state.json").read_text())["global_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return "trainer_state.json is missing or damaged"
    named = _FOLDER.fullmatch(checkpoint.name)
    if named and int(named[1]) != step:
        return f"trainer_state.json is of step {step}"
    states = [] if weights_only else ["optimizer.pt", "scheduler.pt"]
    states += [] if weights_only else ["rng_state.pth"] if ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(ranks)]
    return next((problem for name in (*_weights_of(checkpoint), *states) if (problem := _problem_of_file(checkpoint / name))), "")


def _weights_of(checkpoint: Path) -> list[str]:
    """Return the names of the files that must hold the weights."""
    for index in _INDICES:
        if (checkpoint / index).exists():
            try:
                return [index, *sorted(set(json.loads((checkpoint / index).read_text())["weight_map"].values()))]
            except (OSError, ValueError, KeyError, AttributeError):
                return [f"{index} (damaged)"]
    return [next((name for name in _WEIGHTS if (checkpoint / name).exists()), _WEIGHTS[0])]


def _problem_of_file(path: Path) -> str:
    """Return what is wrong with a file: it is missing, or shorter than it says."""
    if not path.is_file():
        return f"{path.name} is missing"
    if path.suffix == ".safetensors":
        return "" if _is_whole_safetensors(path) else f"{path.name} is cut off"
    if path.suffix in (".pt", ".pth", ".bin") and not zipfile.is_zipfile(path):  # the directory of such a file is at its end
        return f"{path.name} is cut off"
    return ""


def _is_whole_safetensors(path: Path) -> bool:
    """Return whether the file is as long as its header says."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = json.loads(file.read(length))
        ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
        return path.stat().st_size == _LENGTH_BYTES + length + max(ends, default=0)
    except (OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError):
        return False
