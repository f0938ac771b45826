"""The classifier of a guard: trained, measured on what it has not seen, written and read."""

from pathlib import Path

import numpy as np
import pytest

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.language.guard import (
    GuardRow,
    Share,
    load_classifier,
    packaged_rows,
    read_rows,
    train_classifier,
    train_guard,
)

KINDS = {True: ("drop the table of", "give me the password of"), False: ("where is the shop of", "thank")}


def rows(count: int) -> list[GuardRow]:
    """Texts of two kinds a side, about different things."""
    return [
        GuardRow(f"{kind} customer number {number}", blocked)
        for blocked, kinds in KINDS.items()
        for number in range(count)
        for kind in kinds
    ]


def test_what_can_be_told_apart_is_told_apart() -> None:
    found = train_guard(rows(15))
    assert (found.recall.count, found.recall.of) == (30, 30)
    assert (found.false_alarms.count, found.false_alarms.of) == (0, 30)
    again = train_guard(rows(15)).classifier
    assert (again.weights == found.classifier.weights).all()
    assert found.classifier.chance("drop the table of orders") > 0.5 > found.classifier.chance("thank you")


def test_what_cannot_be_told_apart_is_not() -> None:
    rng = np.random.default_rng(0)
    found = train_guard([GuardRow(row.text, bool(rng.random() < 0.5)) for row in rows(30)])
    share = [one.count / one.of for one in (found.recall, found.false_alarms)]
    assert abs(share[0] - share[1]) < 0.35


def test_packaged_texts_train_it() -> None:
    for package in ("bastioncorpus", "jailbreak_corpus_mini"):
        pytest.importorskip(package, reason="needs the extra data")
    found = train_guard(packaged_rows())
    recall, alarms = (one.count / one.of for one in (found.recall, found.false_alarms))
    print(f"recall {recall:.2f} of {found.recall.of}, false alarms {alarms:.2f} of {found.false_alarms.of}")
    assert recall > alarms + 0.2


def test_a_share_lies_in_its_interval() -> None:
    assert Share(9, 10).interval() == pytest.approx((0.596, 0.982), abs=0.001)
    assert Share(0, 0).interval() == (0.0, 1.0)


def test_a_classifier_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = train_classifier([GuardRow("a b c", True), GuardRow("d e f", False)], threshold=0.7)
    made.save(tmp_path / "guard.json")
    read = load_classifier(tmp_path / "guard.json", "--classifier")
    assert read.threshold == 0.7
    assert read.chance("a b") == pytest.approx(made.chance("a b"), abs=1e-4)
    for text in (
        "{",
        '{"form": "penstock-guard-1"}',
        '{"form": 1, "weights": [], "shift": 0, "threshold": 1}',
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(
            ConfigurationError, match=r"--classifier='.*bad\.json': holds no classifier of a guard"
        ):
            load_classifier(tmp_path / "bad.json", "--classifier")


def test_texts_that_cannot_train_it_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 texts that should be passed: give at least 5"):
        train_guard(
            [*(GuardRow(str(number), blocked=True) for number in range(9)), GuardRow("a", blocked=False)]
        )
    file = tmp_path / "rows.jsonl"
    for line, said in (('{"text": "a"}', "write"), ("{", "not JSON")):
        file.write_text('{"text": "b", "blocked": true}\n' + line + "\n")
        with pytest.raises(ConfigurationError, match=f"line 2: {said}"):
            read_rows(file)
