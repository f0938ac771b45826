"""A version beside the base: pairs of episodes, their difference, and what it says."""

import math
from dataclasses import replace

import numpy as np
import pytest

from penstock.config.settings import ConfigurationError, EvaluationSection
from penstock.config.workload import find
from penstock.learner.evaluation import LEAST_STARTS, BaseComparison, Key, check_base, compare
from penstock.protocol.messages import Episode


def played(returns: list[float], starts: list[int] | None = None, length: int = 4) -> dict[Key, Episode]:
    """Episodes of these returns, each with a start of its own unless starts say otherwise."""
    found: dict[Key, Episode] = {}
    for start, value in zip(starts or range(len(returns)), returns, strict=True):
        number = sum(key[0] == start for key in found)
        found[start, number] = Episode(
            slot_id=start,
            episode_id=number,
            episode_return=value,
            length=length,
            terminated=True,
            version=1,
        )
    return found


def compared(version: dict[Key, Episode], base: dict[Key, Episode]) -> BaseComparison:
    """Of pairs that there are."""
    found = compare(version, base)
    assert found is not None
    return found


def test_the_difference_is_that_of_pairs_and_has_their_interval() -> None:
    generator = np.random.default_rng(0)
    base = generator.normal(0.0, 5.0, 40)
    version = base + generator.normal(0.3, 0.5, 40)
    found = compared(played(version.tolist(), length=7), played(base.tolist()))
    centre, error = (version - base).mean(), (version - base).std(ddof=1) / math.sqrt(40)
    assert found.difference == pytest.approx(centre)
    assert found.standard_error == pytest.approx(error)
    assert (found.low, found.high) == pytest.approx(
        (centre - 2.0227 * error, centre + 2.0227 * error), rel=1e-3
    )
    assert (found.mean, found.std) == pytest.approx((base.mean(), base.std()))
    assert (found.episodes, found.starts, found.length, found.version_length) == (40, 40, 4.0, 7.0)
    assert found.verdict == "better"


@pytest.mark.promise("summary-compares-language-model")
def test_who_is_the_base_decides_the_sign() -> None:
    version, base = played([1.0, 2.0, 3.0, 2.0, 1.0, 2.5]), played([0.0, 1.1, 2.0, 0.9, 0.2, 1.0])
    one, other = compared(version, base), compared(base, version)
    assert one.difference == pytest.approx(-other.difference)
    assert one.difference > 0
    assert (one.verdict, other.verdict) == ("better", "worse")
    assert one.mean == pytest.approx(5.2 / 6)


def test_what_chance_may_have_done_is_called_so() -> None:
    generator = np.random.default_rng(1)
    found = compared(played(generator.normal(size=30).tolist()), played(generator.normal(size=30).tolist()))
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0 < found.high
    assert found.verdict == "chance"


def test_episodes_with_one_start_are_no_independent_draws() -> None:
    version, base = [1.0, 0.0, 2.0, 1.0, -1.0, 1.5, 0.5, 1.0], [0.0] * 8
    once = compared(played(version), played(base))
    starts = [start for start in range(8) for _ in range(4)]
    often = compared(
        played([value for value in version for _ in range(4)], starts), played([0.0] * 32, starts)
    )
    assert (often.episodes, often.starts) == (32, 8)
    assert often.difference == pytest.approx(once.difference)
    assert often.standard_error == pytest.approx(once.standard_error)
    assert (often.low, often.high) == pytest.approx((once.low, once.high))


def test_a_few_starts_tell_nothing_even_where_all_agree() -> None:
    for count in range(1, LEAST_STARTS):
        found = compared(played([1.0] * count), played([0.0] * count))
        assert (found.difference, found.verdict) == (1.0, "chance")
        assert (found.standard_error, found.low, found.high) == (None, None, None)
    assert compared(played([1.0] * LEAST_STARTS), played([0.0] * LEAST_STARTS)).verdict == "better"


def test_only_pairs_count() -> None:
    found = compared(played([1.0, 2.0, 50.0]), played([0.0, 0.0]))
    assert (found.episodes, found.difference) == (2, 1.5)
    assert compare(played([1.0]), {}) is None


@pytest.mark.parametrize(
    ("starts", "expected"), [(6, 2.5706), (7, 2.4469), (10, 2.2622), (30, 2.0452), (400, 1.9659)]
)
def test_the_interval_is_that_of_students_t(starts: int, expected: float) -> None:
    values = np.random.default_rng(2).normal(size=starts)
    found = compared(played(values.tolist()), played([0.0] * starts))
    assert found.high is not None
    assert found.standard_error is not None
    quantile = (found.high - found.difference) / found.standard_error
    assert quantile == pytest.approx(expected, rel=2e-3)


def test_a_policy_that_cannot_act_without_weights_has_no_base() -> None:
    check_base(EvaluationSection(), find("control"))
    check_base(EvaluationSection(base=True), find("rlhf"))
    with pytest.raises(ConfigurationError, match=r"evaluation\.base=true: .*'control' act once they have"):
        check_base(EvaluationSection(base=True), find("control"))


def test_it_survives_a_checkpoint() -> None:
    found = compared(played([1.0] * 6), played([0.0] * 6))
    told = found.to_json()
    assert told["verdict"] == "better"
    assert BaseComparison.from_json(told) == found
    assert BaseComparison.from_json(told | {"verdict": "worse"}).verdict == "better"
    assert replace(found, low=-1.0).verdict == "chance"
