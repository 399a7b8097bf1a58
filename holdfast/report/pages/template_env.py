"""The Jinja environment of the pages: everything is escaped, and numbers and times are formatted as everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from holdfast.plurals import plural
from holdfast.report.text import wording


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One number of a page's headline with a note on it."""

    label: str
    value: str
    note: str = ""
    share: float | None = None
    """Draws a meter if given (0 to 1)."""


def style_sheet() -> str:
    """Return the style sheet of all pages."""
    return resources.files(__package__).joinpath("template/style.css").read_text("utf-8")


def render(template: str, **values: Any) -> str:  # noqa: ANN401 (whatever the template uses)
    """Return the page of a *template* with *values*: text is escaped, and invisible characters are made visible."""
    environment = Environment(
        loader=PackageLoader("holdfast.report.pages", "template"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    for name in ("duration", "moment", "since", "count", "share", "size", "on_target"):
        environment.filters[name] = getattr(wording, name)
    environment.filters["plural"] = plural
    return environment.get_template(template).render(style=Markup(style_sheet()), **values)  # noqa: S704 (our own style sheet)


def _finalize(value: object) -> object:
    """Return what the template shows for *value*; our own markup, a subclass of `str`, passes unchanged."""
    if value is None:
        return wording.NOTHING
    return wording.visible(value) if type(value) is str else value
