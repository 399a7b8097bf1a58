"""Matplotlib figures as inline SVG of a page (themed by its style sheet, selectable, described) or as PNG and SVG files.

A figure is drawn in placeholder colours (`SvgTheme`). Each becomes a CSS variable in the SVG, so that one drawing serves light and dark
mode, and only the style sheet defines colours. Files get the colours of the light page and a legend.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final
from xml.etree import ElementTree as ET

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from holdfast.report.pages.template_env import style_sheet
from holdfast.report.text.wording import visible


class SvgTheme(StrEnum):
    """A colour by its meaning. The value is the placeholder that matplotlib draws with, which no other colour equals."""

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
    NOT_DETECTED = "#a10029"
    MIGRATING = "#a1002a"
    SUSPENDED = "#a1002b"
    COMPUTES = "#a10020"
    WAITS_PIPELINE = "#a10021"
    WAITS_GRADIENTS = "#a10022"
    WAITS_SHARDS = "#a10023"
    WAITS_COLLECTIVE = "#a10024"
    WAITS_VOTE = "#a10025"
    WAITS_DATA = "#a10026"
    COPIES_OVERLAPPED = "#a10027"
    COPIES_EXPOSED = "#a10028"

    @property
    def variable(self) -> str:
        """Return the name of the CSS variable that holds this colour."""
        return f"--{self.name.lower().replace('_', '-')}"


RC: Final[Any] = {  # versions of matplotlib have different keys: no type names them all
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
_PLACEHOLDER: Final = re.compile(r"#a100[0-9a-f]{2}")
_LONG_NUMBER: Final = re.compile(r"-?\d+\.\d{3,}")
_FONT: Final = re.compile(r"font(?:-family)?:\s*(?:(\d[\d.]*px)\s+)?'[^;]*;?")
_REFERENCE: Final = re.compile(r"#([\w.-]+)")
_VARIABLES: Final = {color.value: f"var({color.variable})" for color in SvgTheme}
_LIGHT: Final = re.compile(r":root \{(.*?)\}", re.DOTALL)
_COLOR: Final = re.compile(r"(--[\w-]+): (#\w{6})")
_COLOR_PROPERTIES: Final = ("color", "facecolor", "edgecolor")
_DPI: Final = 144
_REMOVED: Final = {"metadata", "style"}


_AXIS: Final = "axis-title-"
"""Begins the ``gid`` of the title of an axis, which becomes its class in the page."""


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
    """A figure: its *axes*, and the tooltips of its parts."""

    box: DrawingBox
    figure: Figure
    axes: Axes
    tips: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    def tip(self, text: str, *, link: str = "") -> str:
        """Return an id for an artist's ``gid`` so that it has the tooltip *text*, and leads to *link*, an address within the page."""
        key = f"tip{len(self.tips)}"
        self.tips[key] = text
        if link:
            self.links[key] = link
        return key

    def axis_titles(self, x: str, y: str = "") -> None:
        """Write what the axes measure, with units: *x* below the ticks, *y* upright at the left edge."""
        box = self.box
        style: dict[str, Any] = {"color": SvgTheme.QUIET, "fontsize": 11.5, "ha": "center"}
        self.figure.text((box.left + box.columns / 2) / box.width, 5 / box.height, x, va="baseline", gid=f"{_AXIS}x", **style)
        if y:
            middle = (box.bottom + box.rows / 2) / box.height
            self.figure.text(12 / box.width, middle, y, va="center", rotation=90, rotation_mode="anchor", gid=f"{_AXIS}y", **style)


def style() -> AbstractContextManager[None]:
    """Give the context of settings in which drawings are made, including `svg`."""
    return mpl.rc_context(RC)


def drawing(box: DrawingBox) -> Drawing:
    """Return an empty drawing of the size of *box*, with one pair of axes and no frame. Use it within `style`."""
    figure = Figure(figsize=(box.width / 72, box.height / 72))
    FigureCanvasSVG(figure)
    axes = figure.add_axes((box.left / box.width, box.bottom / box.height, box.columns / box.width, box.rows / box.height))
    axes.spines[:].set_visible(False)
    axes.margins(0)
    axes.set_axisbelow(True)
    return Drawing(box=box, figure=figure, axes=axes)


