"""Feedback of several kinds, put together by who said it of what."""

from typing import Any

import pytest

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.feedback import Judged, Preference
from penstock.workloads.language.reward.heads import (
    parse_heads,
    read_opinions,
    split_opinions,
    to_opinions,
)

HEADS = parse_heads(["thumb=thumbs", "relevance=stars"])


def row(**fields: Any) -> dict[str, Any]:
    """Of a rater named Ann."""
    return {"prompt": "a", "response": "b", "rater": "ann", **fields}


def told(*rows: Any) -> Any:
    """What is found in rows."""
    return to_opinions(((f"line {number}", one) for number, one in enumerate(rows, 1)), HEADS)


def test_what_one_rater_says_of_a_response_is_one_opinion() -> None:
    found = told(
        row(key="thumb", score=True),
        row(key="relevance", score=5),
        row(key="relevance", score=2),
        row(key="thumb", score=False, rater="bob"),
        row(key="thumb", score=True, rater=""),
        row(key="relevance", score=3, rater=None),
    )
    shares = [one.shares for one in found.examples]
    assert shares == [{"thumb": 1.0, "relevance": 0.25}, {"thumb": 0.0}, {"thumb": 1.0}, {"relevance": 0.5}]


def test_pairs_and_other_keys_and_bad_rows_are_told_apart() -> None:
    found = told(
        {"prompt": "a", "chosen": "x", "rejected": "y"},
        row(key="charm", score=3),
        row(key="relevance", score=9),
        {"prompt": "a", "chosen": "x", "rejected": "x"},
        ValueError("not JSON"),
        row(key="thumb", response=None, score=True),
        {"response": "b", "key": "thumb", "score": True},
    )
    assert [type(one) for one in found.examples] == [Preference]
    assert found.other_key == 1
    assert found.bad.shown == [
        "line 3: score=9 is outside 1 to 5 (scale stars)",
        "line 4: chosen and rejected are the same",
        "line 5: not JSON",
        "line 6: no response",
        "line 7: prompt is NoneType, neither text nor a list of messages",
    ]


def test_a_place_without_a_row_for_any_head_is_refused(tmp_path: Any) -> None:
    file = tmp_path / "said.jsonl"
    file.write_text('{"prompt": "a", "response": "b", "key": "charm", "score": 1}\n')
    with pytest.raises(ConfigurationError, match="1 rows rate something else than thumb, relevance"):
        read_opinions(str(file), HEADS)


def test_the_sides_share_no_prompt() -> None:
    given = [Judged(prompt=f"prompt {number % 200}", response=str(number), where="") for number in range(600)]
    sides = split_opinions(given, share=0.25, seed=0)
    assert not {one.prompt for one in sides.train} & {one.prompt for one in sides.validation}
    assert 100 < len(sides.validation) < 200
    assert split_opinions(given, share=0.25, seed=0) == sides
    assert split_opinions(given, share=0.0, seed=0).validation == ()
