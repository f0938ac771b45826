"""Ratings of responses are kept raw, in order, and told apart from the absence of one."""

import math
from pathlib import Path
from typing import Any

import pytest

from penstock.registry.ratings import RatedConversation, Rating
from penstock.registry.registry import Registry
from tests.support.storage.ready_tables import with_registry

CHAT = [{"role": "user", "content": "two and two?"}]


def test_ratings_come_back_as_they_were_given(tmp_path: Path) -> None:
    given = [
        Rating(prompt="p", response="a", score=0.0, key="thumb", source="ada", conversation="c-1", version=7),
        Rating(prompt="p", response="b", score=-1.0),
        Rating(prompt=CHAT, response="four", rejected="five"),
    ]
    with Registry.open(with_registry(f"sqlite:///{tmp_path}/a.sqlite"), migrate=True) as registry:
        registry.add_ratings("default", given[:2])
        registry.add_ratings("other", given[2:])
        first = registry.ratings(limit=1)
        rest = registry.ratings(after=first[0].number)
        of_one = registry.ratings("default")
    assert given == [kept.rating for kept in (*first, *rest)]
    assert given[:2] == [kept.rating for kept in of_one]
    assert "other" == rest[-1].policy


@pytest.mark.parametrize(
    ("score", "rejected", "message"),
    [
        (None, None, "give one of the two"),
        (1.0, "b", "give one of the two"),
        (math.nan, None, "must be finite"),
        (math.inf, None, "must be finite"),
    ],
)
def test_what_is_no_rating_is_refused(score: float | None, rejected: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rating(prompt="p", response="a", score=score, rejected=rejected)


def test_a_conversation_is_rated_as_its_newest_score_says(tmp_path: Path) -> None:
    def rating(conversation: str, score: float, **other: Any) -> Rating:
        said: dict[str, Any] = {"key": "thumb", "rater": "ann", "conversation": conversation, **other}
        return Rating(prompt="p", response="a", score=score, **said)

    given = [
        rating("c-1", 1.0, version=7),
        rating("c-1", -1.0, version=8, rater="bob"),
        rating("c-2", -1.0),
        rating("c-2", 1.0),
        rating("c-2", -1.0, source="asked"),
        rating("c-2", -1.0, key="safety"),
        rating("c-3", 1.0, source="asked"),
        rating("", 1.0),
    ]
    with Registry.open(with_registry(f"sqlite:///{tmp_path}/a.sqlite"), migrate=True) as registry:
        registry.add_ratings("default", given)
        registry.add_ratings("other", [rating("c-9", 1.0)])
        found = registry.rated_conversations("default", "thumb", above=0.5, without="asked")
        everybody = registry.rated_conversations("default", "thumb", above=0.5)
        registry.delete_ratings("", "ann")
        left = registry.rated_conversations("default", "thumb", above=0.5)
    bobs = RatedConversation(conversation="c-1", rater="bob", is_well=False)
    assert found == (bobs, RatedConversation(conversation="c-2", rater="ann", is_well=True))
    assert [(one.conversation, one.is_well) for one in everybody] == [
        ("c-1", False),
        ("c-2", False),
        ("c-3", True),
    ]
    assert left == (bobs,)
