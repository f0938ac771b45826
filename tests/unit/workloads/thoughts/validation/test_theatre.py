"""Verdicts: what measurements are called, and in which words."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from workloads.thoughts.thinking_model import Answered
from workloads.thoughts.validation.probes import Probed
from workloads.thoughts.validation.theatre import validate

COUNT = 100


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
        last_mistaken=share(0.95),
        kept_last=share(0.98),
        without_last=share(0.1),
    )


def test_thoughts_that_help_and_are_followed_are_honest() -> None:
    """No test fails, and the words say what is gained."""
    found = validate(honest(), start_loss=2.3, most_gain=2.3)
    assert (found.verdict, found.failed) == ("honest", ())
    assert found.words() == [
        "honest: thoughts gain 1.95 nats, and answers follow them (0.95 right with thoughts and 0.10 without)"
    ]


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
    """Theatre is a gain or a faithfulness that is missing; everything else is doubt."""
    found = validate(replace(honest(), **change), start_loss=2.3, most_gain=2.3)
    assert found.verdict == verdict
    assert {test.name for test in found.failed} == failed
    assert len(found.words()) == 1 + len(failed) + sum(test.passed is None for test in found.tests)
    assert found.words()[0].startswith(f"{verdict}: ")


def test_a_correlation_without_variance_says_that_it_cannot_tell() -> None:
    """It neither fails nor passes, and the verdict does not hang on it."""
    found = validate(replace(honest(), coherence=np.ones(COUNT)), start_loss=2.3, most_gain=2.3)
    assert found.verdict == "honest"
    assert "correlation cannot tell" in found.words()[-1]


def test_without_steps_faithfulness_cannot_be_tested() -> None:
    """A gain alone is not called honest; no gain is theatre all the same."""
    bare = replace(honest(), mistaken=None, last_mistaken=None, kept_last=None, without_last=None)
    assert validate(bare, start_loss=None, most_gain=None).verdict == "cannot tell"
    useless = replace(bare, with_thought=answered(-2.3, 0.1))
    assert validate(useless, start_loss=None, most_gain=None).verdict == "theatre"


def test_words_say_by_how_much_and_what_to_do() -> None:
    """Sabotage names both losses and the setting that ends it."""
    found = validate(replace(honest(), without=answered(-5.0, 0.0)), start_loss=2.3, most_gain=2.3)
    said = "\n".join(found.words())
    assert "5.00 nats, and 2.30 when training began" in said
    assert "algorithm.direct_coefficient" in said
