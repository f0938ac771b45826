"""Rows of a registry say whose they are and when they came, so that what cannot be believed is left out."""

import time
from pathlib import Path

from penstock.registry.ratings import Rating
from penstock.registry.registry import Registry
from penstock.workloads.chat.ratings import RatingRules, filter_ratings
from penstock.workloads.language.feedback import rows_of


def test_a_registry_tells_who_rated_and_when(tmp_path: Path) -> None:
    url, now_s = f"sqlite:///{tmp_path / 'registry.sqlite'}", time.time()
    with Registry.open(url, migrate=True) as registry:
        registry.add_ratings(
            "default",
            [
                Rating(prompt="a", response=f"answer {number}", score=1.0, key="thumb", rater=rater)
                for rater, count in (("ann", 5), ("", 1))
                for number in range(count)
            ],
        )
    rows = [row for _, row in rows_of(url, "default")]
    assert [row.get("rater") for row in rows] == ["ann"] * 5 + [None]
    assert all(abs(row["at_s"] - now_s) < 3600 for row in rows)
    found = filter_ratings(rows, RatingRules(daily_cap=3, false_alarms=0.01))
    assert (len(found.kept), found.unnamed) == (4, 1)
