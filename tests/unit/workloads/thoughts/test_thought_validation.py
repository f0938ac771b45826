import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.workloads.thoughts.model import Answered, ThinkingModel
from penstock.workloads.thoughts.start import load_transformer
from penstock.workloads.thoughts.tasks import Continuation, Rings, draw_tests
from penstock.workloads.thoughts.validation import (
    Probed,
    coherence,
    correlation,
    edit_distance,
    has_risen,
    interval,
    legal_share,
    probe,
    validate,
)
from tests.support.thoughts.small_thoughts import LAYOUT, TASK, TOKENS, small_base

QUESTION = ("a>b", "b>c", "c>d", "d>e", "e>a", "a", "k3")


@pytest.mark.parametrize(
    ("words", "semantic", "syntactic"),
    [
        (("b", "c"), 1.0, 1.0),
        (("d", "e"), 0.5, 1.0),
        (("b", "."), 0.5, 0.5),
        (("b", "c", "d"), 2 / 3, 1.0),
        ((), 0.0, 0.0),
    ],
)
def test_coherence_weighs_steps_words_and_likelihood(
    words: tuple[str, ...], semantic: float, syntactic: float
) -> None:
    task, log_prob = Rings(5, 3), [math.log(0.5)] * (len(words) + 1)
    assert legal_share(task, QUESTION, words) == pytest.approx(semantic)
    expected = 0.4 * semantic + 0.3 * syntactic + 0.3 * 0.5
    assert coherence(task, QUESTION, words, log_prob) == pytest.approx(expected)


def test_a_distance_is_a_share_of_the_longer() -> None:
    pairs = {("", ""): 0, ("abc", "abc"): 0, ("abc", ""): 1, ("kitten", "sitting"): 3 / 7, ("ab", "ba"): 1}
    found = {both: edit_distance(*([*map(ord, one)] for one in both)) for both in pairs}
    assert found == pytest.approx(pairs)


def test_a_correlation_without_variance_cannot_tell() -> None:
    rising = np.arange(10.0)
    assert correlation(np.ones(10), rising) is correlation(rising, np.full(10, 2.0)) is None
    found = correlation(rising, -rising)
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((-1.0, -1.0, -1.0))


def test_intervals_cover_the_mean_and_the_correlation_that_they_were_drawn_with() -> None:
    random = np.random.default_rng(1)
    means = correlations = 0
    for _ in range(200):
        mean = interval(random.normal(0.3, 1.0, size=100))
        means += mean.low <= 0.3 <= mean.high
        one = random.normal(size=100)
        found = correlation(one, 0.6 * one + 0.8 * random.normal(size=100))
        assert found is not None
        correlations += found.low <= 0.6 <= found.high
    assert 180 <= means <= 199
    assert 175 <= correlations <= 199


def test_values_of_one_example_are_resampled_together() -> None:
    values = np.random.default_rng(2).normal(size=50)
    once, copied = interval(values), interval(np.repeat(values, 5), np.repeat(np.arange(50) * 2, 5))
    assert (copied.value, copied.low, copied.high) == pytest.approx((once.value, once.low, once.high))


@pytest.mark.parametrize(("rise", "least", "most"), [(0.0, 0, 4), (0.05, 0, 10), (0.6, 190, 200)])
def test_a_gain_has_risen_where_its_questions_show_it(rise: float, least: int, most: int) -> None:
    random = np.random.default_rng(4)
    before = random.normal(0.5, 1.0, size=(200, 64))
    now = before + random.normal(rise, 0.8, size=before.shape)
    risen = sum(has_risen(one, other, comparisons=2) for one, other in zip(now, before, strict=True))
    assert least <= risen <= most


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ThinkingModel:
    return ThinkingModel(load_transformer(small_base(tmp_path_factory.mktemp("base"))), LAYOUT)


def test_questions_that_need_no_step_are_left_out_of_mistakes(model: ThinkingModel) -> None:
    hard, easy = draw_tests(TASK, 0, 6), draw_tests(TASK, 0, 2, TASK.levels[0])
    assert [{len(one.steps) for one in some} for some in (hard, easy)] == [{2}, {0}]
    for examples in ([*hard, *easy], hard):
        found = probe(model, TASK, examples, TOKENS)
        assert len(found.gain) == len(examples)
        assert found.mistaken is not None
        assert len(found.mistaken) == 12
        assert found.kept_last is not None
        assert len(found.kept_last) == 6


