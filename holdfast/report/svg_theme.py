"""From a matplotlib figure to a drawing that belongs to the page: themed by its style sheet, selectable, described, without ids of its own.

A figure is drawn in colours that stand for a meaning (`SvgTheme`). Each becomes a CSS variable in the SVG, so that one drawing serves
light and dark, and the style sheet alone says what anything looks like.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final
from xml.etree import ElementTree as ET

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from holdfast.report.wording import visible


class SvgTheme(StrEnum):
    """A colour by what it means. The value is the stand-in that matplotlib draws with, chosen so that nobody draws it by chance."""

    TEXT = "#a10001"
    QUIET = "#a10002"
    GRID = "#a10003"
    PAPER = "#a10004"
    SHADE = "#a10005"
    LOSS = "#a10006"
    AGAIN = "#a10007"
    INCIDENT = "#a10008"
    ON_INCIDENT = "#a10009"
    TRAINING = "#a1000b"
    STARTING = "#a1000c"
    RECOVERING = "#a1000d"
    WAITING = "#a1000e"
    NODE = "#a1000f"
    NODE_TEXT = "#a10010"
    DETECT = "#a10011"
    DIAGNOSE = "#a10012"
    ISOLATE = "#a10013"
    RESCHEDULE = "#a10014"
    COMMUNICATION = "#a10015"
    LOAD = "#a10016"
    WARM_UP = "#a10017"
    ROLLBACK = "#a10018"
    OTHER = "#a10019"
    ON_DARK = "#a1001a"
    ON_LIGHT = "#a1001b"
    AGAIN_BAND = "#a1001c"
    DOWN_BAND = "#a1001d"
    FAILED_ATTEMPT = "#a1001e"
    WAIT = "#a1001f"
    COMPUTES = "#a10020"
    WAITS_PIPELINE = "#a10021"
    WAITS_GRADIENTS = "#a10022"
    WAITS_SHARDS = "#a10023"
    WAITS_COLLECTIVE = "#a10024"
    WAITS_VOTE = "#a10025"
    WAITS_DATA = "#a10026"
    COPIES_HIDDEN = "#a10027"
    COPIES_BARE = "#a10028"

    @property
    def variable(self) -> str:
        """Return the name of the CSS variable that holds this colour."""
        return f"--{self.name.lower().replace('_', '-')}"


RC: Final[Any] = {  # older matplotlib knows other keys than newer: no type names them all
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 12,
    "font.family": "DejaVu Sans",
    "path.simplify": False,
    "axes.unicode_minus": True,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "text.color": SvgTheme.TEXT.value,
    "axes.labelcolor": SvgTheme.QUIET.value,
    "xtick.labelcolor": SvgTheme.QUIET.value,
    "ytick.labelcolor": SvgTheme.QUIET.value,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "axes.edgecolor": SvgTheme.GRID.value,
    "axes.linewidth": 1,
    "grid.color": SvgTheme.GRID.value,
    "grid.linewidth": 1,
    "hatch.linewidth": 1,
}
_NAMESPACE: Final = re.compile(r"\{[^}]*\}")
_STAND_IN: Final = re.compile(r"#a100[0-9a-f]{2}")
_LONG_NUMBER: Final = re.compile(r"-?\d+\.\d{3,}")
_FONT: Final = re.compile(r"font(?:-family)?:\s*(?:(\d[\d.]*px)\s+)?'[^;]*;?")
_REFERENCE: Final = re.compile(r"#([\w.-]+)")
_VARIABLES: Final = {ink.value: f"var({ink.variable})" for ink in SvgTheme}
_DRAWN_BY_STYLE_SHEET: Final = {"metadata", "style"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingBox:
    """The size of a drawing and the margins around its axes, in CSS pixels at full width."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int

    @property
    def columns(self) -> int:
        """Return how many pixels wide the axes are."""
        return self.width - self.left - self.right

    @property
    def rows(self) -> int:
        """Return how many pixels high the axes are."""
        return self.height - self.top - self.bottom


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure under way: its *axes*, and the words that show when the mouse rests on something."""

    box: DrawingBox
    figure: Figure
    axes: Axes
    tips: dict[str, str] = field(default_factory=dict)

    def tip(self, words: str) -> str:
        """Return a mark to give to an artist as its ``gid``, so that *words* show over it."""
        mark = f"tip{len(self.tips)}"
        self.tips[mark] = words
        return mark


def pens() -> AbstractContextManager[None]:
    """Give the settings that all drawings are made with, from the first line to `svg`."""
    return mpl.rc_context(RC)


def drawing(box: DrawingBox) -> Drawing:
    """Return an empty drawing of the size of *box*, with one pair of axes and no frame. Only within `pens`."""
    figure = Figure(figsize=(box.width / 72, box.height / 72))
    FigureCanvasSVG(figure)
    axes = figure.add_axes((box.left / box.width, box.bottom / box.height, box.columns / box.width, box.rows / box.height))
    axes.spines[:].set_visible(False)
    axes.margins(0)
    axes.set_axisbelow(True)
    return Drawing(box=box, figure=figure, axes=axes)


def svg(done: Drawing, *, name: str, title: str, words: str) -> Markup:
    """Return the drawing as inline SVG called *name*, with *title* and *words* for those who cannot see it."""
    with mpl.rc_context({"svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)  # the browser has more fonts
        raw = io.StringIO()
        done.figure.savefig(raw, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    root = ET.fromstring(raw.getvalue())  # noqa: S314 (we wrote it a line above)
    _settle(root, name, done.tips)
    root.attrib = {"class": "drawing", "viewBox": root.attrib["viewBox"], "role": "img", "aria-labelledby": f"{name}-title {name}-words"}
    for place, (tag, what) in enumerate((("title", title), ("desc", words))):
        node = ET.Element(tag, {"id": f"{name}-{tag.replace('desc', 'words')}"})
        node.text = visible(what)
        root.insert(place, node)
    return Markup(ET.tostring(root, encoding="unicode", method="html"))  # noqa: S704 (ElementTree escaped every text)


def _settle(node: ET.Element, name: str, tips: Mapping[str, str]) -> None:
    """Make *node* and all below it part of an HTML page: no namespaces, no foreign styles, ids that no other drawing has."""
    node.tag = _NAMESPACE.sub("", node.tag)
    for child in list(node):
        if _NAMESPACE.sub("", child.tag) in _DRAWN_BY_STYLE_SHEET:
            node.remove(child)
        else:
            _settle(child, name, tips)
    mark = node.attrib.get("id", "")
    node.attrib = {_NAMESPACE.sub("", key): _plain(_NAMESPACE.sub("", key), value, name) for key, value in node.attrib.items()}
    if node.tag == "g":
        node.attrib.pop("id", None)
    if mark in tips:
        tip = ET.Element("title")
        tip.text = visible(tips[mark])
        node.insert(0, tip)
    if node.tail:
        node.tail = "\n"
    if node.tag not in {"text", "title"} and node.text:
        node.text = None


def _plain(key: str, value: str, name: str) -> str:
    """Return an attribute's value with colours as variables, fonts left to the page, and numbers as exact as a screen."""
    if key == "id":
        return f"{name}-{value}"
    if key in {"href", "clip-path"} or (key == "style" and "url(" in value):
        value = _REFERENCE.sub(lambda found: found[0] if _STAND_IN.fullmatch(found[0]) else f"#{name}-{found[1]}", value)
    if key == "style":
        value = _FONT.sub(lambda found: f"font-size: {found[1]};" if found[1] else "", value)
        value = _STAND_IN.sub(lambda found: _VARIABLES[found[0]], value)
    if key == "transform" and value.startswith("rotate(-0 "):
        return ""
    return _LONG_NUMBER.sub(lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), value) if key != "d" else _path(value)


def _path(value: str) -> str:
    shorter = _LONG_NUMBER.sub(lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), value)
    return " ".join(shorter.split())
