"""The reliability diagram of the diagnosis, from what `python -m benchmarks.causes --json FILE` measured.

`python -m docs.generator.calibration FILE` stores the figures of that file, from which the picture is drawn.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

from docs.picture import colors

STORED: Final = Path(__file__).with_suffix(".json")
SIDE: Final = 420
"""Pixels of each axis."""
LEFT: Final = 84
TOP: Final = 72
WIDTH: Final = LEFT + SIDE + 70
HEIGHT: Final = TOP + SIDE + 74
Z: Final = 1.96
"""Of the normal distribution, for intervals of 95 %."""
_CSS: Final = """
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", Arial, sans-serif; font-size: 13px; }
.paper { fill: var(--card); stroke: var(--line); } .head { fill: var(--text); font-size: 16px; font-weight: 650; }
.quiet { fill: var(--quiet); } .grid { stroke: var(--grid); } .ideal { stroke: var(--quiet); stroke-dasharray: 5 4; }
.bin { fill: var(--loss); } .range { stroke: var(--loss); stroke-width: 2; } .n { fill: var(--text); }
"""


def calibration_picture() -> str:
    """Return the diagram as SVG: how often diagnoses were right against how sure they were, with the number of incidents in each bin."""
    stored = json.loads(STORED.read_text())
    total = sum(one["n"] for one in stored["bins"])
    title = f"How sure, and how often right: {total} injected incidents"
    summary = f"expected calibration error {stored['error']:.3f}; bars: 95 % intervals; dashed: perfectly calibrated"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape('; '.join(_words(one) for one in stored['bins']))}</desc>",
            f"<style>{colors()}{_CSS}</style>",
            f'<rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="12"/>',
            f'<text class="head" x="24" y="32">{escape(title)}</text>',
            f'<text class="quiet" x="24" y="54" style="font-size: 12px">{escape(summary)}</text>',
            *_axes(),
            *(line for one in stored["bins"] for line in _bin(one)),
            "</svg>\n",
        ]
    )


def _words(one: Mapping[str, Any]) -> str:
    return f"of {one['n']} incidents with a confidence of {one['confidence']:.0%} on average, {one['right']:.0%} were right"


def _x(share: float) -> float:
    return round(LEFT + SIDE * share, 1)


def _y(share: float) -> float:
    return round(TOP + SIDE * (1 - share), 1)


def _axes() -> Iterator[str]:
    for percent in range(0, 101, 20):
        share = percent / 100
        yield f'<line class="grid" x1="{_x(share)}" y1="{_y(0)}" x2="{_x(share)}" y2="{_y(1)}"/>'
        yield f'<line class="grid" x1="{_x(0)}" y1="{_y(share)}" x2="{_x(1)}" y2="{_y(share)}"/>'
        yield f'<text class="quiet" x="{_x(share)}" y="{_y(0) + 20}" text-anchor="middle">{percent} %</text>'
        yield f'<text class="quiet" x="{_x(0) - 8}" y="{_y(share) + 4}" text-anchor="end">{percent} %</text>'
    yield f'<line class="ideal" x1="{_x(0)}" y1="{_y(0)}" x2="{_x(1)}" y2="{_y(1)}"/>'
    middle, below, stated = _y(0.5), _y(0) + 46, "stated confidence of the first hypothesis, bins of 10 %"
    yield f'<text class="quiet" x="{_x(0.5)}" y="{below}" text-anchor="middle">{stated}</text>'
    turned = f'text-anchor="middle" transform="rotate(-90 22 {middle})"'
    yield f'<text class="quiet" x="22" y="{middle}" {turned}>root cause and node were right</text>'


def _bin(one: Mapping[str, Any]) -> Iterator[str]:
    x, low, high = _x(one["confidence"]), *wilson(one["right"], one["n"])
    yield f'<line class="range" x1="{x}" y1="{_y(low)}" x2="{x}" y2="{_y(high)}"/>'
    yield f'<circle class="bin" cx="{x}" cy="{_y(one["right"])}" r="{3 + 1.2 * math.sqrt(min(one["n"], 100)):.1f}"/>'
    yield f'<text class="n" x="{x + 18}" y="{_y(one["right"]) + 4}">n = {one["n"]}</text>'


def wilson(share: float, n: int) -> tuple[float, float]:
    """Return the limits of the 95 % interval of a *share* of *n* trials (Wilson, 1927)."""
    middle, spread = share + Z * Z / (2 * n), Z * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    whole = 1 + Z * Z / n
    return max(0.0, (middle - spread) / whole), min(1.0, (middle + spread) / whole)


def main() -> int:
    """Store the figures of a result of the benchmark; return the exit status."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():  # noqa: PLR2004 (one argument)
        sys.stderr.write("name the file that `python -m benchmarks.causes --json FILE` has written\n")
        return 2
    found = json.loads(Path(sys.argv[1]).read_text())["calibration"]
    bins = [{"confidence": round(one["confidence"], 4), "right": round(one["right"], 4), "n": one["n"]} for one in found["bins"]]
    STORED.write_text(json.dumps({"error": found["median"], "bins": bins}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
