"""Members of an ensemble: each learns from half of the prompts, none counts in the reward."""

from typing import Any

import pytest

from penstock.workloads.chat.loop_state import (
    MEMBERS,
    disagreement,
    member_heads,
    member_weights,
    with_members,
    without_members,
)


def thumb(number: int, **fields: Any) -> dict[str, Any]:
    """A thumb of an answer to a prompt of its own."""
    return {"prompt": f"question {number}", "response": "a", "key": "thumb", "score": True, **fields}


def test_each_member_learns_from_half_of_the_prompts_and_always_the_same() -> None:
    found = list(with_members([thumb(number) for number in range(400)]))
    seen = {name: {one["prompt"] for one in found if one["key"] == name} for name in ("thumb", *MEMBERS)}
    assert len(seen["thumb"]) == 400
    assert all(150 < len(seen[name]) < 250 for name in MEMBERS)
    assert all(seen[one] - seen[other] for one in MEMBERS for other in MEMBERS if one != other)
    again = list(with_members([thumb(7, rater="ann"), thumb(7, rater="bob", score=False)]))
    assert {one["key"] for one in again if one["rater"] == "ann"} == {
        one["key"] for one in again if one["rater"] == "bob"
    }


@pytest.mark.parametrize("row", [thumb(1, key="safety"), {"prompt": "p", "chosen": "a", "rejected": "b"}])
def test_what_is_no_thumb_is_left_as_it_is(row: dict[str, Any]) -> None:
    assert list(with_members([row])) == [row]
    assert len(list(with_members([thumb(1, prompt=7)]))) == 1


def test_members_are_heads_of_no_weight_where_thumbs_are_learned() -> None:
    heads = member_heads(["thumb=thumbs", "safety=stars"])
    assert heads == [f"{name}=thumbs" for name in MEMBERS]
    assert member_weights(heads) == [f"{name}=0" for name in MEMBERS]
    assert member_heads(["safety=stars"]) == []


def test_disagreement_is_that_of_the_members_alone() -> None:
    shares = dict.fromkeys(MEMBERS, 0.5)
    assert disagreement({**shares, "thumb": 0.9}) == 0.0
    assert disagreement({**shares, MEMBERS[0]: 1.0, MEMBERS[1]: 0.0}) == pytest.approx(0.125**0.5)
    assert disagreement({"thumb": 0.9}) is None
    assert without_members({**shares, "thumb": 0.9}) == {"thumb": 0.9}
