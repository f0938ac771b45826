import copy
import json
import logging
import math
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from penstock.config.service_settings import over_defaults
from penstock.learner.algorithms.rows import RankGroup
from penstock.learner.batch import Batch
from penstock.training import lay_over
from penstock.workloads.language.conversation import Column
from penstock.workloads.thoughts import WORKLOAD
from penstock.workloads.thoughts import reinforce as advantages
from penstock.workloads.thoughts.environment import ThoughtReinforceSection
from penstock.workloads.thoughts.model import head_of
from penstock.workloads.thoughts.reinforce import (
    ThoughtAdam,
    ThoughtBaseline,
    ThoughtReinforce,
    ThoughtValidation,
    make_thought_model,
    pooled,
)
from penstock.workloads.thoughts.rows import read_rows, with_thoughts, without_thoughts
from penstock.workloads.thoughts.start import load_transformer
from penstock.workloads.thoughts.tasks import Continuation, Rings
from penstock.workloads.thoughts.validation import probe
from tests.support.thoughts.small_thoughts import (
    LAYOUT,
    TASK,
    TOKENS,
    reinforce,
    small_base,
    thinking_policy,
    thought_batch,
    thought_columns,
)


def stepped(optimiser: ThoughtAdam, network: nn.Module, rows: torch.Tensor, count: int) -> None:
    for _ in range(count):
        gradient = optimiser.gradient_of(network(rows).square().mean())
        optimiser.step(gradient, 1e-2, 1.0)


def test_the_optimiser_steps_as_adamw_and_continues_after_a_load() -> None:
    network, rows = nn.Linear(3, 2), torch.randn(5, 3)
    twin = copy.deepcopy(network)
    optimiser = ThoughtAdam(dict(network.named_parameters()), 1e-8)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0)
    stepped(optimiser, network, rows, 3)
    for _ in range(3):
        plain.zero_grad()
        twin(rows).square().mean().backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        plain.step()
    assert torch.allclose(network.weight, twin.weight, atol=1e-7)
    other = copy.deepcopy(network)
    loaded = ThoughtAdam(dict(other.named_parameters()), 1e-8)
    loaded.load_moments(optimiser.moments(), optimiser.steps)
    stepped(optimiser, network, rows, 2)
    stepped(loaded, other, rows, 2)
    assert torch.equal(network.weight, other.weight)


def test_the_optimiser_returns_to_a_copy_byte_for_byte() -> None:
    network, rows = nn.Linear(3, 2), torch.randn(5, 3)
    optimiser = ThoughtAdam(dict(network.named_parameters()), 1e-8)
    stepped(optimiser, network, rows, 2)
    go_back, weight = optimiser.backup(), network.weight.detach().clone()
    stepped(optimiser, network, rows, 1)
    after = network.weight.detach().clone()
    go_back()
    assert torch.equal(network.weight, weight)
    stepped(optimiser, network, rows, 1)
    assert torch.equal(network.weight, after)


def test_moments_have_the_paths_of_a_checkpoint_and_those_of_another_network_are_refused() -> None:
    optimiser = ThoughtAdam(dict(nn.Linear(3, 2).named_parameters()), 1e-8)
    other = ThoughtAdam(dict(nn.Linear(4, 2).named_parameters()), 1e-8)
    assert set(optimiser.moments()) == {
        f"{name}/{kind}" for name in ("weight", "bias") for kind in ("exp_avg", "exp_avg_sq")
    }
    with pytest.raises(ValueError, match="first/weight"):
        optimiser.load_moments(other.moments(), 1)


GROUP = torch.tensor([0, 0, 1, 1, 1])
ROW = torch.tensor([0, 0, 1, 2, 3, 3, 4])
REWARD = torch.tensor([1.0, 3.0, 0.0, 2.0, 4.0])


