"""A job's profile: files read and put side by side, the picture, the page that holds it."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from matplotlib.image import imread

from holdfast.errors import NoProfile, NotWritable
from holdfast.history.store import History
from holdfast.report import write_profile
from holdfast.report.pages.charts.schedule import KINDS, MOST_LANES, copies, work
from holdfast.report.profiles import JobProfile, read
from holdfast.report.text import profile_text as words
from tests.mentions import mentions
from tests.report import filled, profile_files
from tests.report.parsed import Page
from tests.report.test_layout import recorded
from tests.report.test_report_colours import APART, SIGHT, THEMES, distance

INTERLEAVED = profile_files.pipeline_files(recorded("interleaved", 2, 4))
ONE = profile_files.pipeline_files([[["send", 1], ["recv", 1]], [["recv", 0], ["send", 0]]])
DDP = [profile_files.placed(rank, 4, range(4)) for rank in range(4)]
FSDP2 = [profile_files.placed(rank, 4, [rank], sharded=True) for rank in range(4)]
HSDP = [profile_files.placed(rank, 4, [rank % 2, rank % 2 + 2], sharded=True) for rank in range(4)]


def profile_of(tmp_path: Path, *files: dict[str, Any], since: float = 0.0) -> JobProfile:
    """Write *files* and read them."""
    return read(profile_files.write(tmp_path / "checkpoints", *files), "gpt", since=since)


@pytest.fixture
def four(tmp_path: Path) -> JobProfile:
    """Give the profile of a pipeline of four ranks on two nodes."""
    return profile_of(tmp_path, *profile_files.pipeline_files(recorded("1f1b", 4, 8)))


def test_figures_of_a_rank(four: JobProfile) -> None:
    """Shares, the longest window, copies, overheads."""
    one = four.ranks[2]
    assert one.idle_share == pytest.approx(0.25)
    assert [(kind.kind, kind.count) for kind in one.kinds] == [("pipeline", 1), ("gradients", 1), ("vote", 1)]
    assert (one.kinds[0].seconds, one.kinds[0].at, one.kinds[0].predicted) == pytest.approx((0.04, 0.022, 0.03))
    assert one.kinds[1].predicted == 0
    assert one.longest is not None
    assert one.longest.kind == "pipeline"
    assert (one.copy_s, one.overlapped) == pytest.approx((0.005, 0.9))
    assert (one.predicted_overhead, one.measured_overhead) == pytest.approx((0, 0.07 / 24))
    assert four.starts == pytest.approx({0: 0, 1: 0.001, 2: 0.002, 3: 0.003}, abs=1e-6)
    assert (four.nodes, four.step, four.notes) == (2, 120, [])


def test_a_step_is_work_between_waits(four: JobProfile) -> None:
    """Without gaps and overlaps, from the begin to the end; copies lie where they were."""
    found = work(four.ranks[0], 1.0)
    assert (found[0].begin, found[-1].end) == pytest.approx((1.0, 1.2))
    assert all(one.end == pytest.approx(other.begin) for one, other in pairwise(found))
    assert [one.text for one in found][:3] == ["computes", "waits for another stage", "computes"]
    assert [one.text for one in copies(four.ranks[0], 0.0)] == ["copies while it waits", "copies while training is stopped"]


def test_only_the_newest_world_counts(tmp_path: Path) -> None:
    """What a larger world and an older generation left behind is named, and left aside."""
    old = [profile_files.rank_file(rank, 8, time=profile_files.BEGAN - 100) for rank in range(3, 8)]
    new = [profile_files.rank_file(rank, 4, generation=2) for rank in range(3)]
    found = profile_of(tmp_path, *old, *new)
    assert (found.world, found.generation, [one.rank for one in found.ranks]) == (4, 2, [0, 1, 2])
    missing, ignored = found.notes
    assert mentions(missing, "generation 2", "rank 3")
    assert mentions(ignored, "5 files")


def test_an_earlier_run_is_said_to_be_one(tmp_path: Path) -> None:
    """The folder of checkpoints outlives a run."""
    found = profile_of(tmp_path, profile_files.rank_file(0, 1), since=profile_files.BEGAN + 100)
    assert "of an earlier run" in found.notes[0]


def test_clocks_that_differ_are_not_trusted(tmp_path: Path) -> None:
    """Nodes an hour apart are drawn from their own begins; so are ranks that report different steps."""
    found = profile_of(
        tmp_path, *(profile_files.rank_file(rank, 4, began=profile_files.BEGAN + 3600 * (rank // 2) + 0.001 * rank) for rank in range(4))
    )
    assert found.starts == pytest.approx({0: 0, 1: 0.001, 2: 0, 3: 0.001}, abs=1e-6)
    assert "clocks differ" in found.notes[0]
    found = profile_of(tmp_path, *(profile_files.rank_file(rank, 4, step=100 + rank) for rank in range(4)))
    assert set(found.starts.values()) == {0}
    assert "steps 100 to 103" in found.notes[0]
    found = profile_of(tmp_path, *(profile_files.rank_file(rank, 2, began=profile_files.BEGAN + 60 * rank) for rank in range(2)))
    assert set(found.starts.values()) == {0}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', '{"format": 2}', '"x"'])
def test_a_file_that_is_none_is_named(content: str, tmp_path: Path) -> None:
    """Beside others it is a note; alone it is no profile."""
    folder = profile_files.write(tmp_path / "c", profile_files.rank_file(0, 2))
    (folder / "profile" / "rank-00001.json").write_text(content)
    found = read(folder, "gpt")
    assert [one.rank for one in found.ranks] == [0]
    assert found.notes[-1].startswith("rank-00001.json: ")
    (folder / "profile" / "rank-00000.json").unlink()
    with pytest.raises(NoProfile, match=r"rank-00001\.json"):
        read(folder, "gpt")


def test_without_files_the_cure_is_named(tmp_path: Path) -> None:
    """What writes them, and when."""
    with pytest.raises(NoProfile, match=r"holdfast\.session.*memory\.interval"):
        read(tmp_path, "gpt")


@pytest.mark.parametrize(
    ("files", "claims"),
    [
        (INTERLEAVED, ["2 stages: 1 on rank 0; 2 on rank 1", "interleaved 1F1B, 4 micro-batches, 2 chunks"]),
        (ONE, ["unknown: with one micro-batch"]),
        (DDP, ["4 ranks in parallel", "replicated on 4 ranks"]),
        (FSDP2, ["FSDP2: sharded over 4 ranks, each shard on 1 rank"]),
        (HSDP, ["HSDP: sharded over 2 ranks, each shard on 2 ranks"]),
        ([profile_files.placed(0, 1, [0])], ["one rank: no data parallelism", "on one rank"]),
    ],
    ids=["interleaved", "one micro-batch", "DDP", "FSDP2", "HSDP", "alone"],
)
def test_the_layout_in_words(files: list[dict[str, Any]], claims: list[str], tmp_path: Path) -> None:
    """As a person would say it."""
    said = "\n".join(text for _, text in words.layout_facts(profile_of(tmp_path, *files).layout))
    for claim in claims:
        assert claim in said


def test_the_picture_in_letters(four: JobProfile) -> None:
    """A line a rank; a copy that holds training up stands out."""
    lines = words.picture(four, 3)
    assert len(lines) == 3
    assert lines[0].startswith("0 stage 1")
    assert set(lines[0][13:]) == set("█·cC")
    assert max(map(len, lines)) <= 80


def test_the_page_stands_alone(four: JobProfile, history: History, tmp_path: Path) -> None:
    """Two drawings, a legend of what they show, all tables; nothing is fetched."""
    text = write_profile(history, four, filled.script(history, name="a <job>").write(), tmp_path / "p.html").read_text()
    root = Page(text).root
    assert len(root.find("svg", class_="drawing")) == 2
    legend = root.find("ul", class_="legend")[0].text
    for entry in (
        "computes",
        "waits for another stage",
        "waits for gradients",
        "copies while it waits",
        "copies while training is stopped",
    ):
        assert entry in legend
    assert "waits for data" not in legend
    assert "a <job>" in root.text
    assert "1F1B: one forward pass" in root.text
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", text)
    assert "#a100" not in text
    facts = {one.find("dt")[0].words: one.find("dd")[0].words for one in root.find("dl", class_="settings")[0].find("div")}
    assert facts["Command"] == "train_gpt.py --until 600"
    assert "swordfish" not in root.text


@pytest.mark.parametrize("ending", ["png", "svg", "PNG"])
def test_the_picture_alone(ending: str, four: JobProfile, history: History, tmp_path: Path) -> None:
    """In real colours: none that stands for a meaning is left."""
    file = write_profile(history, four, filled.script(history).write(), tmp_path / f"p.{ending}")
    if ending == "svg":
        assert ET.fromstring(file.read_text()).tag.endswith("svg")  # noqa: S314 (we wrote it)
        assert "#a100" not in file.read_text()
        assert THEMES["light"]["--waits-pipeline"] in file.read_text()
        return
    seen = {tuple(round(255 * part) for part in dot[:3]) for row in imread(file, format="png")[::4] for dot in row}
    for name in ("computes", "waits-pipeline", "waits-gradients", "waits-vote", "copies-overlapped", "copies-exposed"):
        colour = THEMES["light"][f"--{name}"]
        assert tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5)) in seen
    assert (0xA1, 0, 0x20) not in seen


def test_many_ranks_and_many_waits_stay_small(history: History, tmp_path: Path) -> None:
    """Two thousand waits on each of a hundred ranks: the first ranks are drawn, and what nobody can see is not."""
    waits = [[place * 1e-4, place * 1e-4 + 6e-5, "data", place + 1] for place in range(2000)]
    found = profile_of(tmp_path, *(profile_files.rank_file(rank, 100, timeline=waits) for rank in range(100)))
    page = write_profile(history, found, filled.script(history).write(), tmp_path / "p.html")
    assert page.stat().st_size < 12_000_000
    assert f"{100 - MOST_LANES} are not" in page.read_text()


def test_an_unwritable_path_is_reported(four: JobProfile, history: History) -> None:
    """As for a report."""
    job = filled.script(history).write()
    with pytest.raises(NotWritable, match=r"profile /proc/p\.png"):
        write_profile(history, four, job, Path("/proc/p.png"))


def test_an_unknown_kind_of_wait_is_drawn_as_a_collective(tmp_path: Path) -> None:
    """A newer runtime may have written it."""
    found = profile_of(tmp_path, profile_files.rank_file(0, 1, timeline=[[0.0, 0.1, "tea", 1]], copies=[], plan=None))
    assert work(found.ranks[0], 0.0)[0].text == KINDS["collective"][1]
    assert "no plan yet" in " ".join(words.snapshot_interval(found))
    assert json.dumps(words.record(found))


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("theme", THEMES)
def test_colours_differ_for_every_eye(theme: str, sight: str) -> None:
    """Each wait beside computing, the two copies, and the waits that pipelines and sharded jobs mix."""
    of = THEMES[theme]
    pairs = [("--computes", ink.variable) for ink, _ in KINDS.values()]
    pairs += [
        ("--copies-overlapped", "--copies-exposed"),
        ("--waits-pipeline", "--waits-gradients"),
        ("--waits-gradients", "--waits-vote"),
        ("--waits-gradients", "--waits-shards"),
        ("--waits-shards", "--waits-vote"),
        ("--waits-pipeline", "--waits-vote"),
    ]
    for one, other in pairs:
        assert distance(of[one], of[other], sight) > APART, (one, other)
