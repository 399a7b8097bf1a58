"""Every kind found in logs: its unhealthy sample has that kind, its healthy one none; and invalid tables are reported with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.classify.classifier import classify_text
from holdfast.detectors.all_kinds import by_area, by_place, words_of
from holdfast.detectors.catalogue import AREAS, CATALOGUE, Area, FaultKind
from holdfast.detectors.evidence import HangLimits, LogLine
from holdfast.detectors.log_lines.classification import judge, see_line
from holdfast.detectors.signatures import SIGNATURES, BadSignature, check, load
from holdfast.detectors.signatures.loading import FILES, HERE
from tests.classify.made_lines import lines_of
from tests.each import each

IN_LOGS = sorted(name for name, entry in CATALOGUE.items() if isinstance(entry.unhealthy.evidence, LogLine))
LEAST = {Area.HARDWARE: 200, Area.NETWORK: 40, Area.STORAGE: 30, Area.HOST: 30, Area.SOFTWARE: 60, Area.PROGRESS: 15}


@each("name", IN_LOGS)
def test_an_unhealthy_line_has_its_kind_and_a_healthy_one_has_none(name: str) -> None:
    """By the rule itself, on the standard library alone."""
    entry = CATALOGUE[name]
    fault = see_line(entry.unhealthy.evidence, HangLimits())
    assert fault is not None
    assert (fault.kind, fault.quote) == (name, entry.unhealthy.evidence.text)
    assert judge(entry.healthy.evidence.text) is None


def test_both_matchers_agree_on_every_sample() -> None:
    """All samples in one log, the unhealthy ones at even places."""
    texts = [text for name in IN_LOGS for text in (words_of(CATALOGUE[name].unhealthy), words_of(CATALOGUE[name].healthy))]
    assert [(one.line, one.kind) for one in classify_text("\n".join(texts))] == [(2 * at + 1, name) for at, name in enumerate(IN_LOGS)]


def test_every_kind_of_the_tables_can_be_reached() -> None:
    """Those that are measured as well included: a kind whose own sample an earlier signature takes would never be reported."""
    kinds: list[FaultKind] = []
    load(enter=kinds.append)
    assert len(kinds) > 500
    for kind in kinds:
        assert judge(words_of(kind.unhealthy)) == kind.id
        assert judge(words_of(kind.healthy)) is None, kind.id


def test_every_expression_can_be_reached() -> None:
    """For each there is a line that no earlier signature takes for another kind: else it is dead, and may be deleted."""
    alone = [signature for signature in SIGNATURES if signature.kind is not None and not signature.keys]
    dead = [one.pattern for one in alone if all(judge(line, words=False) != one.kind for line in lines_of(one.pattern, times=400))]
    assert dead == []


def test_every_key_of_a_family_is_of_its_kind() -> None:
    """Numbers of Xids, SXids, AER bits, work completions and counters, in a line as the family's other members have it."""
    families = [signature for signature in SIGNATURES if signature.keys]
    assert len(families) >= 4
    for family in families:
        line = next(
            line for line in lines_of(family.pattern, times=400) if judge(line, words=False) in {*family.keys.values(), family.kind, None}
        )
        found = family.regex.search(line)
        assert found is not None
        for key, kind in family.keys.items():
            assert judge(line[: found.start("key")] + key + line[found.end("key") :], words=False) == kind, (key, line)


def test_no_two_kinds_are_one_thing() -> None:
    """A measured kind and its log lines share one id."""
    titles = [kind.title.lower() for kind in CATALOGUE.values()]
    assert len(set(titles)) == len(titles)


@each("name", IN_LOGS)
def test_every_entry_is_complete(name: str) -> None:
    """What docs and diagnoses print: none may be missing, and what a kind is confused with exists."""
    entry = CATALOGUE[name]
    for text in (entry.title, entry.component, entry.source, entry.action, entry.reference):
        assert text
        assert text.strip() == text
    assert entry.title[0].isupper() or entry.title.startswith(("ext4", "cu", "nvidia-smi", "torch."))
    assert not entry.title.endswith(".")
    assert entry.reference.startswith(("https://", "docs/"))
    assert entry.component in AREAS
    assert set(entry.confused_with) <= CATALOGUE.keys() - {name}


