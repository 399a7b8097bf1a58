"""The page in a real browser: nothing complains, nothing is fetched, everything that matters can be seen, at every width and by night."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from holdfast.accounting.bill import bill
from holdfast.history.store import History
from holdfast.report import write_cost, write_profile
from holdfast.report.profiles import read
from tests.report import filled, profile_files
from tests.report.test_layout import recorded

pytestmark = pytest.mark.integration

BROWSER = next((found for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (found := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium on the PATH")
WIDE, NARROW = 1240, 390
INSIDE = "node-2 replaces node-1"
"""Stands inside an incident that is closed at first."""

LOOK = """<script>
addEventListener("load", () => {
  const shown = element => element.checkVisibility();
  const words = document.body.innerText;
  for (const one of document.querySelectorAll("details")) one.open = true;
  const box = element => element.getBoundingClientRect();
  const seen = {
    words,
    opened: document.body.innerText,
    width: innerWidth,
    overflow: document.documentElement.scrollWidth - innerWidth,
    fetched: performance.getEntriesByType("resource").map(one => one.name).filter(name => !name.startsWith("data:")),
    drawings: [...document.querySelectorAll("svg.drawing")].filter(shown).map(one => ({
      name: one.getAttribute("aria-labelledby").split("-title")[0],
      width: box(one).width,
      letters: Math.min(...[...one.querySelectorAll("text")].map(text => box(text).height)),
      ink: getComputedStyle(one.querySelector("text")).fill,
    })),
    clipped: [...document.querySelectorAll(".scroll")].filter(one => one.scrollWidth > one.clientWidth + 1)
      .map(one => one.getAttribute("aria-label")),
    pills: Math.max(0, ...[...document.querySelectorAll("td .chip")].filter(shown).map(one => box(one).height)),
    reasons: [...document.querySelectorAll(".members .why")].filter(shown).map(one => box(one).width),
    paper: getComputedStyle(document.querySelector(".card")).backgroundColor,
  };
  parent.postMessage(JSON.stringify(seen), "*");
});
</script>"""
FRAME = """<!DOCTYPE html><title>frame</title>
<script>addEventListener("message", got => document.documentElement.replaceChildren(got.data))</script>
<iframe src="page.html" style="width: {width}px; height: 2000px; border: 0"></iframe>"""
"""A window is never as narrow as a phone; a frame is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a browser made of a page: what it *saw*, and what it *complained* of."""

    saw: dict[str, Any]
    complained: list[str]


@pytest.fixture
def look(tmp_path: Path) -> Callable[..., Look]:
    """Return a function that opens a page in Chromium and looks."""

    def open_page(source: str, *, width: int = WIDE, night: bool = False) -> Look:
        assert BROWSER is not None
        (tmp_path / "page.html").write_text(source.replace("</head>", f"{LOOK}</head>"), encoding="utf-8")
        frame = tmp_path / "frame.html"
        frame.write_text(FRAME.replace("{width}", str(width)), encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--enable-logging=stderr"]

        theme = f"--blink-settings=preferredColorScheme={0 if night else 1}"
        place = [
            f"--user-data-dir={tmp_path / 'browser'}",
            "--window-size=1400,2100",
            theme,
            "--virtual-time-budget=3000",
            "--dump-dom",
            frame.as_uri(),
        ]
        child = subprocess.run([BROWSER, *options, *place], capture_output=True, text=True, check=True, timeout=90)
        found = re.search(r"\{.*\}", unescape(child.stdout), re.DOTALL)
        assert found, child.stdout[-2000:] + child.stderr[-2000:]
        return Look(saw=json.loads(found[0]), complained=[line for line in child.stderr.splitlines() if "CONSOLE" in line])

    return open_page


@needs_browser
@pytest.mark.parametrize("night", [False, True], ids=["day", "night"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_the_page_is_read_without_complaint_at_any_width_by_day_and_by_night(
    look: Callable[..., Look], pages: Callable[[str], str], width: int, *, night: bool
) -> None:
    """Key texts are visible, one drawing of each pair shows in legible size, nothing hangs out of the page, nothing is fetched."""
    found = look(pages("three_incidents"), width=width, night=night)
    assert found.complained == []
    saw = found.saw
    assert (saw["width"], saw["fetched"]) == (width, [])
    assert saw["overflow"] <= 0
    assert saw["clipped"] == [], "a table that is cut hides what nobody looks for"
    assert saw["pills"] < 30, "a pill is one line"
    assert min(saw["reasons"]) > (400 if width == WIDE else 180)
    for words in (
        "bytes-gpt",
        "completed",
        "Completed 600 steps",
        "ETTR",
        "worker-sigkill",
        "node-lost",
        "restart-workers",
        "Where recovery time went",
    ):
        assert words in saw["words"]
    assert INSIDE in saw["opened"]
    assert INSIDE not in saw["words"], "an incident opens when asked to"
    size = "wide" if width == WIDE else "narrow"
    assert [one["name"] for one in saw["drawings"]] == [
        *(f"{name}-{size}" for name in ("cost", "throughput", "time", "lanes", "steps", "bars")),
        "near-1",
        "near-2",
        "near-3",
    ]
    assert all(one["width"] > width / 4 and one["letters"] > 9 for one in saw["drawings"])
    assert brightness(saw["paper"]) < 60 if night else brightness(saw["paper"]) > 200
    assert all(abs(brightness(one["ink"]) - brightness(saw["paper"])) > 60 for one in saw["drawings"])


def brightness(colour: str) -> float:
    """Return how bright ``rgb(r, g, b)`` is, from 0 to 255."""
    red, green, blue = (float(part) for part in re.findall(r"[\d.]+", colour)[:3])
    return 0.3 * red + 0.59 * green + 0.11 * blue


@needs_browser
@pytest.mark.parametrize("name", ["nothing", "failed", "many_nodes"])
def test_odd_pages_keep_their_shape_in_a_narrow_window(look: Callable[..., Look], pages: Callable[[str], str], name: str) -> None:
    """Neither emptiness, nor strangers' text, nor hundreds of nodes push anything out of the page; and no stranger's script has run."""
    found = look(pages(name), width=NARROW)
    assert found.complained == []
    assert found.saw["overflow"] <= 0
    assert found.saw["fetched"] == []
    if name == "failed":
        assert '<script>alert("x")</script>' in found.saw["words"]


@needs_browser
@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("kind", ["cost", "profile"])
def test_the_pages_about_costs_and_steps_are_read_at_any_width(
    look: Callable[..., Look], history: History, tmp_path: Path, kind: str, width: int
) -> None:
    """Nothing hangs out of the page or is fetched, and each drawing of the right size is legible."""
    job, output = filled.three_incidents(history), tmp_path / f"{kind}.html"
    if kind == "cost":
        write_cost(history, bill(history, job, now=filled.BEGAN + 90_000), job, output)
    else:
        files = profile_files.pipeline_files(recorded("1f1b", 4, 8))
        write_profile(history, read(profile_files.write(tmp_path / "checkpoints", *files), job.name, since=0.0), job, output)
    found = look(output.read_text(), width=width)
    assert found.complained == []
    assert (found.saw["overflow"], found.saw["clipped"], found.saw["fetched"]) == (0, [], [])
    assert {one["name"].endswith("wide") for one in found.saw["drawings"]} == {width == WIDE}
    assert all(one["letters"] > 9 for one in found.saw["drawings"])
    assert "Configuration and versions" in found.saw["words"]
