"""A page as a browser would see it: its elements, their attributes and their words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br", "hr", "input"}
SELF_CLOSED = {"path", "circle", "rect"}


@dataclass
class Element:
    """One element: *texts* and children lie in *inside*, in order."""

    tag: str
    attributes: dict[str, str]
    inside: list[Element | str] = field(default_factory=list)

    def walk(self) -> Iterator[Element]:
        """Yield this element and all below it."""
        yield self
        for child in self.inside:
            if isinstance(child, Element):
                yield from child.walk()

    def find(self, tag: str, **attributes: str) -> list[Element]:
        """Return the elements below with this tag whose attributes hold these words (``class_`` is ``class``)."""
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return [
            one
            for one in self.walk()
            if one.tag == tag and all(value in one.attributes.get(name, "").split() for name, value in wanted.items())
        ]

    @property
    def words(self) -> str:
        """Return the same with one space between any two words, also where only a cell's edge parts them."""
        return " ".join(" ".join(self._texts()).split())

    def _texts(self) -> Iterator[str]:
        for child in self.inside if self.tag != "style" else []:
            if isinstance(child, str):
                yield child
            else:
                yield from child._texts()

    @property
    def text(self) -> str:
        """Return all words below, without style sheets."""
        return "".join(self._texts())


class Page(HTMLParser):
    """Parses a page and refuses one that is not nested well."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("document", {})
        self._open = [self.root]
        self.feed(source)
        self.close()
        assert len(self._open) == 1, f"never closed: {[one.tag for one in self._open[1:]]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open an element."""
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> says {names}"
        made = Element(tag, {name: value or "" for name, value in attrs})
        self._open[-1].inside.append(made)
        if tag not in VOID:
            self._open.append(made)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open and close an element of a drawing."""
        assert tag in SELF_CLOSED | VOID, f"<{tag}/> does not close itself in HTML"
        self._open[-1].inside.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        """Close the innermost element, which must be this one."""
        last = self._open.pop()
        assert last.tag == tag, f"</{tag}> closes <{last.tag}>"

    def handle_data(self, data: str) -> None:
        """Keep words."""
        self._open[-1].inside.append(data)