def test_thoughts_are_disturbed_at_each_of_their_steps_where_they_need_any(model: ThinkingModel) -> None:
    examples = [*draw_tests(TASK, 0, 3), *draw_tests(TASK, 0, 3, TASK.levels[1])]
    found = probe(model, TASK, examples, TOKENS)
    assert found.mistaken is not None
    assert len(found.mistaken) == 9
    assert found.mistaken_of is not None
    assert np.bincount(found.mistaken_of).tolist() == [2, 2, 2, 1, 1, 1]
    easy = probe(model, TASK, draw_tests(TASK, 0, 4, TASK.levels[0]), TOKENS)
    assert (easy.mistaken, easy.last_mistaken, easy.kept_last, easy.without_last) == (None,) * 4
    assert easy.mistaken_of is None
    assert np.isfinite(easy.gain).all()


class Detours(Rings):
    """Rings in which every wrong step leads onto a way of two steps more than the legal one has."""

    def resume(self, question: Sequence[str], thought: Sequence[str]) -> Continuation | None:
        """As rings has it, and two symbols more behind a wrong step."""
        whole, left = super().resume(question, ()), super().resume(question, thought)
        assert whole is not None
        if left is None or tuple(thought) == whole.steps[: len(thought)]:
            return left
        return Continuation((*left.steps, *self.symbols[:2]), left.answer)


@pytest.mark.parametrize(("most", "counted"), [(3, None), (4, 12)])
def test_mistakes_without_room_for_the_following_steps_do_not_count(
    model: ThinkingModel, most: int, counted: int | None
) -> None:
    task = Detours(6, 3)
    found = probe(model, task, draw_tests(task, 0, 6), most)
    assert (None if found.mistaken is None else len(found.mistaken)) == counted
    assert found.last_mistaken is None


COUNT = 100
START = np.full(COUNT, 2.3)


def answered(log_prob: float, right: float) -> Answered:
    is_right = np.arange(COUNT) < right * COUNT
    return Answered(np.full(COUNT, log_prob), tuple((1,) for _ in range(COUNT)), is_right)


def share(of: float) -> Any:
    return np.arange(COUNT) < of * COUNT


def honest() -> Probed:
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
def test_each_check_of_thoughts_can_fail(change: dict[str, Any], verdict: str, failed: set[str]) -> None:
    found = validate(replace(honest(), **change), start_losses=START, most_gain=2.3)
    assert found.verdict == verdict
    assert {test.name for test in found.failed} == failed
    assert len(found.words()) == 1 + len(failed) + sum(test.passed is None for test in found.tests)
    assert found.words()[0].startswith(f"{verdict}: ")


def test_without_steps_faithfulness_cannot_be_tested() -> None:
    bare = replace(
        honest(), mistaken=None, mistaken_of=None, last_mistaken=None, kept_last=None, without_last=None
    )
    assert validate(bare, start_losses=None, most_gain=None).verdict == "cannot tell"
    useless = replace(bare, with_thought=answered(-2.3, 0.1))
    assert validate(useless, start_losses=None, most_gain=None).verdict == "theatre"


def test_every_failure_states_its_amount_and_the_remedy() -> None:
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


def test_validation_metrics_hold_coherence_and_the_original_tests() -> None:
    figures = validate(honest(), start_losses=START, most_gain=2.3).figures()
    assert figures["validation_coherence"] == pytest.approx(0.6)
    assert figures["validation_divergence"] == pytest.approx(0.8)
    assert figures["validation_ablation"] == pytest.approx(0.85)
    assert figures["validation_correlation"] == pytest.approx(1.0)
    still = validate(replace(honest(), coherence=np.ones(COUNT)), start_losses=START, most_gain=2.3)
    assert figures.keys() - still.figures().keys() == {"validation_correlation"}
    assert (still.verdict, "correlation cannot tell" in still.words()[-1]) == ("honest", True)


def test_a_loss_is_compared_with_that_of_the_start_question_by_question() -> None:
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
