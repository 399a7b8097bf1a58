"""What tests of building blocks share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from holdfast.history import History
from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint.manifest import WrittenFile
from tests.fresh_history import fresh_history
from tests.ssh.conftest import Site
from tests.ssh.sshd import PROGRAM

Save = Callable[[Path, int], Path]


@pytest.fixture
def history(holdfast_home: Path) -> Iterator[History]:
    """Give the empty history of this home."""
    opened = fresh_history(holdfast_home / "history.db")
    yield opened
    opened.close()


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Give a site of real SSH servers."""
    if PROGRAM is None:
        pytest.skip("needs sshd (openssh-server)")
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    made = Site(tmp_path_factory.mktemp("site"))
    yield made
    made.close()


@pytest.fixture
def save() -> Save:
    """Give what saves a checkpoint of one small tensor below a directory, in torch's format and with our manifest."""

    def saved(directory: Path, step: int) -> Path:
        folder = manifest.folder_of(directory, step)
        with pytest.warns(UserWarning, match="single process"):
            dcp.save({"model": {"weight": torch.full((64,), float(step))}}, checkpoint_id=folder, no_dist=True)
        data = {path.name: path.read_bytes() for path in folder.iterdir()}
        files = {name: WrittenFile(size=len(held), sha256=hashlib.sha256(held).hexdigest()) for name, held in data.items()}
        (folder / manifest.MANIFEST).write_text(manifest.manifest(step, 1, 1, files).text())
        return folder

    return saved
