"""Hot spares and GPUs: which GPU a process has, and that no process forks with CUDA initialised. The environment stands for the GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.host.gpu_assignment import own_gpu
from tests.mentions import mentions


@pytest.mark.parametrize(
    ("visible", "local_rank", "gpu"),
    [("4,5,6,7", "2", "6"), ("GPU-a,GPU-b", "1", "GPU-b"), ("3", "2", "3"), ("", "0", None), ("-1", "0", None), ("0,1", "5", None)],
)
def test_a_process_has_the_gpu_of_its_local_rank(visible: str, local_rank: str, gpu: str | None) -> None:
    """Or the only one that it sees, whatever its number."""
    assert own_gpu({"CUDA_VISIBLE_DEVICES": visible, "LOCAL_RANK": local_rank}) == gpu


def test_two_nodes_with_parts_of_one_machine_have_different_gpus() -> None:
    """Local rank 0 of both is GPU 0 to the process: a hot spare of one is none for the other in place."""
    assert own_gpu({"CUDA_VISIBLE_DEVICES": "0,1", "LOCAL_RANK": "0"}) != own_gpu({"CUDA_VISIBLE_DEVICES": "2,3", "LOCAL_RANK": "0"})


def test_no_fork_server_forks_with_cuda_initialised(tmp_path: Path) -> None:
    """The message names what did it; imports that only ask whether there is a GPU are served, by way of NVML."""
    (tmp_path / "asks.py").write_text(
        "import os, torch\nassert os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] == '1'\ntorch.cuda.is_available()\n"
    )
    (tmp_path / "starts.py").write_text("import torch\ntorch.cuda._initialized = True\n")  # as `torch.cuda.init` leaves it
    program = (
        "import os\nfrom holdfast.runtime.process import fork_server\n"
        "print(fork_server._preload(['asks']), 'PYTORCH_NVML_BASED_CUDA_CHECK' in os.environ, flush=True)\n"
        "fork_server._preload(['starts'])\nprint('served')\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    environment.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=100)
    assert ended.stdout == "['asks'] False\n"
    assert ended.returncode == 1
    assert mentions(ended.stderr, "the import of starts", "initialised CUDA", "preload")
