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


STARTS = "import torch\ntorch.cuda._initialized = True\n"
"""As `torch.cuda.init` leaves it."""
COUNTS = """
import os, torch
if hasattr(torch._C, "_cuda_getDeviceCount"):
    torch._C._cuda_getDeviceCount()  # this marks the forks of a torch that is built with CUDA, also where it finds no GPU
else:
    server = os.getpid()
    torch._C._cuda_isInBadFork = lambda: os.getpid() != server
torch._C._cuda_getDeviceCount = lambda: {gpus}
"""


@pytest.mark.parametrize(("code", "served"), [(STARTS, ""), (COUNTS.format(gpus=1), ""), (COUNTS.format(gpus=0), "['uses']\n")])
def test_no_fork_server_forks_with_cuda_initialised(tmp_path: Path, code: str, served: str) -> None:
    """The message names what did it; imports that only ask whether there is a GPU are served, by way of NVML."""
    (tmp_path / "asks.py").write_text(
        "import os, torch\nassert os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] == '1'\ntorch.cuda.is_available()\n"
    )
    (tmp_path / "uses.py").write_text(code)
    program = (
        "import os\nfrom holdfast.runtime.process import fork_server\n"
        "print(fork_server._preload(['asks']), 'PYTORCH_NVML_BASED_CUDA_CHECK' in os.environ, flush=True)\n"
        "print(fork_server._preload(['uses']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    environment.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=100)
    assert ended.stdout == "['asks'] False\n" + served
    assert ended.returncode == int(not served), ended.stderr
    assert mentions(ended.stderr, "the import of uses", "initialised CUDA", "preload") != bool(served)
