"""A drawing as a file of its own, PNG or SVG: in the colours of the light page, with a legend in the picture."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any, Final

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex
from matplotlib.patches import Patch

from holdfast.report.svg_theme import Drawing, SvgTheme

DPI: Final = 144
_LIGHT: Final = re.compile(r":root \{(.*?)\}", re.DOTALL)
_COLOUR: Final = re.compile(r"(--[\w-]+): (#\w{6})")
_COLOURED: Final = ("color", "facecolor", "edgecolor")


def image(done: Drawing, kind: str, legend: Sequence[tuple[SvgTheme, str]], *, title: str, columns: int = 5) -> bytes:
    """Return the drawing as a file of this *kind*, ``png`` or ``svg``, under its *title*; the legend has so many *columns*."""
    figure, box = done.figure, done.box
    figure.text(box.left / box.width, 1 - 18 / box.height, title, fontsize=14, fontweight="bold", va="center")
    figure.legend(
        handles=[Patch(facecolor=ink, label=words) for ink, words in legend],
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
    figure.draw_without_rendering()  # labels of an axis are made when it is drawn
    _colour(figure)
    raw = io.BytesIO()
    if kind == "png":
        figure.savefig(raw, format="png", dpi=DPI, metadata={"Software": None})
        return raw.getvalue()
    FigureCanvasSVG(figure)
    with mpl.rc_context({"svg.hashsalt": "profile", "svg.fonttype": "none"}):
        figure.savefig(raw, format="svg", metadata={"Date": None, "Creator": None})
    return raw.getvalue()


def _colour(figure: Any) -> None:  # noqa: ANN401 (what matplotlib finds is of many kinds)
    """Put real colours in the place of those that stand for a meaning."""
    found = _LIGHT.search(resources.files(__package__).joinpath("template/style.css").read_text("utf-8"))
    light = dict(_COLOUR.findall(found[1])) if found else {}
    real = {ink.value: light[ink.variable] for ink in SvgTheme if ink.variable in light}
    figure.set_facecolor(light["--card"])
    for artist in figure.findobj():
        for name in _COLOURED:
            get, put = getattr(artist, f"get_{name}", None), getattr(artist, f"set_{name}", None)
            if get is None or put is None:
                continue
            try:
                now = to_hex(get())
            except (TypeError, ValueError):  # a collection's list of colours, or none
                continue
            if now in real:
                put(real[now])
