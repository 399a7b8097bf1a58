"""List a checkpoint directory, and damage its files as disks and kills do."""

from __future__ import annotations

from pathlib import Path


def names(directory: Path) -> list[str]:
    """Return the names of everything in a checkpoint directory, hidden ones too."""
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


def biggest(checkpoint: Path) -> Path:
    """Return the biggest data file of a checkpoint."""
    return max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)


def flip_a_bit(path: Path, place: float = 0.5) -> None:
    """Turn one bit over in the middle of a file (or elsewhere: *place* from 0 to 1)."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)


def cut(path: Path, share: float = 0.5) -> None:
    """Cut a file off."""
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def lengthen(path: Path) -> None:
    """Put a byte behind the end of a file."""
    path.write_bytes(path.read_bytes() + b"x")


def swap_for_a_folder(path: Path) -> None:
    """Put a folder in place of a file."""
    path.unlink()
    path.mkdir()
