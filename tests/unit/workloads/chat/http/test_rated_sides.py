"""Stars by version and side, from a registry."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.registry.ratings import Rating
from penstock.registry.registry import Registry
from workloads.chat.http.kept_ratings import ASKED_SOURCE, SOURCE
from workloads.chat.http.rated_sides import rated_sides


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """An empty one."""
    with Registry.open(f"sqlite:///{tmp_path / 'registry.sqlite'}", migrate=True) as opened:
        yield opened


def stars(
    score: float, conversation: str, version: int = 7, key: str = "safety", source: str = SOURCE
) -> Rating:
    """What somebody says of an answer."""
    return Rating(
        prompt="p",
        response="r",
        score=score,
        key=key,
        source=source,
        conversation=conversation,
        version=version,
    )


def test_four_and_five_stars_are_good_and_the_newest_ones_count(registry: Registry) -> None:
    """Of each version and side; those that somebody was asked for are left out, and so are thumbs."""
    given = [stars(5 if number < 24 else 3, f"talk-{number}") for number in range(40)]
    again = [stars(4, "talk-39"), stars(1, "talk-0", source=ASKED_SOURCE)]
    others = [stars(1, "talk-0", version=8, key="relevance"), stars(1, "talk-0", key="thumb")]
    registry.add_ratings("default", (*given, *again, *others))
    newest, older = rated_sides(registry, "default")
    assert (newest["version"], newest["side"], newest["rated"], newest["good"]) == (8, "relevance", 1, 0)
    assert (newest["share"], newest["low"], newest["high"]) == (None, None, None)
    assert (older["version"], older["side"], older["rated"], older["good"]) == (7, "safety", 40, 25)
    assert older["share"] == 25 / 40
    assert older["low"] < 25 / 40 < older["high"]


def test_without_stars_there_is_nothing(registry: Registry) -> None:
    """Of this policy."""
    registry.add_ratings("other", (stars(5, "talk-1"),))
    assert rated_sides(registry, "default") == []
