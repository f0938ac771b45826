"""Heads as they are declared, and their ratings as shares."""

import pytest

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.reward.heads import parse_heads


def test_a_rating_becomes_a_share_of_its_scale() -> None:
    stars, thumb, charm = parse_heads(["relevance=stars", "thumb=thumbs", "charm=0:10"])
    assert [stars.share(one) for one in (1, 3, 5)] == [0.0, 0.5, 1.0]
    assert (thumb.share(True), thumb.share("down"), charm.share(2.5)) == (1.0, 0.0, 0.25)
    assert (thumb.is_choice, stars.is_choice) == (True, False)
    with pytest.raises(ValueError, match="score=6 is outside 1 to 5"):
        stars.share(6)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["relevance"], "head 'relevance': write NAME=SCALE"),
        (["preferred=thumbs"], "'preferred' is the head of pairs"),
        (["charm=none"], "head 'charm=none': a head gives 0 to 1, so its scale has bounds"),
        (["charm=3:1"], "head 'charm=3:1': scale='3:1'"),
        (["a=stars", "a=thumbs"], "head 'a': is declared twice"),
        ([], "0 heads: declare 1 to 32"),
    ],
)
def test_what_declares_no_heads_is_refused_by_name(texts: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        parse_heads(texts)
