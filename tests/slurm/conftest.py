"""One real Slurm for all tests of what talks to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.slurm_server import MISSING, SlurmServer, is_installed


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmServer]:
    """Give a running Slurm of two nodes, which it believes to have two GPUs and one.

    Without the packages the test fails, so that half of the claims is not dropped in silence.
    """
    if not is_installed():
        pytest.fail(MISSING)
    server = SlurmServer(2, silence=30, gpus=(2, 1))
    try:
        server.start()
        yield server
    finally:
        server.remove()
