"""Cut an installation off before each thing that it does to the disk, by a real death, and have the next one heal what is left.

Runs in an interpreter of its own, since what watches over its deeds cannot be taken off again: SOURCE FOLDER WHEEL VERSION DIGEST MODULES.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import stat
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

DEEDS = frozenset({"os.mkdir", "os.symlink", "os.remove", "os.rename", "os.rmdir", "os.chmod"})
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CUT = 9


def answered(installer: ModuleType, asked: dict[str, Any], last: int) -> tuple[int, dict[str, Any]]:
    """Have a process of its own do what is *asked*, and die before it does more than *last* things; return its status, and its answer."""
    read, write = os.pipe()
    if pid := os.fork():
        os.close(write)
        with os.fdopen(read, "rb") as output:
            said = output.read()
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), json.loads(said or b"{}")
    done = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal done
        done += event in DEEDS or (event == "open" and bool(args[2] & WRITES))
        if done > last:
            os._exit(CUT)

    sys.addaudithook(hook)
    os.write(write, json.dumps(installer.act(asked)).encode())
    os._exit(0)


def found(folder: Path) -> dict[str, tuple[int, str]]:
    """Return what lies in a folder: the kind and mode of each thing, and what it holds."""
    return {
        str(path.relative_to(folder)): (
            stat.S_IFMT(path.lstat().st_mode) if path.is_symlink() else path.lstat().st_mode,
            str(path.readlink()) if path.is_symlink() else path.read_bytes().hex() if path.is_file() else "",
        )
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


def main() -> None:
    """Print what came of each cut: the status, what the next installation said, and how what it left differs from what should be."""
    source, place, wheel, version, digest, modules = sys.argv[1:]
    installer = ModuleType("installer")
    exec(compile(Path(source).read_text(encoding="utf-8"), source, "exec"), installer.__dict__)  # noqa: S102 (as it comes to a node: as text)
    sent = base64.b64encode(Path(wheel).read_bytes()).decode()
    asked = {"version": version, "digest": digest, "directory": place, "oldest": [3, 11], "seconds": 60, "import": modules, "wheel": sent}
    folder, rows, status = Path(place), [], CUT
    answered(installer, {**asked, "do": "install"}, 1 << 20)
    wanted = found(folder)
    last = 0
    while status == CUT:
        shutil.rmtree(folder)
        status, _ = answered(installer, {**asked, "do": "install"}, last)
        looked = installer.act({**asked, "do": "look"})["complete"]
        _, healed = answered(installer, {**asked, "do": "install"}, 1 << 20)
        left = found(folder)
        wrong = sorted(name for name in left.keys() | wanted.keys() if left.get(name) != wanted.get(name))
        rows.append({"status": status, "complete": looked, "healed": healed, "wrong": wrong})
        last += 1
    print(json.dumps(rows))


main()
