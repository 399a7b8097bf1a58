"""Folders of Holdfast's own: one that somebody else could change is refused, by every command, and so is one that is none."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import paths
from holdfast.errors import UnusableFolder
from holdfast.history.store import History
from tests.cli.conftest import PROGRAM, environment
from tests.mentions import mentions

OTHER = 65534
"""A user that is neither us nor root."""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a home that is there and in order, two folders down."""
    home = tmp_path / "above" / "home"
    home.mkdir(parents=True, mode=0o700)
    home.parent.chmod(0o755)
    monkeypatch.setenv("HOLDFAST_HOME", str(home))
    return home


def refused() -> str:
    """Return the words with which the home is refused."""
    with pytest.raises(UnusableFolder) as caught:
        paths.home()
    assert "HOLDFAST_HOME" in str(caught.value)
    return str(caught.value)


@as_root
@pytest.mark.parametrize("which", ["home", "above"])
def test_a_home_of_another_user_is_refused(place: Path, which: str) -> None:
    """So is one below somebody's folder, who could put another in its place."""
    owned = place if which == "home" else place.parent
    assert paths.home() == place
    os.chown(owned, OTHER, OTHER)
    assert mentions(refused(), owned, "user nobody")
    with pytest.raises(UnusableFolder):
        History.open()
    assert not (place / "history.db").exists()


@pytest.mark.parametrize("which", ["home", "above"])
@pytest.mark.parametrize("mode", [0o777, 0o707, 0o770])
def test_a_home_that_others_may_write_to_is_refused(place: Path, which: str, mode: int) -> None:
    """What they put there would be run."""
    owned = place if which == "home" else place.parent
    os.chown(owned, -1, 12345 if os.geteuid() == 0 else -1)  # no group of ours
    owned.chmod(mode)
    if os.geteuid() == 0 or mode & 0o002:
        assert mentions(refused(), "others", owned)


def test_a_home_may_lie_in_a_sticky_folder(place: Path) -> None:
    """A folder like /tmp: but it is no home itself."""
    place.parent.chmod(0o1777)
    assert paths.home() == place
    place.chmod(0o1777)
    assert mentions(refused(), "others", place)


@as_root
def test_a_link_that_another_user_could_change_is_refused(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who owns the link, or a folder on its way, says where the home lies."""
    link = tmp_path / "link"
    link.symlink_to(place)
    monkeypatch.setenv("HOLDFAST_HOME", str(link))
    assert paths.home() == link
    os.chown(place.parent, OTHER, OTHER)
    assert f"{place.parent} belongs to" in refused()
    os.chown(place.parent, 0, 0)
    os.lchown(link, OTHER, OTHER)
    assert f"{link} belongs to" in refused()
    link.unlink()
    link.symlink_to(link)
    assert "Too many levels of symbolic links" in refused()


@as_root
def test_a_home_that_another_user_makes_a_moment_before_us_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where anybody may make folders, it was not there when it was looked for."""
    place.rmdir()
    place.parent.chmod(0o1777)
    made: Callable[..., None] = Path.mkdir

    def overtaken(self: Path, *_: object, **__: object) -> None:
        if not self.exists():
            made(self)
            os.chown(self, OTHER, OTHER)

    monkeypatch.setattr(Path, "mkdir", overtaken)
    with pytest.raises(UnusableFolder, match="belongs to"):
        History.open()
    (place / "history.db").unlink(missing_ok=True)
    place.rmdir()
    with pytest.raises(UnusableFolder, match="belongs to"):
        paths.make_private(place / "jobs" / "a")


@pytest.mark.long
@as_root
def test_every_command_that_reads_or_writes_the_home_refuses_one_of_another_user(place: Path, tmp_path: Path) -> None:
    """Before anything in it is believed."""
    job = tmp_path / "job.yaml"
    job.write_text("name: a\ncommand: [python, train.py]\nnodes: 1\n")
    os.chown(place, OTHER, OTHER)
    for words in (
        ["run", str(job)],
        ["status"],
        ["ps", "-a"],
        ["stop", "a"],
        ["logs", "a"],
        ["checkpoint", "ls", "a"],
        ["demo"],
        ["admin", "metrics"],
    ):
        done = subprocess.run(
            [*PROGRAM, *words],
            env=environment(HOLDFAST_HOME=str(place)),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, mentions(done.stderr, "user nobody"), "Traceback" in done.stderr) == (2, True, False), done.stderr
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("/dev/null", "/dev/null is not a folder"),
        ("/dev/null/x", "/dev/null is not a folder"),
        ("~nosuchuser/x", "Could not determine home directory"),
        (os.fsdecode(b"/tmp/\xff"), "not UTF-8"),
        ("/" + "x" * 5000, "File name too long"),
    ],
)
def test_an_impossible_home_is_refused(given: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be kept it is not said that nothing is kept."""
    monkeypatch.setenv("HOLDFAST_HOME", given)
    assert why in refused()