def test_a_group_mean_is_over_the_other_members() -> None:
    found = advantages.return_advantages(REWARD, ROW, GROUP, value=None, is_grouped=True)
    expected = [1.0 - 3.0, 1.0 - 3.0, 3.0 - 1.0, 0.0 - 3.0, 2.0 - 2.0, 2.0 - 2.0, 4.0 - 1.0]
    assert found.tolist() == pytest.approx(expected)
    other = advantages.of_another_question(torch.arange(6.0), torch.tensor([0, 0, 1, 1, 2, 2]))
    assert other.tolist() == [2.0, 3.0, 4.0, 5.0, 0.0, 1.0], "another question may give the reward"
    one, of_one = torch.tensor([2.0]), torch.tensor([0])
    alone = advantages.return_advantages(one, torch.tensor([0, 0]), of_one, value=None, is_grouped=True)
    assert alone.tolist() == [0.0, 0.0], "a thought that is alone keeps nothing of a group"


def test_a_learned_baseline_is_subtracted_token_by_token() -> None:
    value = torch.arange(7.0) / 10
    learned = advantages.return_advantages(REWARD, ROW, GROUP, value=value, is_grouped=False)
    assert learned.tolist() == pytest.approx((REWARD[ROW] - value).tolist())
    both = advantages.return_advantages(REWARD, ROW, GROUP, value=value, is_grouped=True)
    left = REWARD[ROW] - value
    means = [left[:2].mean(), left[2], left[3], left[4:6].mean(), left[6]]
    of_group = [(means[0] + means[1]) / 2, (means[2] + means[3] + means[4]) / 3]
    scale = [2.0, 1.5]
    expected = [(left[token] - of_group[GROUP[ROW[token]]]) * scale[GROUP[ROW[token]]] for token in range(7)]
    assert both.tolist() == pytest.approx([float(one) for one in expected])


@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_gae_runs_along_the_tokens_of_a_thought(discount: float, gae_lambda: float) -> None:
    value = torch.tensor([0.5, -0.2, 0.1, 0.9, 0.3, 0.4, -1.0])
    last = torch.tensor([1, 2, 3, 5, 6])
    found = advantages.gae_advantages(REWARD, value, ROW, discount=discount, gae_lambda=gae_lambda)
    expected = []
    for token in range(7):
        end = int(last[ROW[token]])
        total = 0.0
        for later in range(token, end + 1):
            following = REWARD[ROW[token]] if later == end else discount * value[later + 1]
            total += (discount * gae_lambda) ** (later - token) * float(following - value[later])
        expected.append(total)
    assert found.tolist() == pytest.approx(expected)


def test_a_learned_baseline_reads_what_was_thought_and_is_as_deep_as_is_asked_for() -> None:
    states, row = torch.arange(10.0).view(5, 2), torch.tensor([0, 0, 1, 1, 1])
    expected = [states[0], states[:2].mean(0), states[2], states[2:4].mean(0), states[2:].mean(0)]
    assert torch.allclose(pooled(states, row), torch.stack(expected)), "it knows nothing of later tokens"
    for layers in (1, 2, 4):
        baseline = ThoughtBaseline(6, layers=layers, width=8, seed=0)
        assert sum(isinstance(part, torch.nn.Linear) for part in baseline.network) == layers
        assert baseline(torch.randn(3, 6)).tolist() == [0.0, 0.0, 0.0]


RECIPE: Final = Path(__file__).resolve().parents[4] / "penstock" / "recipes" / "thoughts-tiny.toml"


def told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, **over: dict[str, Any]
) -> tuple[dict[str, str], Any]:
    """The words of the line, and the algorithm, of the recipe over an untrained model of six symbols."""
    said = tomllib.loads(RECIPE.read_text())
    kwargs = {"model": str(small_base(tmp_path / "base")), "task": "rings:6:3"}
    lay_over(said, {"environment": {"kwargs": kwargs}, "policy": {"kwargs": {**kwargs, "lora": False}}})
    del said["policy"]["kwargs"]["task"]
    lay_over(said, over)
    with caplog.at_level(logging.INFO):
        model = make_thought_model(over_defaults([said]), WORKLOAD, RankGroup(), torch.device("cpu"))
    (line,) = (one for one in caplog.records if one.message == "thoughts are learned")
    return vars(line), model.algorithm


