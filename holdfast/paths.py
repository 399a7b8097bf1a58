"""Where Holdfast keeps its files. One variable moves all of them: ``HOLDFAST_HOME`` (default ``~/.holdfast``).

Whoever may change these files can run programs as this user, as a flow does what its job's description and the history say. So the folder
is checked at each use, and one that another user could change is refused.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from holdfast.errors import UnusableFolder

MAX_LINKS: Final = 40
"""Symbolic links that a path may lead through, as in the kernel."""
OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def home() -> Path:
    """Return the folder with everything that Holdfast keeps; raise `UnusableFolder` for one that another user could change."""
    return own_folder("HOLDFAST_HOME", os.environ.get("HOLDFAST_HOME") or "~/.holdfast")


def own_folder(variable: str, given: str) -> Path:
    """Return the folder that *variable* names, which may not exist; raise `UnusableFolder` if another user could change it."""
    cure = f"Name a folder of your own in {variable}"
    try:
        given.encode()
        folder = Path(given).expanduser().absolute()
        flaw = next((flaw for at, facts in _path_entries(folder) if (flaw := _flaw(at, facts, last=at == folder))), "")
    except UnicodeEncodeError:
        raise UnusableFolder(variable, ascii(given), "its name is not UTF-8", cure) from None
    except RuntimeError as error:
        raise UnusableFolder(variable, given, f"{error}".rstrip("."), f"{cure}, by its full path") from error
    except OSError as error:
        raise UnusableFolder(
            variable, given, f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", cure
        ) from error
    if flaw:
        raise UnusableFolder(variable, given, flaw, cure)
    return folder


def _path_entries(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield what the path to *folder* leads through, as far as it exists: folders, links, and what the links lead through."""
    rest, at, links = [*reversed(folder.parts[1:])], Path("/"), 0
    yield at, at.lstat()
    while rest:
        name = rest.pop()
        at = at.parent if name == ".." else at / name
        try:
            facts = at.lstat()
        except FileNotFoundError:
            return
        if stat.S_ISLNK(facts.st_mode):
            links += 1
            if links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
            yield at, facts
            target = at.readlink()
            rest += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            at = Path("/") if target.is_absolute() else at.parent
        else:
            yield at, facts
    if not links:
        return
    yield folder, at.lstat()  # under its own name


def _flaw(at: Path, facts: os.stat_result, *, last: bool) -> str:
    """Return why another user could change what is at *at*, or below; *last*: it is the folder itself, where no new file may appear."""
    if not stat.S_ISDIR(facts.st_mode) and not stat.S_ISLNK(facts.st_mode):
        return f"{at} is not a folder"
    if facts.st_uid not in {0, os.geteuid()} and not (_is_unmapped(facts.st_uid) and not last):
        return f"{at} belongs to {_user(facts.st_uid)}, who could run programs as you"
    others = 0 if stat.S_ISLNK(facts.st_mode) else facts.st_mode & OTHERS_WRITE
    if others & stat.S_IWGRP and _is_own_group(facts.st_gid):
        others &= ~stat.S_IWGRP
    if others and (last or not facts.st_mode & stat.S_ISVTX):
        return f"others may write to {at}, and so could run programs as you (`chmod go-w` there prevents that)"
    return ""


def _user(uid: int) -> str:
    with suppress(KeyError):
        return f"user {pwd.getpwuid(uid).pw_name}"
    return f"the user with the number {uid}"


def _is_own_group(gid: int) -> bool:
    """Return whether a group is this user's private one; many systems make one for each user."""
    with suppress(KeyError):
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
        return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    return False


def _is_unmapped(uid: int) -> bool:
    """Return whether *uid* stands for all users outside this user namespace: in a container, the host's root is one of them."""
    with suppress(OSError, ValueError):
        known = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines())
        return known < 2**32 - 1 and uid == int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    return False


def history_url() -> str:
    """Return the history's database URL: ``HOLDFAST_HISTORY``, or SQLite under `home`."""
    return os.environ.get("HOLDFAST_HISTORY") or f"sqlite:///{home() / 'history.db'}"


def job_directory(job: str) -> Path:
    """Return the folder of *job*: its flow's log, and its checkpoints unless the job names another folder."""
    return home() / "jobs" / job


def make_private(folder: Path) -> None:
    """Make *folder* and its missing parents, readable by this user only; raise ``OSError`` when that fails.

    A job's folder has its description, its logs and its token. One that exists keeps its owner, who must be this user or root, and loses
    the permissions of others.
    """
    for one in reversed([folder, *folder.parents]):
        if not one.exists():
            one.mkdir(mode=0o700, exist_ok=True)
    facts = folder.stat()
    if facts.st_uid == os.getuid() and facts.st_mode & 0o077:
        folder.chmod(facts.st_mode & 0o700)
    own_folder("HOLDFAST_HOME", str(folder))  # in a folder like /tmp, another user may have made it a moment before


def outbox_file(job: str) -> Path:
    """Return the file for rows of *job* that the database could not accept."""
    return job_directory(job) / "history.outbox.jsonl"


def cluster_directory(cluster: str) -> Path:
    """Return the folder with the nodes of a local *cluster*."""
    return home() / "clusters" / cluster
