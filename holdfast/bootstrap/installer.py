"""The program that installs Holdfast on its node: make an environment of the interpreter that runs it, and unpack the wheel into it.

Its source is sent as text to whatever `python3` is there: it uses no module of ours, and until it has reported that the
interpreter is too old nothing that Python 3.7 does not have.

    DIRECTORY/env                 link to the environment in use; changed atomically
    DIRECTORY/envs/VERSION-...    one for each wheel and interpreter; agents that run in an older one keep it
    DIRECTORY/bootstrap.lock      held during changes: several nodes may share one home
"""

from __future__ import annotations

import base64
import errno
import fcntl
import hashlib
import io
import json
import os
import shlex
import shutil
import site
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path
from typing import Any

KEPT = 2
"""Older environments that are kept although no process of this node uses them: a node that shares the folder may."""
IMPORT_SECONDS = 60.0
PARENT_PATHS = "holdfast_node_parent.pth"
"""Makes the packages importable of the environment that the interpreter itself is in."""


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Do what is *asked*; return the error where the node refuses it."""
    try:
        return act(asked)
    except OSError as error:
        return {"failed": f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", "errno": error.errno}


def act(asked: dict[str, Any]) -> dict[str, Any]:
    """Look what is installed, or install what is missing."""
    found = ".".join(str(part) for part in sys.version_info[:3])
    if list(sys.version_info[:2]) < asked["oldest"]:
        oldest = ".".join(str(part) for part in asked["oldest"])
        return {"failed": f"its interpreter is Python {found}, jobs need {oldest} or newer", "python": found}
    place = InstallFolder(asked)
    facts = {"python": found, "path": str(place.link)}
    if asked["do"] == "look":
        return {"complete": place.is_complete(), "in_use": place.in_use(), **facts}
    place.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    with Lock(place.directory / "bootstrap.lock", asked["seconds"]):
        if place.is_complete():  # another node that shares this folder was quicker
            return {"done": "kept", "in_use": place.in_use(), **facts}
        before, existed = place.in_use(), place.environment.exists()
        place.install(base64.b64decode(asked["wheel"]))
        why = place.import_problem(asked["import"])
        if why:
            return {"failed": "Holdfast does not start there: " + why, "python": found}
        place.switch()
        place.remove_older()
    return {"done": "repaired" if existed else "installed", "before": before, "in_use": place.in_use(), **facts}


class InstallFolder:
    """Holdfast's folder on this node, and the environment in it for the wheel."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.directory = Path(asked["directory"]).expanduser().absolute()
        self.digest = asked["digest"]
        identity = json.dumps([sys.version, os.path.realpath(sys.executable), sys.prefix])
        name = f"{asked['version']}-{self.digest[:12]}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
        self.environment = self.directory / "envs" / name
        self.link = self.directory / "env"
        self.packages = self.environment / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        self.record = self.packages / f"holdfast_node-{asked['version']}.dist-info" / "RECORD"

    def in_use(self) -> str:
        """Return the name of the environment in use; nothing where there is none."""
        try:
            return self.link.readlink().name
        except OSError:
            return ""

    def is_complete(self) -> bool:
        """Return whether the environment for the wheel is the one in use, with every file as it should be."""
        paths = self._parent_paths()
        has_paths = not paths or digest_of(self.packages / PARENT_PATHS) == encoded(paths)
        return self.in_use() == self.environment.name and self._is_made() and has_paths and not self._damaged()

    def install(self, wheel: bytes) -> None:
        """Make the environment, or repair it."""
        if not self._is_made():
            if self.environment.exists():
                shutil.rmtree(str(self.environment))  # it was never in use: an environment in use is complete
            venv.EnvBuilder(system_site_packages=True, symlinks=True, with_pip=False).create(str(self.environment))
            folder = self.environment / "bin"
            for path in folder.glob("python*"):
                path.unlink()
            (folder / "python3").symlink_to(getattr(sys, "_base_executable", "") or sys.executable)
            put(folder / "python", self._interpreter(), 0o755)
        if self._parent_paths():
            put(self.packages / PARENT_PATHS, self._parent_paths())
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            names = archive.namelist()
            for name in sorted(names, key=lambda name: name.endswith("/RECORD")):  # the list last: it says that everything is there
                put(self.packages / name, archive.read(name))

    def import_problem(self, modules: str) -> str:
        """Return why the environment cannot import *modules*; nothing when it can."""
        command = [str(self.environment / "bin" / "python"), "-I", "-c", "import " + modules]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=IMPORT_SECONDS, check=False, cwd="/")
        except subprocess.TimeoutExpired:
            return f"it took more than {IMPORT_SECONDS:g} s to start"
        errors = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return (errors[-1] if errors else f"status {done.returncode}") if done.returncode else ""

    def switch(self) -> None:
        """Have the environment used from now on."""
        part = self.directory / ".env.part"  # always the same name: nothing accumulates after a crash, and the lock excludes others
        if part.is_symlink():
            part.unlink()
        part.symlink_to(Path("envs") / self.environment.name)
        part.replace(self.link)

    def remove_older(self) -> None:
        """Remove older environments that no process uses, except the newest ones."""
        others = [path for path in self.environment.parent.iterdir() if path != self.environment and path.is_dir()]
        others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in others[KEPT:]:
            if not is_used(path):
                shutil.rmtree(str(path), ignore_errors=True)

    def _is_made(self) -> bool:
        """Return whether the environment was made completely: our own `bin/python` comes last."""
        try:
            config = (self.environment / "pyvenv.cfg").read_text(encoding="utf-8")
        except OSError:
            return False
        if "include-system-site-packages = true" not in config:  # `venv` writes "false" first
            return False
        folder = self.environment / "bin"
        return self.packages.is_dir() and (folder / "python3").exists() and digest_of(folder / "python") == encoded(self._interpreter())

    def _damaged(self) -> list[str]:
        """Return the files that differ from the wheel's list; the list itself, where it is of another wheel."""
        try:
            listed = self.record.read_bytes()
        except OSError:
            return ["RECORD"]
        if hashlib.sha256(listed).hexdigest() != self.digest:
            return ["RECORD"]
        rows = [line.split(",") for line in listed.decode().splitlines()]
        return [name for name, digest, _ in rows if digest and digest != digest_of(self.packages / name)]

    def _parent_paths(self) -> bytes:
        """Return the content of `PARENT_PATHS`; nothing for an interpreter outside an environment. Torch may be installed only there."""
        if sys.prefix == sys.base_prefix:
            return b""
        return "".join(f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages()).encode()

    def _interpreter(self) -> bytes:
        """Return a script that starts the interpreter by its own path: through the link, a process would change environments with it."""
        return f'#!/bin/sh\nexec {shlex.quote(str(self.environment / "bin" / "python3"))} "$@"\n'.encode()


class Lock:
    """A lock of a folder, among all nodes that share it."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.until = path, time.monotonic() + seconds

    def __enter__(self) -> None:
        self.file = self.path.open("ab")
        while True:
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > self.until:
                    self.file.close()
                    raise OSError(errno.EBUSY, "another process is installing it, or died there on another node", str(self.path)) from None
                time.sleep(0.05)
            except OSError:
                self.file.close()
                raise
            else:
                return

    def __exit__(self, *_: object) -> None:
        self.file.close()


def put(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write *data* to a file: atomically, and not at all where it has that content, as another process may be reading it."""
    if digest_of(path) == encoded(data):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.chmod(mode)
    part.replace(path)


def encoded(data: bytes) -> str:
    """Return the digest of *data* in the format of wheels."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def digest_of(path: Path) -> str:
    """Return the digest of a file; nothing where there is none."""
    try:
        return encoded(path.read_bytes())
    except OSError:
        return ""


def is_used(environment: Path) -> bool:
    """Return whether a process of this node uses an environment."""
    prefix = os.fsencode(str(environment)) + b"/"
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if prefix in (entry / "cmdline").read_bytes() or prefix in (entry / "environ").read_bytes():
                return True
        except OSError:
            continue
    return False
