"""A stand-in for NVIDIA's library, made by the system's compiler and asked through the real pynvml; and small trees of /proc and /sys."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.detectors.codec import unpacked
from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.gpu_readings import Gpu, GpuReading
from holdfast.probe.readers.local import read_node

ROOT = Path(__file__).parent.parent.parent
SOURCE = Path(__file__).with_name("nvml_stand_in.c")
SONAME = "libnvidia-ml.so.1"


def built(folder: Path, *flags: str) -> Path:
    """Build the stand-in into *folder*; skip where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler for the stand-in of NVIDIA's library")
    options = ["-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{SONAME}", *flags]
    subprocess.run([compiler, *options, "-o", folder / SONAME, SOURCE], check=True)
    return folder


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder of a library of today."""
    return built(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="session")
def old_nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder of a library that lacks what older drivers lack."""
    return built(tmp_path_factory.mktemp("old-nvml"), "-DOLD")


LOOK = """
import json, os, sys
from pathlib import Path
from holdfast.detectors.codec import packed
from holdfast.probe.readers.gpus import read_gpus
for line in sys.stdin:
    os.environ["NVML_STAND_IN_STATE"], root = json.loads(line)
    print(json.dumps(packed(read_gpus(Path(root)))), flush=True)
"""


@pytest.fixture(scope="session")
def looker(nvml_library: Path) -> Iterator[subprocess.Popen[str]]:
    """Give a process that has the stand-in loaded and reads its GPUs on request."""
    environment, pipe = {**os.environ, "LD_LIBRARY_PATH": str(nvml_library)}, subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", LOOK], cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True) as child:
        yield child


@dataclass(frozen=True, slots=True)
class StandIn:
    """What a test does to the GPUs, and how it reads them."""

    state: Path
    events: Path
    root: Path
    looker: subprocess.Popen[str]

    def say(self, *lines: str) -> None:
        """Have the GPUs be as *lines* say, and healthy in all else."""
        self.state.write_text("\n".join(lines) + "\n")

    def happens(self, gpu: int, xid: int) -> None:
        """Have an Xid happen now."""
        with self.events.open("a") as file:
            file.write(f"{gpu} {xid}\n")

    def reading(self) -> GpuReading:
        """Look at the GPUs."""
        asked, answers = self.looker.stdin, self.looker.stdout
        assert asked is not None
        assert answers is not None
        asked.write(json.dumps([str(self.state), str(self.root)]) + "\n")
        asked.flush()
        return unpacked(GpuReading, json.loads(answers.readline()))

    def reading_of_the_program(self) -> GpuReading:
        """Read the GPUs by a new process of the program for nodes."""
        found = read_node("n0", root=self.root).gpus
        assert isinstance(found, GpuReading), found
        return found

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs seen."""
        found = self.reading().gpus
        assert not isinstance(found, Unknown), found
        return found


@pytest.fixture
def stand_in(nvml_library: Path, looker: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Have programs that this test starts find the stand-in, with healthy GPUs."""
    made = StandIn(state=tmp_path / "state", events=tmp_path / "events", root=tmp_path / "root", looker=looker)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml_library))
    monkeypatch.setenv("NVML_STAND_IN_STATE", str(made.state))
    monkeypatch.setenv("NVML_STAND_IN_EVENTS", str(made.events))
    made.say()
    made.events.touch()
    made.root.mkdir()
    return made


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Write small files below a root of the test's own, and return that root."""

    def write(files: dict[str, str]) -> Path:
        root = tmp_path / "tree"
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        root.mkdir(exist_ok=True)
        return root

    return write