def test_a_run_lists_its_enabled_parts_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line, algorithm = told(tmp_path, caplog)
    assert algorithm.rejection == "theatre"
    assert line["baseline"] == "group"
    assert line["advantage"] == "return"
    assert line["schedule"] == "cosine, 0.001 to a share of 0.1, 0 updates of warm-up"
    assert line["entropy"] == "0.01 × 0.9995 an update, at least 0.001"
    assert (line["kl"], line["patience"]) == ("off", "off")
    assert line["answer_without_thought"] == "λ₀ 1.0"
    assert line["validation"] == "every 50 updates on 256 questions, theatre ends it after 150"


def test_the_log_line_names_disabled_parts_and_settings_of_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line, _ = told(
        tmp_path,
        caplog,
        algorithm={
            "baseline": "both", "baseline_layers": 4, "baseline_reads": "pooled", "advantage": "gae",
            "entropy_coefficient": 0.0, "kl_coefficient": 0.1, "direct_coefficient": 0.0, "validate_every": 0,
        },
        evaluation={"patience": 3, "min_improvement": 0.01},
    )  # fmt: skip
    assert line["baseline"] == "both, 4 layers of 256, pooled"
    assert line["advantage"] == "gae, λ 0.95"
    assert (line["entropy"], line["validation"], line["answer_without_thought"]) == ("off", "off", "off")
    assert line["kl"] == "0.1 to the start"
    assert line["patience"] == "3 evaluations, by 0.01"


ORIGINAL = {
    f"rl/{name}"
    for name in (
        *("episode", "reward", "avg_reward_100", "policy_loss", "value_loss", "entropy", "advantages"),
        *("entropy_coefficient", "kl_divergence", "total_loss", "num_thoughts", "coherence", "learning_rate"),
    )
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_base(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def batch(base: Path) -> Batch:
    return thought_batch(thought_columns(thinking_policy(base), 3, 4))


def weights(algorithm: ThoughtReinforce) -> Tensor:
    """All that is published, as one row."""
    return torch.cat([one.detach().flatten().clone() for one in algorithm.policy.trained().values()])


def log_prob(algorithm: ThoughtReinforce, row: tuple[int, ...], start: int, end: int) -> Tensor:
    """Log-probabilities of tokens start … end − 1 of one row, by a pass of its own."""
    logits = algorithm.policy.network(input_ids=torch.tensor([row])).logits[0].log_softmax(-1)
    found: Tensor = logits[torch.arange(start - 1, end - 1), torch.tensor(row[start:end])]
    return found


def test_the_loss_of_thoughts_is_that_of_the_paper(base: Path) -> None:
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


def test_a_reward_is_the_clipped_gain_from_the_thought(base: Path, batch: Batch) -> None:
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
def test_every_learning_variant_moves_the_policy_and_reports_all_figures(
    base: Path, batch: Batch, options: dict[str, Any]
) -> None:
    algorithm = reinforce(base, **options)
    before = weights(algorithm)
    update = algorithm.update(batch, progress=0.0)
    assert update.applied
    assert update.metrics.keys() >= ORIGINAL
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


def test_a_falling_rate_ends_at_its_floor(base: Path, batch: Batch) -> None:
    options: dict[str, Any] = {"learning_rate_floor": 0.1, "learning_rate": 1e-3}
    for schedule, progress, share in (
        ("constant", 0.9, 1.0),
        ("linear", 0.5, 0.55),
        ("linear", 1.0, 0.1),
        ("cosine", 0.5, 0.55),
        ("cosine", 1.0, 0.1),
    ):
        algorithm = reinforce(base, learning_rate_schedule=schedule, **options)
        metrics = algorithm.update(batch, progress=progress).metrics
        assert metrics["rl/learning_rate"] == pytest.approx(share * 1e-3), (schedule, progress)
    algorithm = reinforce(base, total_updates=4, learning_rate_schedule="linear", **options)
    rates = [algorithm.update(batch, progress=0.5).metrics["rl/learning_rate"] for _ in range(5)]
    assert rates == pytest.approx([1e-3, 7.75e-4, 5.5e-4, 3.25e-4, 1e-4]), "by its updates"


def test_the_rate_warms_up_and_the_entropy_bonus_decays_to_its_floor(base: Path, batch: Batch) -> None:
    algorithm = reinforce(base, warmup_updates=4, learning_rate=1e-3, entropy_decay=0.5, entropy_floor=0.002)
    told = [algorithm.update(batch, progress=0.0).metrics for _ in range(5)]
    assert [one["rl/learning_rate"] for one in told] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])
    entropy = [one["rl/entropy_coefficient"] for one in told]
    assert entropy == pytest.approx([0.01, 0.005, 0.0025, 0.002, 0.002])
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