def svg(on: Drawing, *, name: str, title: str, text: str) -> Markup:
    """Return the drawing as inline SVG called *name*, with *title* and *text* for screen readers."""
    with mpl.rc_context({"svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)  # the browser has more fonts
        raw = io.StringIO()
        on.figure.savefig(raw, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    root = ET.fromstring(raw.getvalue())  # noqa: S314 (we wrote it a line above)
    _embed(root, name, on)
    role = "group" if on.links else "img"  # what is in an image cannot be reached with the keyboard
    root.attrib = {"class": "drawing", "viewBox": root.attrib["viewBox"], "role": role, "aria-labelledby": f"{name}-title {name}-text"}
    for position, (tag, content) in enumerate((("title", title), ("desc", text))):
        node = ET.Element(tag, {"id": f"{name}-{tag.replace('desc', 'text')}"})
        node.text = visible(content)
        root.insert(position, node)
    return Markup(ET.tostring(root, encoding="unicode", method="html"))  # noqa: S704 (ElementTree escaped every text)


def _embed(node: ET.Element, name: str, on: Drawing) -> None:
    """Make *node* and everything below it part of an HTML page: no namespaces, no styles, unique ids."""
    node.tag = _NAMESPACE.sub("", node.tag)
    for child in list(node):
        if _NAMESPACE.sub("", child.tag) in _REMOVED:
            node.remove(child)
        else:
            _embed(child, name, on)
    key = node.attrib.get("id", "")
    node.attrib = {
        _NAMESPACE.sub("", attribute): _attribute(_NAMESPACE.sub("", attribute), value, name) for attribute, value in node.attrib.items()
    }
    if node.tag == "g":
        node.attrib.pop("id", None)
    _annotate(node, key, on)
    if node.tail:
        node.tail = "\n"
    if node.tag not in {"text", "title"} and node.text:
        node.text = None


def _annotate(node: ET.Element, key: str, on: Drawing) -> None:
    """Give what was drawn with the id *key* its tooltip, its link, or its class as the title of an axis."""
    if key.startswith(_AXIS):
        node.attrib["class"] = f"axis-title {key.removeprefix(_AXIS)}"
    if key in on.tips:
        tip = ET.Element("title")
        tip.text = visible(on.tips[key])
        node.insert(0, tip)
    if key in on.links:
        node.tag, node.attrib["href"] = "a", on.links[key]


def _attribute(key: str, value: str, name: str) -> str:
    """Return an attribute's value with colours as variables, without fonts, and numbers as exact as a screen."""
    if key == "id":
        return f"{name}-{value}"
    if key in {"href", "clip-path"} or (key == "style" and "url(" in value):
        value = _REFERENCE.sub(lambda found: found[0] if _PLACEHOLDER.fullmatch(found[0]) else f"#{name}-{found[1]}", value)
    if key == "style":
        value = _FONT.sub(lambda found: f"font-size: {found[1]};" if found[1] else "", value)
        value = _PLACEHOLDER.sub(lambda found: _VARIABLES[found[0]], value)
    if key == "transform" and value.startswith("rotate(-0 "):
        return ""
    if key != "d":
        return _LONG_NUMBER.sub(lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), value)
    return " ".join(_LONG_NUMBER.sub(lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), value).split())


def image(on: Drawing, kind: str, legend: Sequence[tuple[SvgTheme, str]], *, title: str, columns: int = 5) -> bytes:
    """Return the drawing as a file of this *kind*, ``png`` or ``svg``, with *title* and a legend of so many *columns*."""
    figure, box = on.figure, on.box
    figure.text(box.left / box.width, 1 - 18 / box.height, title, fontsize=14, fontweight="bold", va="center")
    figure.legend(
        handles=[Patch(facecolor=color, label=label) for color, label in legend],
        loc="lower left",
        bbox_to_anchor=(box.left / box.width, 2 / box.height),
        ncols=min(columns, len(legend)),
        frameon=False,
        fontsize=11,
        handlelength=1.0,
        handleheight=1.0,
        borderaxespad=0,
        borderpad=0,
        columnspacing=1.6,
    )
    FigureCanvasAgg(figure)
    figure.draw_without_rendering()  # labels of an axis exist only once it is drawn
    _apply_light_colors(figure)
    raw = io.BytesIO()
    if kind == "png":
        figure.savefig(raw, format="png", dpi=_DPI, metadata={"Software": None})
        return raw.getvalue()
    FigureCanvasSVG(figure)
    with mpl.rc_context({"svg.hashsalt": "profile", "svg.fonttype": "none"}):
        figure.savefig(raw, format="svg", metadata={"Date": None, "Creator": None})
    return raw.getvalue()


def _apply_light_colors(figure: Any) -> None:  # noqa: ANN401 (matplotlib finds artists of many classes)
    """Replace the placeholder colours with those of the light page."""
    found = _LIGHT.search(style_sheet())
    light = dict(_COLOR.findall(found[1])) if found else {}
    real = {color.value: light[color.variable] for color in SvgTheme if color.variable in light}
    figure.set_facecolor(light["--card"])
    for artist in figure.findobj():
        for name in _COLOR_PROPERTIES:
            get, put = getattr(artist, f"get_{name}", None), getattr(artist, f"set_{name}", None)
            if get is None or put is None:
                continue
            try:
                now = to_hex(get())
            except (TypeError, ValueError):  # a list of colours, or none
                continue
            if now in real:
                put(real[now])
