"""The surroundings of our pages' templates: everything is escaped, and numbers and times are put into words as everywhere."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from holdfast.report import wording


def surroundings() -> Environment:
    """Return the templates' surroundings: everything is escaped, and characters that deceive are made visible."""
    made = Environment(
        loader=PackageLoader("holdfast.report", "template"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finished,
    )
    for name in ("duration", "moment", "since", "count", "share", "size", "plural"):
        made.filters[name] = getattr(wording, name)
    return made


def _finished(value: object) -> object:
    """Return what the template shows for *value*; markup of our own, a kind of `str`, passes as it is."""
    if value is None:
        return wording.NOTHING
    return wording.visible(value) if type(value) is str else value
