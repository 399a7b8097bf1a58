"""The picture of the README: it stands alone, is small, and says what was lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from xml.etree import ElementTree as ET

from docs.picture import MOST_BYTES, PICTURE, picture
from holdfast.history.models import Job
from holdfast.history.store import History
from holdfast.report.pages.job_history import JobHistory
from holdfast.report.text.wording import duration
from tests.report import filled, odd

Stories = Callable[[Callable[[History], Job]], JobHistory]


def test_the_picture_is_one_small_file_for_light_and_dark(story_of: Stories) -> None:
    """It is well-formed, refers to nothing outside, knows every colour in both themes, and names the downtime of the accounts."""
    story = story_of(filled.three_incidents)
    source = picture(story, story_of(odd.one_step))
    root = ET.fromstring(source)  # noqa: S314 (we drew it a line above)
    assert len(source.encode()) < MOST_BYTES
    assert [one for one in root.iter() if "href" in one.attrib and not one.attrib["href"].startswith("#")] == []
    light, dark = re.findall(r":root \{(.*?)\}", source, re.DOTALL)
    used = set(re.findall(r"var\((--[\w-]+)\)", source.split("</style>", maxsplit=1)[1]))
    for theme in (light, light + dark):
        assert used <= set(re.findall(r"(--[\w-]+):", theme))
    assert duration(story.losses.downtime_s) in "".join(root.itertext())


def test_the_picture_in_the_repository_is_of_a_demo() -> None:
    """It holds three incidents."""
    root = ET.fromstring(PICTURE.read_bytes())  # noqa: S314 (a file of the repository)
    assert PICTURE.stat().st_size < MOST_BYTES
    assert {"1", "2", "3"} <= {(one.text or "").strip() for one in root.iter("{http://www.w3.org/2000/svg}text")}
