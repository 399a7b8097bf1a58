"""Where the tests keep what nodes hold in memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

from holdfast.memstore import shared_memory


def memory() -> Path:
    """Make a folder for vaults, in memory where there is a file system for that."""
    return Path(tempfile.mkdtemp(prefix="holdfast-tests-", dir=shared_memory.ROOT if shared_memory.ROOT.is_dir() else None))
