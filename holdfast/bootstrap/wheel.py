"""Build the wheel for nodes: agent, proxy and runtime with all modules that they import, and no dependency.

It is built from the installed package, so that a node has the same version as this machine. The same sources give the same bytes.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib.util
import io
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from holdfast import __version__
from holdfast.agent.node.proxy import PROTOCOL_FILE
from holdfast.errors import NotReadable
from holdfast.protocol import PROTOCOL
from holdfast.source_tree import ROOT

NAME: Final = "holdfast_node"
ENTRIES: Final = ("holdfast.agent", "holdfast.runtime")
"""Packages that are included completely."""
VENDORED: Final = ("pynvml",)
"""Included where it is installed here: it works with older drivers, while an older one on the node may lack functions."""
ZIP_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
"""The time of each file in the archive: the first that the format allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWheel:
    """A wheel."""

    version: str
    digest: str
    """SHA-256 of its list of files and their digests: the same whenever and wherever it was built."""
    data: bytes

    @classmethod
    def read(cls, path: Path) -> NodeWheel:
        """Return the wheel in a file; raise `NotReadable` when it is not one of `holdfast_node`."""
        cure = "Name a wheel that `holdfast node bootstrap --write-wheel` has written, or leave `--wheel` out"
        try:
            data = path.read_bytes()
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                record = next(name for name in archive.namelist() if name.startswith(f"{NAME}-") and name.endswith(".dist-info/RECORD"))
                listed = archive.read(record)
                _verify(archive, listed, record)
        except OSError as error:
            raise NotReadable("the wheel", str(path), error.strerror or str(error), "Correct its name or its permissions") from error
        except (zipfile.BadZipFile, StopIteration, ValueError, KeyError) as error:
            why = str(error) if isinstance(error, ValueError) else "it is no wheel of `holdfast_node`"
            raise NotReadable("the wheel", str(path), why, cure) from error
        return cls(version=record.removeprefix(f"{NAME}-").partition(".dist-info")[0], digest=hashlib.sha256(listed).hexdigest(), data=data)


def _verify(archive: zipfile.ZipFile, listed: bytes, record: str) -> None:
    """Raise ``ValueError`` when the files of an archive differ from its list."""
    rows = {name: digest for name, digest, _ in (line.split(",") for line in listed.decode().splitlines())}
    if rows.keys() != set(archive.namelist()):
        raise ValueError("its files differ from its list")
    for name, digest in rows.items():
        if name != record and digest != _digest(archive.read(name)):
            raise ValueError(f"{name} in it is damaged")


@cache
def node_wheel() -> NodeWheel:
    """Return the wheel of this Holdfast."""
    info = f"{NAME}-{__version__}.dist-info"
    files = {**_sources(), **_metadata(info)}
    rows = [f"{name},{_digest(data)},{len(data)}" for name, data in sorted(files.items())]
    listed = ("\n".join([*rows, f"{info}/RECORD,,"]) + "\n").encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in [*sorted(files.items()), (f"{info}/RECORD", listed)]:
            entry = zipfile.ZipInfo(name, ZIP_EPOCH)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
            archive.writestr(entry, data)
    return NodeWheel(version=__version__, digest=hashlib.sha256(listed).hexdigest(), data=buffer.getvalue())


def _metadata(info: str) -> dict[str, bytes]:
    metadata = f"Metadata-Version: 2.1\nName: {NAME.replace('_', '-')}\nVersion: {__version__}\nRequires-Python: >=3.11\n"
    summary = "Summary: The part of Holdfast that runs on nodes: agent and runtime.\nLicense: Apache-2.0\n"
    wheel = "Wheel-Version: 1.0\nGenerator: holdfast\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    own = {f"{info}/INSTALLER": b"holdfast\n", f"{info}/{PROTOCOL_FILE}": b"%d\n" % PROTOCOL}
    return {f"{info}/METADATA": (metadata + summary).encode(), f"{info}/WHEEL": wheel.encode(), **own}


def _digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _sources() -> dict[str, bytes]:
    """Return every file of the wheel, by its path below site-packages."""
    folders = os.walk(ROOT / "holdfast", followlinks=True)  # in a source tree `holdfast.detectors` is a link
    files = [Path(folder, name) for folder, _, names in folders for name in names if name.endswith(".py")]
    known = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    paths = [known[name] for name in closure(known)]
    tables = [table for folder in {path.parent for path in paths} for table in folder.glob("*.toml")]  # what the detectors read
    found = {str(path.relative_to(ROOT)): path.read_bytes() for path in (*paths, *tables)}
    for name in VENDORED:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin:
            found[f"{name}.py"] = Path(spec.origin).read_bytes()
    return found


def closure(known: Mapping[str, Path]) -> list[str]:
    """Return the modules that a node needs: the entries, and what any of them imports, at import time or later."""
    pending = [name for name in known if name in ENTRIES or name.startswith(tuple(f"{entry}." for entry in ENTRIES))]
    found: set[str] = set()
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found.add(name)
        packages = {name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)}  # importing a module imports them
        pending += (packages | (set() if name == "holdfast" else _imports(known[name], known))) - found
    return sorted(found)


def _imports(file: Path, known: Mapping[str, Path]) -> set[str]:
    """Return our modules that *file* imports, anywhere in it; our sources use absolute imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    return found & known.keys()
