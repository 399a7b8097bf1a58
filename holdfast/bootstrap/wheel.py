"""The wheel for nodes: agent, gate and runtime with all that they import, and nothing that has to be installed beside it.

Made from the installed package itself, so that a node has what this machine has. The same sources give the same bytes.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib.util
import io
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from holdfast import __version__
from holdfast.agent.node.venvs import SPOKEN
from holdfast.errors import NotReadable
from holdfast.protocol import PROTOCOL
from holdfast.source_tree import ROOT

NAME: Final = "holdfast_node"
ENTRIES: Final = ("holdfast.agent", "holdfast.runtime")
"""Packages that go whole."""
OURS: Final = frozenset({"holdfast", "detectors"})
LENT: Final = ("pynvml",)
"""Goes along where it is installed here: it works with older drivers, while an older one of the node's own may lack what is asked."""
MOMENT: Final = (1980, 1, 1, 0, 0, 0)
"""When each file in the archive was written, as far as it tells: the first moment that it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWheel:
    """A wheel, whole."""

    version: str
    digest: str
    """SHA-256 of its list of files with their own digests: what it is, whenever and wherever it was made."""
    data: bytes

    @classmethod
    def read(cls, path: Path) -> NodeWheel:
        """Return the wheel in a file; raise `NotReadable` when it is none of ours."""
        cure = "Name a wheel that `holdfast nodes bootstrap --write-wheel` has written, or leave `--wheel` out"
        try:
            data = path.read_bytes()
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                record = next(name for name in archive.namelist() if name.startswith(f"{NAME}-") and name.endswith(".dist-info/RECORD"))
                listed = archive.read(record)
                _compare(archive, listed, record)
        except OSError as error:
            raise NotReadable("the wheel", str(path), error.strerror or str(error), "Mend its name or its permissions") from error
        except (zipfile.BadZipFile, StopIteration, ValueError, KeyError) as error:
            why = str(error) if isinstance(error, ValueError) else "it is no wheel of `holdfast_node`"
            raise NotReadable("the wheel", str(path), why, cure) from error
        return cls(version=record.removeprefix(f"{NAME}-").partition(".dist-info")[0], digest=hashlib.sha256(listed).hexdigest(), data=data)


def _compare(archive: zipfile.ZipFile, listed: bytes, record: str) -> None:
    """Refuse an archive whose files are not what its list says."""
    rows = {name: digest for name, digest, _ in (line.split(",") for line in listed.decode().splitlines())}
    if rows.keys() != set(archive.namelist()):
        raise ValueError("its files are not those that it lists")
    for name, digest in rows.items():
        if name != record and digest != _digest(archive.read(name)):
            raise ValueError(f"{name} in it is damaged")


@cache
def node_wheel() -> NodeWheel:
    """Return the wheel of this Holdfast."""
    info = f"{NAME}-{__version__}.dist-info"
    files = {**_sources(), **_about(info)}
    rows = [f"{name},{_digest(data)},{len(data)}" for name, data in sorted(files.items())]
    listed = ("\n".join([*rows, f"{info}/RECORD,,"]) + "\n").encode()
    taken = io.BytesIO()
    with zipfile.ZipFile(taken, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in [*sorted(files.items()), (f"{info}/RECORD", listed)]:
            entry = zipfile.ZipInfo(name, MOMENT)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
            archive.writestr(entry, data)
    return NodeWheel(version=__version__, digest=hashlib.sha256(listed).hexdigest(), data=taken.getvalue())


def _about(info: str) -> dict[str, bytes]:
    metadata = f"Metadata-Version: 2.1\nName: {NAME.replace('_', '-')}\nVersion: {__version__}\nRequires-Python: >=3.11\n"
    summary = "Summary: The part of Holdfast that runs on nodes: agent and runtime.\nLicense: Apache-2.0\n"
    wheel = "Wheel-Version: 1.0\nGenerator: holdfast\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    own = {f"{info}/INSTALLER": b"holdfast\n", f"{info}/{SPOKEN}": b"%d\n" % PROTOCOL}
    return {f"{info}/METADATA": (metadata + summary).encode(), f"{info}/WHEEL": wheel.encode(), **own}


def _digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _sources() -> dict[str, bytes]:
    """Return every file that goes along, by its place below site-packages."""
    known = _known(ROOT)
    wanted = closure(known)
    paths = [known[name] for name in wanted]
    tables = [table for folder in {path.parent for path in paths} for table in folder.glob("*.toml")]  # what the detectors read
    files = {str(path.relative_to(ROOT)): path.read_bytes() for path in (*paths, *tables)}
    for name in LENT:
        found = importlib.util.find_spec(name)
        if found is not None and found.origin:
            files[f"{name}.py"] = Path(found.origin).read_bytes()
    return files


def _known(root: Path) -> dict[str, Path]:
    """Return the file of each of our modules."""
    files = [file for top in OURS for file in (root / top).rglob("*.py")]
    return {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def closure(known: Mapping[str, Path]) -> list[str]:
    """Return the modules that a node needs: the entries, and whatever any of them imports, early or late."""
    left = [name for name in known if name in ENTRIES or name.startswith(tuple(f"{entry}." for entry in ENTRIES))]
    found: set[str] = set()
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        left += {*_above(name), *(() if name in OURS else _imports(known[name], known))} - found
    return sorted(found)


def _above(name: str) -> Iterator[str]:
    """Yield the packages that *name* lies in: importing it imports them."""
    while name := name.rpartition(".")[0]:
        yield name


def _imports(file: Path, known: Mapping[str, Path]) -> set[str]:
    """Return our modules that *file* imports, anywhere in it; sources of ours name them from the top."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    return found & known.keys()
