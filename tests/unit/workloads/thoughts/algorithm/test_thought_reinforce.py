"""REINFORCE of thoughts: its loss beside one written out, its schedules, its figures, its checkpoints."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from penstock.learner.batch import Batch
from penstock.workloads.thoughts.environment import ThoughtReinforceSection
from penstock.workloads.thoughts.model import head_of
from penstock.workloads.thoughts.reinforce import ThoughtReinforce
from penstock.workloads.thoughts.tasks import Continuation, Rings
from tests.support.thoughts.small_thoughts import (
    LAYOUT,
    TASK,
    reinforce,
    small_base,
    thinking_policy,
    thought_batch,
    thought_columns,
)

ORIGINAL = (
    "rl/episode",
    "rl/reward",
    "rl/avg_reward_100",
    "rl/policy_loss",
    "rl/value_loss",
    "rl/entropy",
    "rl/entropy_coefficient",
    "rl/advantages",
    "rl/kl_divergence",
    "rl/total_loss",
    "rl/num_thoughts",
    "rl/coherence",
    "rl/learning_rate",
)
METRICS = (
    *ORIGINAL,
    "policy_loss",
    "entropy",
    "gradient_norm",
    "learning_rate",
    "entropy_coefficient",
    "kl_behaviour",
    "effective_sample_size",
    "score",
    "gain",
    "reward_difference",
    "loss_with_thought",
    "loss_without_thought",
    "answers_right",
    "direct_answers_right",
    "thought_length",
    "thought_share",
    "left_out",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model."""
    return small_base(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def batch(base: Path) -> Batch:
    """Four thoughts on each of three questions."""
    return thought_batch(thought_columns(thinking_policy(base), 3, 4))


def weights(algorithm: ThoughtReinforce) -> Tensor:
    """All that is published, as one row."""
    return torch.cat([one.detach().flatten().clone() for one in algorithm.policy.trained().values()])


def log_prob(algorithm: ThoughtReinforce, row: tuple[int, ...], start: int, end: int) -> Tensor:
    """Log-probabilities of tokens start … end − 1 of one row, by a pass of its own."""
    logits = algorithm.policy.network(input_ids=torch.tensor([row])).logits[0].log_softmax(-1)
    found: Tensor = logits[torch.arange(start - 1, end - 1), torch.tensor(row[start:end])]
    return found


def test_its_loss_is_that_of_the_paper(base: Path) -> None:
    algorithm = reinforce(
        base, learning_rate=0.0, entropy_coefficient=0.02, answer_coefficient=0.7, direct_coefficient=0.3
    )
    columns = thought_columns(algorithm.policy, 2, 3)
    metrics = algorithm.update(thought_batch(columns), progress=0.0).metrics
    policy_terms, entropies, answers, directs, rewards = [], [], [], [], []
    for one in columns:
        start, count = one.turns[0].start, len(one.turns[0].log_prob)
        answers.append(log_prob(algorithm, one.ids, len(one.ids) - 1, len(one.ids)).sum())
        direct = (*one.ids[: start - 1], LAYOUT.equals, one.ids[-1])
        directs.append(log_prob(algorithm, direct, len(direct) - 1, len(direct)).sum())
        rewards.append(float((answers[-1] - directs[-1]).clamp(-5, 5).detach()))
        policy_terms.append(log_prob(algorithm, one.ids, start, start + count))
        logits = algorithm.policy.network(input_ids=torch.tensor([one.ids])).logits[0].log_softmax(-1)
        places = logits[start - 1 : start - 1 + count]
        entropies.append(-(places.exp() * places).sum(1))
    total = torch.tensor(0.0)
    for number, terms in enumerate(policy_terms):
        group = range(number // 3 * 3, number // 3 * 3 + 3)
        others = [rewards[other] for other in group if other != number]
        total = total - ((rewards[number] - sum(others) / 2) * terms).sum()
    policy = total / sum(map(len, policy_terms))
    loss = policy - 0.7 * torch.stack(answers).mean() - 0.3 * torch.stack(directs[::3]).mean()
    loss = loss - 0.02 * torch.cat(entropies).mean()
    assert metrics["rl/policy_loss"] == pytest.approx(float(policy.detach()), abs=1e-5)
    assert metrics["rl/total_loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    assert metrics["rl/reward"] == pytest.approx(sum(rewards) / 6, abs=1e-5)
    assert metrics["reward_difference"] == pytest.approx(0.0, abs=1e-4)


def test_a_reward_is_what_the_thought_adds_within_bounds(base: Path, batch: Batch) -> None:
    whole, clipped = (
        reinforce(base, learning_rate=0.0, reward_clip=bound).update(batch, progress=0.0).metrics
        for bound in (5.0, 1e-4)
    )
    assert whole["rl/reward"] == pytest.approx(whole["gain"])
    assert abs(clipped["rl/reward"]) <= 1e-4 < abs(clipped["gain"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"baseline": "learned"},
        {"baseline": "both", "baseline_layers": 4},
        {"baseline": "none", "normalise_advantages": True},
        {"baseline": "learned", "advantage": "gae", "baseline_reads": "pooled"},
        {"kl_coefficient": 0.1},
        {"reward_from": "another"},
        {"mixing": 8},
    ],
)
def test_every_way_of_learning_moves_the_policy_and_tells_all_figures(
    base: Path, batch: Batch, options: dict[str, Any]
) -> None:
    algorithm = reinforce(base, **options)
    before = weights(algorithm)
    update = algorithm.update(batch, progress=0.0)
    assert update.applied
    assert set(METRICS) == set(update.metrics)
    assert set(ORIGINAL) <= set(update.metrics)
    assert len(ORIGINAL) == 13
    assert all(map(math.isfinite, update.metrics.values()))
    assert not torch.equal(before, weights(algorithm))
    assert algorithm.updates == 1


def test_a_mixing_head_learns_with_the_answers(base: Path) -> None:
    algorithm = reinforce(base, mixing=8, learning_rate=0.05)
    columns = thought_columns(algorithm.policy, 3, 4)
    first = algorithm.update(thought_batch(columns), progress=0.0).metrics
    assert first["thought_share"] == 0.5
    assert first["reward_difference"] == pytest.approx(0.0, abs=1e-4)
    head = head_of(algorithm.policy.network)
    assert head is not None
    assert float(head.last.weight.detach().abs().sum()) > 0.0
    assert algorithm.update(thought_batch(columns), progress=0.0).metrics["thought_share"] != 0.5


def test_the_marks_around_a_thought_are_learned(base: Path, batch: Batch) -> None:
    algorithm = reinforce(base)
    marks = [LAYOUT.think, LAYOUT.end]
    read, said = (
        layer.weight for layer in (
            algorithm.policy.network.get_input_embeddings(), algorithm.policy.network.get_output_embeddings()
        )
    )  # fmt: skip
    before = read[marks].detach().clone(), said[LAYOUT.end].detach().clone()
    algorithm.update(batch, progress=0.0)
    assert (read[marks] != before[0]).any(1).all()
    assert (said[LAYOUT.end] != before[1]).any()


def test_experience_that_lags_is_weighted_by_its_ratio_up_to_a_cap(base: Path) -> None:
    algorithm = reinforce(base, learning_rate=0.0, baseline="none")
    columns = thought_columns(algorithm.policy, 2, 2)
    plain = algorithm.update(thought_batch(columns), progress=0.0).metrics["rl/policy_loss"]
    for lag, factor in ((math.log(1.5), 1.5), (math.log(10.0), 2.0)):
        batch = thought_batch(columns)
        batch.log_prob[batch.valid] -= lag
        found = algorithm.update(batch, progress=0.0).metrics["rl/policy_loss"]
        assert found == pytest.approx(factor * plain, rel=1e-4)


@pytest.mark.parametrize(
    ("schedule", "progress", "share"),
    [
        ("constant", 0.9, 1.0),
        ("linear", 0.5, 0.55),
        ("linear", 1.0, 0.1),
        ("cosine", 0.5, 0.55),
        ("cosine", 1.0, 0.1),
    ],
)
def test_a_falling_rate_ends_at_its_floor(
    base: Path, batch: Batch, schedule: str, progress: float, share: float
) -> None:
    algorithm = reinforce(base, learning_rate_schedule=schedule, learning_rate_floor=0.1, learning_rate=1e-3)
    metrics = algorithm.update(batch, progress=progress).metrics
    assert metrics["rl/learning_rate"] == pytest.approx(share * 1e-3)


def test_a_run_of_so_many_updates_goes_through_its_schedule_by_them(base: Path, batch: Batch) -> None:
    options: dict[str, Any] = {"learning_rate_schedule": "linear", "learning_rate_floor": 0.1}
    algorithm = reinforce(base, total_updates=4, learning_rate=1e-3, **options)
    rates = [algorithm.update(batch, progress=0.5).metrics["rl/learning_rate"] for _ in range(5)]
    assert rates == pytest.approx([1e-3, 7.75e-4, 5.5e-4, 3.25e-4, 1e-4])


def test_the_rate_warms_up_and_the_entropy_bonus_decays_to_its_floor(base: Path, batch: Batch) -> None:
    algorithm = reinforce(base, warmup_updates=4, learning_rate=1e-3, entropy_decay=0.5, entropy_floor=0.002)
    told = [algorithm.update(batch, progress=0.0).metrics for _ in range(5)]
    assert [one["rl/learning_rate"] for one in told] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])
    assert [one["rl/entropy_coefficient"] for one in told] == pytest.approx(
        [0.01, 0.005, 0.0025, 0.002, 0.002]
    )
    assert [one["rl/episode"] for one in told] == [1, 2, 3, 4, 5]


