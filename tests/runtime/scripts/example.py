"""Run an example unchanged, with gates before steps, and report the final state of every rank."""

from __future__ import annotations

import hashlib
import json
import runpy
import sys
from pathlib import Path

import torch
from torch import Tensor

from holdfast.runtime.groups.recovery_manager import RecoveryManager
from tests.runtime.chaos import gate
from tests.runtime.ranks import ROOT

folder, until, name = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
gates = {one for one in sys.argv[4:] if one.startswith("gate-")}
rest = [one for one in sys.argv[4:] if one not in gates]
result = folder / "result.json"
keepers: list[RecoveryManager] = []
begin = RecoveryManager.begin


def held(self: RecoveryManager, step: int) -> None:
    """Wait at the gate of *step*, if there is one, and go on."""
    keepers[:] = [self]
    if f"gate-{step}" in gates:
        gate(folder, f"gate-{step}")
    begin(self, step)


def local(tensor: Tensor) -> bytes:
    """Return the bytes that this rank holds of *tensor*."""
    own = getattr(tensor, "_local_tensor", tensor)
    return bytes(own.detach().contiguous().view(torch.uint8).numpy().tobytes())


RecoveryManager.begin = held  # type: ignore[method-assign]
torch.set_num_threads(1)
sys.path.insert(0, str(ROOT / "examples"))
sys.argv = [str(ROOT / "examples" / f"{name}.py"), "--steps", str(until), "--result", str(result), *rest]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    RecoveryManager.begin = begin  # type: ignore[method-assign]

model, moments = hashlib.sha256(), hashlib.sha256()
training, rank = keepers[0].training, keepers[0].membership.generation.rank
states = [training.optimizers[0].state[parameter] for parameter in training.model.parameters()]
for parameter, state in zip(training.model.parameters(), states, strict=True):
    model.update(local(parameter))
    moments.update(local(state["exp_avg"]) + local(state["exp_avg_sq"]))
results = {
    "model": model.hexdigest(),
    "moments": moments.hexdigest(),
    "applied": sorted({int(state["step"]) for state in states}),
    "result": json.loads(result.read_text()) if rank == 0 else None,
}
(folder / f"result-{rank}.json").write_text(json.dumps(results))
