"""Draw docs/assets/demo-timeline.svg from the history of a real demo run: `holdfast demo`, then `python -m docs.picture`.

It uses the figures of the report page. The SVG holds the colours for light and dark in itself and has a background of its own, so that
it can be read wherever it is shown.
"""

from __future__ import annotations

import re
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

from holdfast import paths
from holdfast.history import History, queries
from holdfast.plurals import plural
from holdfast.report import write_atomically
from holdfast.report.pages import recoveries
from holdfast.report.pages.charts import loss, timeline
from holdfast.report.pages.charts.drawing import DrawingBox, SvgTheme, style
from holdfast.report.pages.job_history import JobHistory, read_history
from holdfast.report.pages.template_env import style_sheet
from holdfast.report.text import incident_text, wording

PICTURE: Final = Path(__file__).parent / "assets" / "demo-timeline.svg"
FAULTY: Final = "demo-with-faults"
UNDISTURBED: Final = "demo-undisturbed"
MOST_BYTES: Final = 150_000
_WIDTH: Final = 1000
_EDGE: Final = 28
_LOSS: Final = DrawingBox(width=_WIDTH, height=290, left=84, right=24, top=46, bottom=58)
_LANES: Final = DrawingBox(width=_WIDTH, height=0, left=84, right=24, top=10, bottom=58)
_BARS: Final = DrawingBox(width=_WIDTH, height=0, left=230, right=90, top=2, bottom=43)
_LETTER_PIXELS: Final = 6.9
_CSS: Final = """
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", Arial, sans-serif; }
.paper { fill: var(--card); stroke: var(--line); } .head { fill: var(--text); font-size: 21px; font-weight: 650; }
.what { fill: var(--quiet); font-size: 14.5px; } .section { fill: var(--text); font-size: 15px; font-weight: 650; }
.key { fill: var(--quiet); font-size: 13px; }
"""


def picture(faulty: JobHistory, undisturbed: JobHistory) -> str:
    """Return the SVG of a job that went through faults, compared with the same one that did not."""
    drawn, spans = recoveries.bars(faulty.cases), timeline.job_spans(faulty)
    with style():
        parts = [
            ("Loss: training resumes where it was", str(loss.over_time(faulty, _LOSS, "loss")), _LOSS.height, []),
            (
                "What the job and its nodes were doing",
                str(timeline.timeline(faulty, spans, _LANES, "lanes")),
                timeline.height(faulty, _LANES).height,
                [*timeline.states(spans), (SvgTheme.NODE, "node holds ranks")],
            ),
            (
                "Where the recovery time went, from the fault to the next step",
                str(recoveries.phase_bars(drawn, _BARS, "bars", wide=True, link=lambda _incident: "")),
                recoveries.height(drawn, _BARS, wide=True).height,
                [(recoveries.COLORS[kind.name], kind.label) for kind in recoveries.kinds(drawn)],
            ),
        ]
    lines, top = list[str](), 44.0
    lines.append(f'<text class="head" x="{_EDGE}" y="{top:g}">{escape(_headline(faulty))}</text>')
    for text in _sentences(faulty, undisturbed):
        top += 24
        lines.append(f'<text class="what" x="{_EDGE}" y="{top}">{escape(text)}</text>')
    top += 16
    for title, svg, height, legend in parts:
        top += 22
        lines.append(f'<text class="section" x="{_EDGE}" y="{top}">{escape(title)}</text>')
        lines.append(_placed(svg, top + 10, height))
        top += height + 12
        legend_lines, top = _legend(legend, top)
        lines += legend_lines
    bottom = top + 20
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH + 2 * _EDGE} {bottom:g}" role="img">',
            f"<title>{escape(_headline(faulty))}</title>",
            f"<style>{colors()}{_CSS}</style>",
            f'<rect class="paper" x="0.5" y="0.5" width="{_WIDTH + 2 * _EDGE - 1}" height="{bottom - 1:g}" rx="12"/>',
            *lines,
            "</svg>\n",
        ]
    )


def _headline(faulty: JobHistory) -> str:
    return f"{plural(len(faulty.cases), 'fault')} in {wording.duration(faulty.wall_seconds)} of training"


def _sentences(faulty: JobHistory, undisturbed: JobHistory) -> list[str]:
    """Return what happened, and what was lost."""
    happened = "; ".join(f"{case.incident.number}: {incident_text.brief(incident_text.what(case), 60)}" for case in faulty.cases)
    costs = faulty.losses
    lost = f"Lost: {plural(costs.steps_lost or 0, 'step')}, {wording.duration(costs.downtime_s)} of downtime in all."
    if _losses_by_step(faulty) == _losses_by_step(undisturbed):
        lost += f" The loss of all {len(_losses_by_step(faulty))} steps equals that of a run without faults."
    return [happened, lost]


def _losses_by_step(job: JobHistory) -> dict[int, float]:
    kept = job.steps.kept
    return dict(zip(job.steps.step[kept].tolist(), job.steps.loss[kept].tolist(), strict=True))


def _placed(svg: str, top: float, height: float) -> str:
    """Return a drawing of the page as a part of the picture."""
    size = f'<svg x="{_EDGE}" y="{top}" width="{_WIDTH}" height="{height}" '
    return re.sub(r"<a href=\"[^\"]*\"", "<g", svg.replace("<svg ", size, 1)).replace("</a>", "</g>")


def _legend(entries: list[tuple[SvgTheme, str]], top: float) -> tuple[list[str], float]:
    """Return the legend below *top*, and where it ends."""
    if not entries:
        return [], top
    left, found = float(_EDGE), []
    top += 16
    for color, name in entries:
        wide = 30 + len(name) * _LETTER_PIXELS
        if left + wide > _WIDTH:
            left, top = float(_EDGE), top + 22
        found.append(f'<rect x="{left}" y="{top - 10}" width="12" height="12" rx="3" style="fill: var({color.variable})"/>')
        found.append(f'<text class="key" x="{left + 19}" y="{top}">{escape(name)}</text>')
        left += wide + 10
    return found, top + 12


def colors() -> str:
    """Return the colours of the pages for light and dark."""
    light, dark = (block for _, block in zip(range(2), re.findall(r":root \{(.*?)\}", style_sheet(), re.DOTALL), strict=False))
    return f":root {{{light}}} @media (prefers-color-scheme: dark) {{ :root {{{dark}}} }}"


def main() -> int:
    """Draw the picture from the newest demo; return the exit status."""
    found = Path(sys.argv[1]) if len(sys.argv) > 1 else paths.home() / "demo" / "history.db"
    if not found.is_file():
        sys.stderr.write(f"{found} does not exist: run `holdfast demo` first, or name the history of a demo\n")
        return 2
    with closing(History.open(f"sqlite:///{found}", create=False)) as history:
        faulty, undisturbed = (read_history(history, queries.newest_job(history, name), now=time.time()) for name in (FAULTY, UNDISTURBED))
    content = picture(faulty, undisturbed).encode()
    if len(content) > MOST_BYTES:
        sys.stderr.write(f"the picture has {len(content):,} bytes, more than {MOST_BYTES:,}\n")
        return 1
    PICTURE.parent.mkdir(exist_ok=True)
    write_atomically(PICTURE, content)
    sys.stdout.write(f"{PICTURE} ({len(content):,} bytes)\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
