"""The plan of a running job's cluster: what its file says, as long as that can be used, and what was before when it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.control.config.cluster_file import ClusterFile
from holdfast.spec import LocalCluster
from holdfast.spec.load import load_cluster, load_job
from tests.waiting import wait_until

PLAIN = "name: c\nnodes: 3\n"
WINDOW = "maintenance:\n- {nodes: [node-1], begins: 2030-01-01 22:00+00:00, lasts: 2h, reason: new switch}\n"


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[tuple[ClusterFile, Path]]:
    """Give what follows the file of a cluster of three nodes, and the file."""
    file = tmp_path / "cluster.yaml"
    file.write_text(PLAIN)
    book = ClusterFile(load_cluster(file))
    yield book, file
    book.close()


def hears(book: ClusterFile, words: str) -> list[str]:
    """Wait for news with these *words*; return all that was heard."""
    heard: list[str] = []

    def told() -> bool:
        heard.extend(book.news())
        return any(words in one for one in heard)

    wait_until(told, seconds=15, explain=lambda: str(heard))
    return heard


def test_windows_and_notices_hold_for_jobs_that_run_and_all_else_for_those_to_come(followed: tuple[ClusterFile, Path]) -> None:
    """Each change is told with what was before."""
    book, file = followed
    file.write_text("name: c\nnodes: 5\nnotice: {file: /run/leaving}\n" + WINDOW)
    told = "\n".join(hears(book, "jobs to come"))
    assert "has changed, and holds from now on: maintenance: new switch of node-1 from 2030-01-01 22:00" in told
    assert "for 2 h 00 min (was: none); notice" in told
    assert "also says something else of nodes: that holds for jobs to come" in told
    (window,) = book.present.windows
    assert window.nodes == {"node-1"}
    assert isinstance(book.present, LocalCluster)
    assert (book.present.notice.file, len(book.present.names)) == ("/run/leaving", 3)


def test_a_bad_file_is_told_of_with_field_and_cure_and_changes_nothing(followed: tuple[ClusterFile, Path]) -> None:
    """Until it can be used again; so is one that is gone."""
    book, file = followed
    file.write_text(PLAIN + WINDOW)
    hears(book, "has changed")
    present = book.present
    file.write_text(PLAIN + WINDOW.replace("node-1", "node-7"))
    (told,) = hears(book, "stay in force")
    assert f"cluster file {file}: 1 problem(s): maintenance[0].nodes:" in told
    assert "the cluster has no node 'node-7'. Name nodes of the cluster, such as node-0" in told
    assert book.present is present
    file.unlink()
    (told,) = hears(book, "stay in force")
    assert "file: does not exist" in told
    file.write_text(PLAIN + WINDOW)
    hears(book, "can be used again")
    assert book.present.maintenance == present.maintenance


def test_the_cluster_of_a_job_file_is_read_from_there(tmp_path: Path) -> None:
    """Whatever is said of the job meanwhile."""
    file = tmp_path / "job.yaml"
    file.write_text("name: gpt\nscript: train.py\ncluster: {nodes: 3}\n")
    _, cluster = load_job(file)
    assert cluster is not None
    book = ClusterFile(cluster)
    try:
        file.write_text("name: NONE\nscript: 3\ncluster:\n  nodes: 3\n  maintenance: [{begins: 2030-01-01 22:00}]\n")
        hears(book, "maintenance of all nodes from")
        assert len(book.present.windows) == 1
    finally:
        book.close()