@pytest.mark.parametrize("area", Area)
def test_the_catalogue_is_as_wide_as_it_is_meant_to_be(area: Area) -> None:
    """Counted by area, each kind once."""
    assert by_area()[area] >= LEAST[area]
    assert sum(by_area().values()) == len(by_place()) == len(CATALOGUE)


def test_every_expression_can_be_used_and_every_table_is_read() -> None:
    """Programs compile an expression when they need it; here all are."""
    for signature in SIGNATURES:
        check(signature)
    assert {file.stem for file in HERE.glob("*.toml")} == set(FILES)


HEAD = """
component = "gpu"
source = "kernel log"
logs = ["kernel log"]
reference = "https://example.org"
recommended_action = "monitor"
attributed_to = "gpu"
action = "look"
healthy = "fine"
"""
FAMILY = 'family = \'code (?P<key>\\d+)\'\nother = "b-kind"\nquiet = ["7"]\n'
ROW = '[a-kind]\ntitle = "A thing"\nunhealthy = "a thing"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("component = ", "is no TOML"),
        (HEAD + ROW, "cannot be recognised; give it `match`"),
        (HEAD + ROW + "match = ['a']\ncolour = 'red'", "unknown fields colour; known are action,"),
        (HEAD.replace("monitor", "wait") + ROW + "match = ['a']", "'wait' is not a valid RecommendedAction; take a word of"),
        (HEAD.replace('"gpu"', '"toaster"', 1) + ROW + "match = ['a']", "unknown component 'toaster'; take one of"),
        (HEAD.replace('action = "look"', "") + ROW + "match = ['a']", "says nothing of action; add it here"),
        ("colour = 'red'", "unknown fields colour"),
        (FAMILY + HEAD + ROW + 'keys = ["7"]', "[a-kind]: claims the key 7, which is quiet"),
        (
            FAMILY + HEAD + ROW + 'keys = ["1", "2"]\n' + ROW.replace("a-kind", "b-kind") + 'keys = ["2"]',
            "claims the key 2, which is a-kind's",
        ),
    ],
)
def test_a_table_that_cannot_be_used_says_where_why_and_the_cure(tmp_path: Path, text: str, words: str) -> None:
    """The file is named, and the kind in it."""
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(BadSignature) as refused:
        load(tmp_path, ("mine",), enter=lambda _: None)
    assert str(refused.value).startswith("mine.toml")
    assert words in str(refused.value)


def test_an_expression_that_cannot_be_compiled_names_its_table(tmp_path: Path) -> None:
    """And itself."""
    (tmp_path / "mine.toml").write_text(HEAD + ROW + "match = ['a(']")
    (signature,) = load(tmp_path, ("mine",), enter=lambda _: None)
    with pytest.raises(BadSignature, match=r"mine\.toml, \[a-kind\]: 'a\("):
        check(signature)


def test_a_family_knows_its_keys_its_quiet_ones_and_the_rest(tmp_path: Path) -> None:
    """A number that no kind claims is of the kind `other`; a count below the least is no fault."""
    rows = (
        ROW
        + 'keys = ["1"]\n'
        + ROW.replace("a-kind", "b-kind")
        + ROW.replace("a-kind", "c-kind")
        + "match = ['n=(?P<count>\\d+)']\nleast = 5"
    )
    (tmp_path / "mine.toml").write_text(FAMILY + HEAD + rows)
    kinds: list[FaultKind] = []
    counted, numbered = load(tmp_path, ("mine",), enter=kinds.append)
    assert [one.id for one in kinds] == ["a-kind", "b-kind", "c-kind"]

    def of(text: str) -> list[str | None]:
        return [one.kind_of(found) for one in (counted, numbered) if (found := one.regex.search(text))]

    assert [of("code 1"), of("code 2"), of("code 7"), of("n=5"), of("n=4")] == [["a-kind"], ["b-kind"], [None], ["c-kind"], [None]]
