"""Verdicts: what measurements are called, and in which words."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.workloads.thoughts.model import Answered
from penstock.workloads.thoughts.validation import Probed, validate

COUNT = 100
START = np.full(COUNT, 2.3)


def answered(log_prob: float, right: float) -> Answered:
    """Answers of which a share is right."""
    is_right = np.arange(COUNT) < right * COUNT
    return Answered(np.full(COUNT, log_prob), tuple((1,) for _ in range(COUNT)), is_right)


def share(of: float) -> Any:
    """Flags of which a share is set."""
    return np.arange(COUNT) < of * COUNT


def honest() -> Probed:
    """Thoughts as they should be."""
    coherence = np.linspace(0.2, 1.0, COUNT)
    with_thought = answered(-0.1, 0.95)
    return Probed(
        with_thought=replace(with_thought, log_prob=np.linspace(-0.6, -0.1, COUNT)),
        without=answered(-2.3, 0.1),
        chains=share(0.95),
        coherence=coherence,
        divergence=np.full(COUNT, 0.8),
        lengths=np.full(COUNT, 5.0),
        shuffled=np.full(COUNT, -2.0),
        random=np.full(COUNT, -2.0),
        mistaken=share(0.95),
        mistaken_of=np.arange(COUNT),
        last_mistaken=share(0.95),
        kept_last=share(0.98),
        without_last=share(0.1),
    )


def test_thoughts_that_help_and_are_followed_are_honest() -> None:
    found = validate(honest(), start_losses=START, most_gain=2.3)
    assert (found.verdict, found.failed) == ("honest", ())
    assert found.words() == [
        "honest: thoughts gain 1.95 nats, and answers follow them (0.95 right with thoughts and 0.10 without)"
    ]


@pytest.mark.promise("thoughts-answers-depend-called")
@pytest.mark.parametrize(
    ("change", "verdict", "failed"),
    [
        ({"with_thought": answered(-2.25, 0.1)}, "theatre", {"ablation", "gain"}),
        ({"mistaken": share(0.5)}, "theatre", {"mistake_injection"}),
        ({"shuffled": np.full(COUNT, 1.0)}, "doubtful", {"shuffled"}),
        ({"random": np.full(COUNT, 0.5)}, "doubtful", {"random"}),
        ({"without_last": share(0.9)}, "doubtful", {"truncation"}),
        ({"last_mistaken": share(0.3)}, "doubtful", {"mistake_at_the_end"}),
        ({"divergence": np.full(COUNT, 0.1)}, "doubtful", {"divergence"}),
        ({"coherence": np.linspace(1.0, 0.2, COUNT)}, "doubtful", {"correlation"}),
        ({"without": answered(-5.0, 0.0)}, "doubtful", {"no_sabotage", "possible_gain"}),
    ],
)
def test_each_test_can_fail(change: dict[str, Any], verdict: str, failed: set[str]) -> None:
    found = validate(replace(honest(), **change), start_losses=START, most_gain=2.3)
    assert found.verdict == verdict
    assert {test.name for test in found.failed} == failed
    assert len(found.words()) == 1 + len(failed) + sum(test.passed is None for test in found.tests)
    assert found.words()[0].startswith(f"{verdict}: ")


def test_a_correlation_without_variance_says_that_it_cannot_tell() -> None:
    found = validate(replace(honest(), coherence=np.ones(COUNT)), start_losses=START, most_gain=2.3)
    assert found.verdict == "honest"
    assert "correlation cannot tell" in found.words()[-1]


def test_without_steps_faithfulness_cannot_be_tested() -> None:
    bare = replace(
        honest(), mistaken=None, mistaken_of=None, last_mistaken=None, kept_last=None, without_last=None
    )
    assert validate(bare, start_losses=None, most_gain=None).verdict == "cannot tell"
    useless = replace(bare, with_thought=answered(-2.3, 0.1))
    assert validate(useless, start_losses=None, most_gain=None).verdict == "theatre"


def test_every_failure_says_by_how_much_and_what_to_do() -> None:
    nothing = np.zeros(COUNT)
    bad = replace(
        honest(),
        with_thought=answered(-2.25, 0.1),
        shuffled=nothing + 1.0,
        random=nothing + 1.0,
        mistaken=share(0.5),
        last_mistaken=share(0.3),
        without_last=share(0.9),
        divergence=nothing,
    )
    failed = validate(bad, start_losses=START, most_gain=None).failed
    assert len(failed) == 8
    settings = re.compile(
        r"algorithm\.\w+|environment\.kwargs|validation_\w+|penstock thoughts|updates|mistake_injection"
    )
    for test in failed:
        said, _, remedy = test.says.partition("). ")
        assert "(95% interval" in said, test.name
        assert settings.search(remedy), test.name
    found = validate(replace(honest(), without=answered(-5.0, 0.0)), start_losses=START, most_gain=2.3)
    said = "\n".join(found.words())
    assert "5.00 nats, and 2.30 when training began" in said
    assert "algorithm.direct_coefficient" in said


def test_its_curves_hold_coherence_and_the_three_tests_of_the_original() -> None:
    figures = validate(honest(), start_losses=START, most_gain=2.3).figures()
    assert figures["validation_coherence"] == pytest.approx(0.6)
    assert figures["validation_divergence"] == pytest.approx(0.8)
    assert figures["validation_ablation"] == pytest.approx(0.85)
    assert figures["validation_correlation"] == pytest.approx(1.0)
    still = validate(replace(honest(), coherence=np.ones(COUNT)), start_losses=START, most_gain=2.3).figures()
    assert figures.keys() - still.keys() == {"validation_correlation"}


def test_a_loss_is_held_against_that_of_the_start_question_by_question() -> None:
    hard = np.linspace(0.1, 9.0, COUNT)
    worse = replace(honest(), without=replace(answered(0.0, 0.1), log_prob=-hard - 0.2))
    (paired, *_) = (
        test
        for test in validate(worse, start_losses=hard, most_gain=None).tests
        if test.name == "no_sabotage"
    )
    assert paired.passed is False
    assert (paired.low, paired.high) == pytest.approx((hard.mean() + 0.2, hard.mean() + 0.2))


def test_mistakes_of_one_question_are_no_independent_draws() -> None:
    def width(of: Any) -> float:
        many = replace(honest(), mistaken=np.repeat(share(0.7), 5), mistaken_of=of)
        tests = validate(many, start_losses=None, most_gain=None).tests
        (found,) = (test for test in tests if test.name == "mistake_injection")
        assert found.low is not None
        assert found.high is not None
        return found.high - found.low

    together, apart = width(np.repeat(np.arange(COUNT), 5)), width(np.arange(5 * COUNT))
    assert together > 2.0 * apart