def test_a_fragment_without_a_question_is_left_out(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_thought_learning_continues_from_a_checkpoint(base: Path, batch: Batch) -> None:
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


def test_a_summary_judges_the_final_weights(base: Path, batch: Batch) -> None:
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


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"validation_questions": 31}, r"validation_questions\n.*greater than or equal to 32"),
        ({"validation_questions": 16_385}, r"validation_questions\n.*less than or equal to 16384"),
        ({"baseline_hidden": 4_097}, r"baseline_hidden\n.*less than or equal to 4096"),
        ({"baseline_layers": 17}, r"baseline_layers\n.*less than or equal to 16"),
        ({"advantage": "gae", "baseline": "group"}, "learned baseline"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ThoughtReinforceSection.model_validate(settings)


@pytest.fixture(scope="module")
def columns(base: Path) -> list[Column]:
    """Two thoughts on each of three questions."""
    return thought_columns(thinking_policy(base), 3, 2)


def test_rows_are_read_back_as_they_were_laid_out(columns: list[Column]) -> None:
    rows = read_rows(thought_batch(columns[:4], columns[4:]), LAYOUT)
    assert rows is not None
    assert (len(rows), len(rows.questions), rows.left_out) == (6, 3, 0)
    assert rows.question_of.tolist() == [0, 0, 1, 1, 2, 2]
    assert with_thoughts(rows, LAYOUT).rows == tuple(one.ids for one in columns)
    sampled = [value for one in columns for value in one.turns[0].log_prob]
    assert rows.behaviour.tolist() == pytest.approx(sampled)
    assert rows.sent.tolist() == pytest.approx([one.turns[0].reward for one in columns])
    assert read_rows(thought_batch([replace(one, turns=()) for one in columns]), LAYOUT) is None


def test_a_question_is_read_once_without_a_thought(columns: list[Column]) -> None:
    rows = read_rows(thought_batch(columns), LAYOUT)
    assert rows is not None
    direct = without_thoughts(rows, LAYOUT)
    assert direct.rows == tuple(
        (*columns[number].ids[: columns[number].turns[0].start - 1], LAYOUT.equals, columns[number].ids[-1])
        for number in (0, 2, 4)
    )
    longest = max(map(len, direct.rows))
    for number, row in enumerate(direct.rows):
        assert direct.place[number] == number * longest + len(row) - 2
        assert direct.action[number] == row[-1]


def test_a_column_with_another_layout_is_left_out(columns: list[Column]) -> None:
    ids, begin = columns[0].ids, columns[0].turns[0].start
    for changed in (
        (*ids[:-2], LAYOUT.filler, ids[-1]),
        ids[:-1],
        (*ids[: begin - 1], LAYOUT.filler, *ids[begin:]),
    ):
        rows = read_rows(thought_batch([replace(columns[0], ids=changed), *columns[1:]]), LAYOUT)
        assert rows is not None
        assert (len(rows), rows.left_out) == (5, 1)


NOTHING_FOUND: Final[dict[str, Any]] = {
    "start_loss": None, "best_gain": None, "last": None, "in_a_row": 0, "figures": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def validation(base: Path) -> ThoughtValidation:
    """Of an untrained model, with a grace of 100 updates."""
    section = ThoughtReinforceSection(validate_every=10, validation_questions=32, theatre_grace=100)
    return ThoughtValidation(load_transformer(base), TASK, LAYOUT, section, thought_tokens=TOKENS)


def test_theatre_ends_a_run_after_its_grace_or_when_a_gain_is_lost(validation: ThoughtValidation) -> None:
    for in_a_row, update, gain, best_gain, is_over in (
        (2, 50, 0.0, 0.05, False),
        (2, 50, 0.8, 0.8, False),
        (2, 50, 0.05, 0.8, True),
        (2, 100, 0.0, 0.05, True),
        (3, 100, 0.8, 0.8, True),
        (1, 100, 0.8, 0.8, False),
        (1, 50, 0.05, 0.8, False),
        (0, 200, 1.5, 1.5, False),
    ):
        last = {"update": update, "gain": gain, "words": []}
        found = {"start_loss": 2.0, "best_gain": best_gain, "last": last, "in_a_row": in_a_row}
        validation.load(NOTHING_FOUND | found)
        assert validation.is_over is is_over, found
        assert validation.state()["last"] == last


def test_a_validation_runs_before_the_first_update_and_at_intervals(
    validation: ThoughtValidation,
) -> None:
    validation.load(NOTHING_FOUND)
    assert validation.findings() == {}
    validation.begin(0)
    began = validation.findings()["theatre"]
    losses = validation.state()["start_loss"]
    assert (began["update"], len(losses)) == (0, 32)
    assert sum(losses) / 32 == pytest.approx(began["direct_loss"])
    validation.after(9)
    assert validation.findings()["theatre"]["update"] == 0
    validation.after(10)
    assert validation.findings()["theatre"]["update"] == 10
    assert validation.figures()["validation_gain"] == validation.findings()["theatre"]["gain"]


def test_nothing_is_theatre_while_thoughts_gain_more_on_any_level(
    validation: ThoughtValidation, monkeypatch: pytest.MonkeyPatch
) -> None:
    validation.load(NOTHING_FOUND)
    validation.begin(0)
    noise = np.random.default_rng(0).normal(0.0, 0.2, size=(3, 64))
    called, over = {}, {}
    for update, gain in ((10, 0.0), (20, 0.5), (30, 1.0), (40, 1.0), (110, 0.0), (120, 0.0), (130, 0.0)):
        gained = {level: noise[level - 1] + (gain if level == 2 else 0.0) for level in TASK.levels}
        monkeypatch.setattr(validation, "_gains", lambda gained=gained: gained)
        if update == 120:  # a learner that was killed goes on
            validation.load(json.loads(json.dumps(validation.state())))
        validation.after(update)
        called[update], over[update] = validation.findings()["verdict"], validation.is_over
    assert list(called.values()) == [
        "theatre", "rising", "rising", "doubtful", "theatre", "theatre", "theatre",
    ]  # fmt: skip
    assert [update for update, is_over in over.items() if is_over] == [130], "100 after the last rise"
    assert validation.findings()["theatre"]["levels"].keys() == {"1", "2", "3"}


def test_a_validation_asks_every_level_and_names_the_one_that_gains(
    validation: ThoughtValidation, monkeypatch: pytest.MonkeyPatch
) -> None:
    validation.load(NOTHING_FOUND)
    validation.begin(0)
    assert set(validation.findings()["theatre"]["levels"]) == {str(level) for level in TASK.levels}
    gained = {1: np.zeros(32), 2: np.ones(32), 3: np.zeros(32)}
    monkeypatch.setattr(validation, "_gains", lambda: gained)
    for update in (10, 20):
        validation.after(update)
    found = validation.findings()["theatre"]
    assert found["words"][0].startswith("doubtful: thoughts gain +1.00 nats on level 2, and ")


def test_theatre_counts_in_consecutive_validations(
    validation: ThoughtValidation, monkeypatch: pytest.MonkeyPatch
) -> None:
    validation.load(NOTHING_FOUND)
    validation.begin(0)
    found = validation._judged(probe(validation._model, TASK, validation._examples, TOKENS))
    dips = {10: "doubtful", 100: "theatre", 110: "honest", 120: "theatre", 130: "theatre"}
    over = {}
    for update, verdict in dips.items():
        monkeypatch.setattr(validation, "_judged", lambda _, verdict=verdict: replace(found, verdict=verdict))
        validation.after(update)
        over[update] = validation.is_over
    assert over == {10: False, 100: False, 110: False, 120: False, 130: True}
    assert validation.state()["in_a_row"] == 2
