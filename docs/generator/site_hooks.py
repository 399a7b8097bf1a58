"""Hooks of the site's build: diagrams without a foreign host, and no page that loads anything from one."""

from __future__ import annotations

import re
from typing import Any, Final

from mkdocs.exceptions import PluginError
from mkdocs.utils import get_relative_url

MERMAID: Final = "assets/vendor/mermaid.tiny.js"
FOREIGN: Final = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^>]*>|<link\b[^>]*\bhref=[\"']?(?:https?:)?//[^>]*>"
)
"""Elements with which a page loads something from another host."""
NAME: Final = re.compile(r"(<td[^>]*><code>)([\w.]+)(?=</code></td>)")
"""A cell of a table that holds a name alone."""
OWN_ADDRESS: Final = re.compile(r"\brel=[\"']?(?:canonical|next|prev)\b")


def on_page_content(html: str, **_: Any) -> str:  # noqa: ANN401 (as below)
    """Let the names of fields break after an underscore or a dot, and nowhere else: on a phone their column stays narrow."""
    return NAME.sub(lambda found: found[1] + re.sub(r"(?<=[_.])(?=\w)", "<wbr>", found[2]), html)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:  # noqa: ANN401 (mkdocs passes all its objects to every hook)
    """Give a page with diagrams the library that draws them; refuse one that loads something from another host."""
    if '<pre class="mermaid">' in output:  # only there: it is 2.5 MB, and the theme would fetch it from a foreign host
        source = get_relative_url(MERMAID, page.url)
        output = output.replace("</head>", f'<script src="{source}"></script></head>', 1)
    foreign = [found[0] for found in FOREIGN.finditer(output) if not OWN_ADDRESS.search(found[0])]
    if foreign:
        raise PluginError(f"{page.file.src_uri} loads something from another host: {foreign[0]}; keep a copy below docs/assets/")
    return output
