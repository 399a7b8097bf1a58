"""The colours: readable for every pair of eyes, by day and by night."""

from __future__ import annotations

import math
from importlib import resources
from itertools import pairwise

import pytest

from holdfast.report.pages.recoveries import COLORS
from holdfast.report.phases import KINDS
from tests.report.test_report_page import themes

Triple = tuple[float, float, float]

# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear light.
SIGHT: dict[str, tuple[Triple, Triple, Triple]] = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
APART = 20.0
"""CIE76 distance; 2.3 is just noticeable."""
STYLE = resources.files("holdfast.report.pages").joinpath("template/style.css").read_text("utf-8")
THEMES = themes(STYLE)


def linear(colour: str) -> Triple:
    """Return *colour* (``#rrggbb``) as linear light."""
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return _linear(red), _linear(green), _linear(blue)


def _linear(part: float) -> float:
    return part / 12.92 if part <= 0.04045 else float(((part + 0.055) / 1.055) ** 2.4)


def luminance(colour: str) -> float:
    """Return the relative luminance that WCAG compares."""
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Return the WCAG contrast of two colours."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def seen(colour: str, sight: str) -> Triple:
    """Return *colour* in CIE Lab as somebody with that *sight* sees it."""
    light = linear(colour)
    red, green, blue = (min(1.0, max(0.0, sum(a * b for a, b in zip(row, light, strict=True)))) for row in SIGHT[sight])
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883
    fx, fy, fz = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def distance(one: str, other: str, sight: str) -> float:
    """Return how far apart two colours look."""
    return math.dist(seen(one, sight), seen(other, sight))


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("theme", THEMES)
def test_phases_that_lie_side_by_side_look_different(theme: str, sight: str) -> None:
    """The stack has one order, so neighbours are what must differ; one of them may be missing or too short to see, and two are rare."""
    for kinds in (KINDS, [kind for kind in KINDS if kind.name not in {"failed attempt", "wait"}]):
        colours = [THEMES[theme][COLORS[kind.name].variable] for kind in kinds]
        for one, other in [*pairwise(colours), *zip(colours, colours[2:], strict=False)]:
            assert distance(one, other, sight) > APART, (one, other)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("theme", THEMES)
def test_colours_that_distinguish_lines_look_different(theme: str, sight: str) -> None:
    """Steps that count and steps given up; the states of the job; an incident on the curve."""
    of = THEMES[theme]
    pairs = [("--loss", "--again"), ("--loss", "--incident"), ("--training", "--recovering"), ("--training", "--starting"),
             ("--recovering", "--waiting"), ("--training", "--waiting"), ("--training", "--not-detected"),
             ("--recovering", "--not-detected"), ("--training", "--migrating"), ("--training", "--suspended"),
             ("--starting", "--recovering")]  # fmt: skip
    for one, other in pairs:
        assert distance(of[one], of[other], sight) > APART, (one, other)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(
    ("ink", "paper"),
    [
        ("--text", "--bg"), ("--text", "--card"), ("--quiet", "--bg"), ("--quiet", "--card"), ("--link", "--card"), ("--text", "--faint"),
        ("--on-incident", "--incident"), ("--node-text", "--node"), ("--paper", "--training"),
        *((f"--{tone}", f"--{tone}-bg") for tone in ("good", "bad", "live", "warning", "plain")),
        *(("--on-dark", f"--{kind}") for kind in ("detect", "failed-attempt", "reschedule", "warm-up")),
        *(("--on-light", f"--{kind}") for kind in ("diagnose", "isolate", "wait", "communication", "load", "rollback")),
    ],
)  # fmt: skip
def test_every_word_can_be_read(theme: str, ink: str, paper: str) -> None:
    """WCAG AA: a contrast of 4.5 to 1."""
    assert contrast(THEMES[theme][ink], THEMES[theme][paper]) >= 4.5


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("line", ["--loss", "--again", "--incident", "--training"])
def test_every_line_stands_out(theme: str, line: str) -> None:
    """Lines are shapes, not words: 2.1 to 1 at the least, and the main ones are distinguished by more than colour."""
    assert contrast(THEMES[theme][line], THEMES[theme]["--card"]) >= 2.1
