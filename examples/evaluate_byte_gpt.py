"""Evaluate a checkpoint of `byte_gpt.py`: load the model from it, and print the loss on a text as JSON.

`evaluate_checkpoint` of `holdfast.workflows` sets the path of the checkpoint; by hand:
`HOLDFAST_CHECKPOINT=.../step-00000300 python examples/evaluate_byte_gpt.py --text held_out.txt`.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from byte_gpt import ByteGPT, Windows, text_of  # type: ignore[import-not-found] # next to this script
from torch.utils.data import DataLoader

BATCH = 32


def main() -> None:
    """Print the mean loss per byte over the text."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--bytes", type=int, default=20_000, help="maximum bytes of text")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    given = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")

    model = ByteGPT(given.width, given.layers, given.heads, given.context)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=os.environ["HOLDFAST_CHECKPOINT"], no_dist=True)  # in one process, however many ranks wrote it
    model.load_state_dict(state["model"])
    windows = Windows(text_of(given.text, given.bytes), given.context)
    total, seen = 0.0, 0
    with torch.no_grad():
        for text, following in DataLoader(windows, BATCH):
            total += float(model.eval()(text, following)) * len(text)
            seen += len(text)
    print(json.dumps({"loss": total / seen, "bytes": seen * given.context}))


if __name__ == "__main__":
    main()
