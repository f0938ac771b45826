"""What a round leaves: the weights of its versions, and nothing that people wrote."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.workloads.chat.step_process import (
    StepFailed,
    forget_texts,
    rated_heads,
    summary_of,
    told_apart,
)


@pytest.mark.promise("people-wrote-nothing-stays")
def test_of_a_round_that_is_over_the_weights_stay_and_the_texts_go(tmp_path: Path) -> None:
    lasting = ("run/policies/7.safetensors", "run/summary.json", "run/config.toml", "steps.log")
    gone = (
        "believed.jsonl",
        "prompts.jsonl",
        "judge/heads.json",
        "run/redis/dump.rdb",
        "run/checkpoints/1/x",
    )
    for name in (*lasting, *gone):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "run" / "elsewhere").symlink_to(tmp_path)
    forget_texts(tmp_path)
    forget_texts(tmp_path)
    assert all((tmp_path / name).exists() for name in lasting)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == set(lasting)


@pytest.mark.parametrize(
    ("heads", "pairs", "expected"),
    [
        ({"thumb": {"auc": 0.7}}, None, (0.7, 0.7)),
        ({"thumb": {"auc": None}}, 0.6, (None, 0.6)),
        ({"safety": {"auc": 0.9}}, 0.4, (None, 0.4)),
        ({}, None, (None, None)),
    ],
)
def test_a_reward_model_is_judged_by_thumbs_else_by_pairs(
    tmp_path: Path, heads: dict[str, Any], pairs: float | None, expected: tuple[float | None, float | None]
) -> None:
    card = tmp_path / "heads.json"
    card.write_text(json.dumps({"trained": {"measures": {"heads": heads, "pair_accuracy": pairs}}}))
    assert told_apart(card) == expected


def test_heads_are_those_that_were_rated(tmp_path: Path) -> None:
    file = tmp_path / "believed.jsonl"
    file.write_text("".join(json.dumps({"key": key}) + "\n" for key in ("safety", "thumb", "preferred")))
    assert rated_heads(file) == ["thumb=thumbs", "safety=stars"]
    file.write_text('{"key": "charm"}\n')
    with pytest.raises(StepFailed, match="--head NAME=SCALE"):
        rated_heads(file)


@pytest.mark.parametrize(
    ("summary", "done"),
    [
        (None, False),
        ("{", False),
        ('{"interrupted": true}', False),
        ('{"interrupted": false, "failure": "x"}', False),
        ('{"interrupted": false}', True),
    ],
)
def test_a_training_is_done_when_its_folder_says_so(tmp_path: Path, summary: str | None, done: bool) -> None:
    if summary is not None:
        (tmp_path / "summary.json").write_text(summary)
    assert (summary_of(tmp_path) is not None) is done
