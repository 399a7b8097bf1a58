"""What runs on a node to set it up: it makes an environment of the interpreter that runs it, and unpacks the wheel into it.

Its source travels to the node as text, to whatever `python3` is there: it uses nothing of ours, and before it has said that the
interpreter is too old nothing that Python 3.7 does not have.

    DIRECTORY/env                 link to the environment in use; changed in one step
    DIRECTORY/envs/VERSION-...    one for each wheel and interpreter; agents that run in an older one keep it
    DIRECTORY/bootstrap.lock      held while something is changed: several nodes may share one home
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
"""Older environments that stay although nobody on this node runs in them: a node that shares the folder may."""
PROBE_SECONDS = 60.0
LENT = "holdfast_node_lent.pth"


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Do what is *asked*; where the node refuses it, say how."""
    try:
        return act(asked)
    except OSError as error:
        return {"failed": f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", "errno": error.errno}


def act(asked: dict[str, Any]) -> dict[str, Any]:
    """Look at what is there, or have it be what it should be."""
    found = ".".join(str(part) for part in sys.version_info[:3])
    if list(sys.version_info[:2]) < asked["oldest"]:
        oldest = ".".join(str(part) for part in asked["oldest"])
        return {"failed": f"its interpreter is Python {found}, jobs need {oldest} or newer", "python": found}
    place = InstallFolder(asked)
    if asked["do"] == "look":
        return {"whole": place.is_whole(), "in_use": place.in_use(), "python": found, "path": str(place.link)}
    place.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    with place.locked(asked["seconds"]):
        if place.is_whole():  # another node that shares this folder was quicker
            return {"done": "kept", "in_use": place.in_use(), "python": found, "path": str(place.link)}
        before = place.in_use()
        mended = place.environment.exists()
        place.install(base64.b64decode(asked["wheel"]))
        why = place.try_out(asked["proof"])
        if why:
            return {"failed": "Holdfast does not start there: " + why, "python": found}
        place.switch()
        place.tidy()
    return {
        "done": "mended" if mended else "installed",
        "before": before,
        "in_use": place.in_use(),
        "python": found,
        "path": str(place.link),
    }


class InstallFolder:
    """The folder for Holdfast on this node, and the environment in it that is wanted."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.directory = Path(asked["directory"]).expanduser().absolute()
        self.digest = asked["digest"]
        who = json.dumps([sys.version, os.path.realpath(sys.executable), sys.prefix])
        name = f"{asked['version']}-{self.digest[:12]}-{hashlib.sha256(who.encode()).hexdigest()[:8]}"
        self.environment = self.directory / "envs" / name
        self.link = self.directory / "env"
        self.packages = self.environment / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        self.record = self.packages / f"holdfast_node-{asked['version']}.dist-info" / "RECORD"

    def in_use(self) -> str:
        """Return which environment whoever comes is given; nothing where there is none."""
        try:
            return self.link.readlink().name
        except OSError:
            return ""

    def is_whole(self) -> bool:
        """Tell whether the wanted environment is the one in use, with every file as it should be."""
        return self.in_use() == self.environment.name and self._is_built() and not self._wrong()

    def locked(self, seconds: float) -> Lock:
        """Return the lock of the folder."""
        return Lock(self.directory / "bootstrap.lock", seconds)

    def install(self, wheel: bytes) -> None:
        """Make the environment, or mend what is wrong with it."""
        if not self._is_made():
            if self.environment.exists():
                shutil.rmtree(str(self.environment))  # nobody was ever given it: one that is given is made
            venv.EnvBuilder(system_site_packages=True, symlinks=True, with_pip=False).create(str(self.environment))
            self._write_interpreter()
        if self._lent():
            put(self.packages / LENT, self._lent())
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            names = archive.namelist()
            for name in sorted(names, key=lambda name: name.endswith("/RECORD")):  # the list last: it says that all is there
                put(self.packages / name, archive.read(name))

    def try_out(self, proof: str) -> str:
        """Return why the environment cannot run what it is for; nothing when it can."""
        words = [str(self.environment / "bin" / "python"), "-I", "-c", "import " + proof]
        try:
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_SECONDS, check=False, cwd="/")
        except subprocess.TimeoutExpired:
            return f"it took more than {PROBE_SECONDS:g} s to start"
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return (said[-1] if said else f"status {done.returncode}") if done.returncode else ""

    def switch(self) -> None:
        """Give the environment to whoever comes from now on."""
        part = self.directory / ".env.part"  # one name: who died of it leaves nothing that stays, and the lock keeps all others away
        if part.is_symlink():
            part.unlink()
        part.symlink_to(Path("envs") / self.environment.name)
        part.replace(self.link)

    def tidy(self) -> None:
        """Remove older environments that nobody runs in, but for the newest."""
        others = [path for path in self.environment.parent.iterdir() if path != self.environment and path.is_dir()]
        others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in others[KEPT:]:
            if not runs_in(path):
                shutil.rmtree(str(path), ignore_errors=True)

    def _is_made(self) -> bool:
        """Tell whether an environment was made to its end: our own `bin/python` comes last."""
        try:
            config = (self.environment / "pyvenv.cfg").read_text(encoding="utf-8")
        except OSError:
            return False
        if "include-system-site-packages = true" not in config:  # `venv` writes "false" first
            return False
        folder = self.environment / "bin"
        return self.packages.is_dir() and (folder / "python3").exists() and digest_of(folder / "python") == encoded(self._interpreter())

    def _is_built(self) -> bool:
        return self._is_made() and (not self._lent() or digest_of(self.packages / LENT) == encoded(self._lent()))

    def _wrong(self) -> list[str]:
        """Return the files that are not as the list says; the list itself, where it is another one."""
        try:
            listed = self.record.read_bytes()
        except OSError:
            return ["RECORD"]
        if hashlib.sha256(listed).hexdigest() != self.digest:
            return ["RECORD"]
        rows = [line.split(",") for line in listed.decode().splitlines()]
        return [name for name, digest, _ in rows if digest and digest != digest_of(self.packages / name)]

    def _lent(self) -> bytes:
        """Return what lets packages of an interpreter that is in an environment itself be found too: torch may be nowhere else."""
        if sys.prefix == sys.base_prefix:
            return b""
        return "".join(f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages()).encode()

    def _interpreter(self) -> bytes:
        """Return what starts the interpreter by its own path: else who comes through the link would change environments with it."""
        return f'#!/bin/sh\nexec {shlex.quote(str(self.environment / "bin" / "python3"))} "$@"\n'.encode()

    def _write_interpreter(self) -> None:
        """Have `bin/python` be ours."""
        folder = self.environment / "bin"
        for path in folder.glob("python*"):
            path.unlink()
        (folder / "python3").symlink_to(getattr(sys, "_base_executable", "") or sys.executable)
        put(folder / "python", self._interpreter(), 0o755)


class Lock:
    """The lock of a folder, among all nodes that share it."""

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
                    raise OSError(errno.EBUSY, "somebody else is setting it up, or died of it on another node", str(self.path)) from None
                time.sleep(0.05)
            except OSError:
                self.file.close()
                raise
            else:
                return

    def __exit__(self, *_: object) -> None:
        self.file.close()


def put(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Have a file hold *data*: in one step, and not at all where it does already, as somebody may be reading it."""
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
    """Return the digest of *data* as wheels write it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def digest_of(path: Path) -> str:
    """Return the digest of a file; nothing where there is none."""
    try:
        return encoded(path.read_bytes())
    except OSError:
        return ""


def runs_in(environment: Path) -> bool:
    """Tell whether a process of this node runs in an environment."""
    sign = os.fsencode(str(environment)) + b"/"
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if sign in (entry / "cmdline").read_bytes() or sign in (entry / "environ").read_bytes():
                return True
        except OSError:
            continue
    return False
