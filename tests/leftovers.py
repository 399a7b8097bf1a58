"""Where the tests keep what nodes hold in memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

from holdfast.memstore import store_folders


def memory() -> Path:
    """Make a folder for memory stores, in memory where there is a file system for that."""
    return Path(tempfile.mkdtemp(prefix="holdfast-tests-", dir=store_folders.ROOT if store_folders.ROOT.is_dir() else None))