def test_a_batch_that_is_not_finite_leaves_nothing(base: Path, batch: Batch) -> None:
    algorithm = reinforce(base)
    algorithm.update(batch, progress=0.0)
    before = algorithm.state()
    policy = dict(algorithm.policy.trained())
    broken = thought_batch(thought_columns(algorithm.policy, 3, 4))
    broken.log_prob[broken.valid] = -math.inf
    assert algorithm.update(broken, progress=0.0).reason in ("nan", "implausible")
    after = algorithm.state()
    assert after.numbers == before.numbers
    assert all(torch.equal(before.tensors[name], after.tensors[name]) for name in before.tensors)
    assert all(bool(one.isfinite().all()) for one in policy.values())


def test_a_fragment_whose_words_are_no_question_is_left_out(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = reinforce(base)
    good, bad = (thought_columns(algorithm.policy, 2, 2, seed=seed) for seed in (0, 1))
    start = bad[0].turns[0].start
    ids = (*bad[0].ids[:1], *[LAYOUT.symbols[0]] * (start - 2), *bad[0].ids[start - 1 :])
    bad[0] = replace(bad[0], ids=ids)
    resume = type(TASK).resume

    def careless(task: Rings, question: Sequence[str], thought: Sequence[str]) -> Continuation | None:
        if ">" not in question[0]:
            raise TypeError("a task of one's own")
        return resume(task, question, thought)

    monkeypatch.setattr(type(TASK), "resume", careless)
    update = algorithm.update(thought_batch(good, bad), progress=0.0)
    assert update.applied
    assert dict(update.culprits) == {2: "error"}


def test_it_goes_on_from_a_checkpoint_as_if_nothing_had_been(base: Path, batch: Batch) -> None:
    options: dict[str, Any] = {"baseline": "both", "validate_every": 1}
    algorithm, other = reinforce(base, **options), reinforce(base, **options)
    for _ in range(2):
        algorithm.update(batch, progress=0.0)
    other.load(algorithm.state())
    told = [one.update(batch, progress=0.0).metrics for one in (algorithm, other)]
    assert told[0] == told[1]
    assert torch.equal(weights(algorithm), weights(other))
    assert algorithm.findings() == other.findings()


def test_a_restore_takes_weights_and_keeps_counts(base: Path, batch: Batch) -> None:
    algorithm = reinforce(base)
    algorithm.update(batch, progress=0.0)
    state, kept = algorithm.state(), weights(algorithm)
    algorithm.update(batch, progress=0.0)
    algorithm.restore(state)
    assert torch.equal(weights(algorithm), kept)
    assert algorithm.updates == 2
    with pytest.raises(ValueError, match="validation"):
        algorithm.load(type(state)(tensors=state.tensors, numbers={"updates": 1}))


@pytest.mark.promise("thoughts-answers-depend-called")
def test_theatre_ends_a_run_when_its_grace_is_over(base: Path, batch: Batch) -> None:
    algorithm = reinforce(base, validate_every=1, theatre_grace=2)
    told_at_once, rejected = [], []
    for _ in range(2):
        metrics = algorithm.update(batch, progress=0.0).metrics
        told_at_once.append(metrics["validation_theatre"])
        rejected.append(algorithm.has_rejected)
    assert (told_at_once, rejected) == ([1.0, 1.0], [False, True])
    found = algorithm.findings()
    assert found["theatre"]["verdict"] == "theatre"
    assert found["theatre"]["update"] == 2
    assert found["remarks"][0].startswith("theatre: ")
    only_told = reinforce(base, validate_every=1, theatre_grace=1, ends_theatre=False)
    only_told.update(batch, progress=0.0)
    assert not only_told.has_rejected
    assert only_told.findings()["theatre"]["verdict"] == "theatre"


def test_a_summary_judges_the_weights_that_are_left(base: Path, batch: Batch) -> None:
    algorithm, often = reinforce(base, validate_every=50), reinforce(base, validate_every=1)
    for one in (algorithm, often):
        one.update(batch, progress=0.0)
    kept = algorithm.state().numbers["validation"]
    assert kept["last"]["update"] == 0
    found = algorithm.findings()
    assert found["theatre"] == often.state().numbers["validation"]["last"]
    assert found["theatre"]["update"] == 1
    assert found["remarks"] == found["theatre"]["words"]
    assert algorithm.state().numbers["validation"] == kept
    assert reinforce(base, validate_every=0).findings() == {}


def test_gae_without_a_critic_is_refused() -> None:
    with pytest.raises(ValidationError, match="learned baseline"):
        ThoughtReinforceSection(advantage="gae", baseline="group")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("validation_questions", 31, "greater than or equal to 32"),
        ("validation_questions", 16_385, "less than or equal to 16384"),
        ("baseline_hidden", 0, "greater than 0"),
        ("baseline_hidden", 4_097, "less than or equal to 4096"),
        ("baseline_layers", 0, "greater than 0"),
        ("baseline_layers", 17, "less than or equal to 16"),
    ],
)
def test_sizes_have_bounds(field: str, value: int, said: str) -> None:
    with pytest.raises(ValidationError, match=rf"{field}\n.*{said}"):
        ThoughtReinforceSection.model_validate({field: value})
    largest = ThoughtReinforceSection(validation_questions=16_384, baseline_hidden=4_096, baseline_layers=16)
    assert largest.baseline_hidden == 4_096


def test_its_task_is_the_one_that_is_asked() -> None:
    assert TASK.levels == (1, 2, 3)
