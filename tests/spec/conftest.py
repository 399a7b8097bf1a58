"""Files as a user writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def file(tmp_path: Path) -> Any:
    """Write a file and return its path."""

    def write(content: str | bytes, name: str = "job.yaml") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write
