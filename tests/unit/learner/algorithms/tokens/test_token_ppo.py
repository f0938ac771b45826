"""PPO of tokens: against a plain implementation, and what must be nothing to it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.config.algorithm_sections import TokenPPOSection
from penstock.learner.algorithms.responses import prepare, read_responses
from penstock.policy.tokens import TokenOutputs, TokenRows
from tests.support.experience.experience import same
from tests.support.experience.token_experience import Response, SmallTokenPolicy, batch_of, fragment
from tests.support.experience.token_learner import SMOOTH, flat, make, move, responses, stale

# ---------------------------------------------------------------- the equations, one response after the other


def plain_update(policy: SmallTokenPolicy, given: Sequence[Response], section: TokenPPOSection) -> None:
    """One update of one gradient step by autograd and torch's own Adam, written from the equations."""
    read = [_read(policy, one) for one in given]
    old = [[tensor.detach() for tensor in one] for one in read]
    advantages, targets, anchors = [], [], []
    for one, (log_prob, _, value, reference) in zip(given, old, strict=True):
        reward = -section.kl_coefficient * (log_prob - reference).clamp(
            -section.log_ratio_bound, section.log_ratio_bound
        )
        reward[-1] += one.score - (0.0 if one.finished else section.eos_penalty)
        advantages.append(brute_force(reward, value, section.discount, section.gae_lambda))
        targets.append(value + brute_force(reward, value, section.discount, section.value_lambda))
        anchors.append(log_prob)
    joined = torch.cat(advantages)
    mean, deviation = joined.mean(), joined.std(correction=0)
    loss = torch.zeros(())
    for index, (log_prob, entropy, value, _) in enumerate(read):
        advantage = (advantages[index] - mean) / deviation
        weight = (
            (anchors[index] - torch.tensor(given[index].log_prob))
            .exp()
            .clamp(max=section.behaviour_weight_cap)
        )
        ratio = (log_prob - anchors[index]).exp()
        clipped = ratio.clamp(1 - section.clip_range, 1 + section.clip_range)
        surrogate = weight * torch.minimum(ratio * advantage, clipped * advantage)
        error = 0.5 * (value - targets[index]).square()
        loss = (
            loss
            + (-surrogate + section.value_coefficient * error - section.entropy_coefficient * entropy).sum()
        )
    loss = loss / len(joined)
    groups: list[dict[str, Any]] = [
        {"params": list(policy.trained().values()), "lr": section.learning_rate},
        {"params": list(policy.critic.parameters()), "lr": section.critic_learning_rate},
    ]
    optimiser = torch.optim.Adam(groups, eps=section.adam_epsilon)
    loss.backward()
    for group in groups:
        nn.utils.clip_grad_norm_(group["params"], section.max_gradient_norm)
    optimiser.step()


def brute_force(reward: Tensor, value: Tensor, discount: float, trace: float) -> Tensor:
    """Σ_k (γλ)^k δ_{t+k} by its definition."""
    following = torch.cat([value[1:], torch.zeros(1)])
    delta = reward + discount * following - value
    length = len(reward)
    return torch.stack(
        [
            sum(((discount * trace) ** (k - t) * delta[k] for k in range(t, length)), torch.zeros(()))
            for t in range(length)
        ]
    )


def _read(policy: SmallTokenPolicy, one: Response) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log π, entropy, V, log π_ref of one response alone."""
    tokens = torch.tensor([[*one.prompt, *one.tokens[:-1]]])
    place = torch.arange(len(one.prompt) - 1, tokens.shape[1])
    rows = TokenRows(tokens, torch.ones_like(tokens, dtype=torch.bool), place, torch.tensor(one.tokens))
    outputs = policy.outputs(rows)
    return outputs.log_prob, outputs.entropy, outputs.value, policy.reference_log_prob(rows)


@pytest.mark.parametrize("behaviour", [0, 7])
def test_an_update_is_that_of_a_plain_implementation(behaviour: int) -> None:
    section = {
        "kl_coefficient": 0.3,
        "eos_penalty": 0.5,
        "entropy_coefficient": 0.02,
        "value_clip": None,
        "log_ratio_bound": 0.2,
        "gae_lambda": 0.9,
        "discount": 0.97,
    }
    given = responses(SmallTokenPolicy(behaviour))
    assert {one.finished for one in given} == {True, False}
    policy, oracle = SmallTokenPolicy(), SmallTokenPolicy()
    for moved in (policy, oracle):
        move(moved)
    algorithm = make(policy, **section)
    assert algorithm.update(batch_of(fragment(given)), progress=0.0).applied
    plain_update(oracle, given, algorithm.section)
    expected = torch.cat(
        [one.detach().flatten() for one in (*oracle.trained().values(), *oracle.critic.parameters())]
    )
    assert torch.allclose(flat(algorithm), expected, atol=2e-5)


# ---------------------------------------------------------------- what is nothing to an update


def test_fresh_experience_has_ratio_one() -> None:
    policy = SmallTokenPolicy()
    update = make(policy).update(batch_of(fragment(responses(policy))), progress=0.0)
    assert update.metrics["max_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert update.metrics["clip_fraction"] == 0.0
    assert update.metrics["kl_behaviour"] == pytest.approx(0.0, abs=1e-9)
    assert update.metrics["kl_reference"] == 0.0
    assert update.metrics["effective_sample_size"] == pytest.approx(1.0, abs=1e-6)


def test_the_difference_of_what_generates_is_told_of_the_learners_own_weights_alone() -> None:
    policy = SmallTokenPolicy()
    given = responses(policy)
    exact = make(SmallTokenPolicy()).update(batch_of(fragment(given)), progress=0.0)
    assert exact.metrics["engine_difference"] == pytest.approx(0.0, abs=1e-5)
    off = [replace(one, log_prob=tuple(number - 0.1 for number in one.log_prob)) for one in given]
    algorithm = make(policy)
    found = algorithm.update(batch_of(fragment(off)), progress=0.0)
    assert found.metrics["engine_difference"] == pytest.approx(0.1, abs=1e-5)
    assert "engine_difference" not in algorithm.update(batch_of(fragment(given)), progress=0.0).metrics


@pytest.mark.parametrize("micro_batch_tokens", [1, 20, 10_000])
@pytest.mark.parametrize("advantage", ["gae", "group", "reinforce"])
def test_micro_batches_change_nothing(advantage: str, micro_batch_tokens: int) -> None:
    # Where all scores of a group are alike, rounding of the penalties is divided by DEVIATION_FLOOR; here
    # they are not.
    given = [replace(one, score=index % 3) for index, one in enumerate(responses(SmallTokenPolicy(7)))]
    settings = {"advantage": advantage, "minibatches": 2, "epochs": 2, **SMOOTH}
    whole, cut = make(**settings), make(**settings, micro_batch_tokens=micro_batch_tokens)
    told = [one.update(batch_of(fragment(given)), progress=0.0).metrics for one in (whole, cut)]
    assert told[0] == pytest.approx(told[1], abs=1e-5)
    assert torch.allclose(flat(whole), flat(cut), atol=1e-5)


class Counted(SmallTokenPolicy):
    """Counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.compared = 0, 0

    def outputs(self, rows: TokenRows) -> TokenOutputs:
        """Of the policy."""
        self.asked += 1
        return super().outputs(rows)

    def reference_log_prob(self, rows: TokenRows) -> Tensor:
        """Of the policy that it was."""
        self.compared += 1
        return super().reference_log_prob(rows)


@pytest.mark.parametrize("advantage", ["gae", "group"])
def test_one_pass_serves_an_update_of_one_step(advantage: str) -> None:
    given = [replace(one, score=index % 3) for index, one in enumerate(responses(SmallTokenPolicy(7)))]
    batch, places = batch_of(fragment(given)), 9 * len(given) // 2 + 9
    once, twice, cut = (Counted() for _ in range(3))
    whole = make(once, advantage=advantage, **SMOOTH)
    parts = make(cut, advantage=advantage, micro_batch_tokens=places, **SMOOTH)
    told = [one.update(batch, progress=0.0).metrics for one in (whole, parts)]
    assert (once.asked, cut.asked) == (1, 4)
    assert told[0] == pytest.approx(told[1], abs=1e-5)
    assert torch.allclose(flat(whole), flat(parts), atol=1e-5)
    make(twice, epochs=2).update(batch, progress=0.0)
    assert twice.asked == 3


def test_without_a_penalty_nothing_asks_the_reference() -> None:
    free, held = Counted(), Counted()
    assert "kl_reference" not in make(free, kl_coefficient=0.0).update(stale(), progress=0.0).metrics
    assert "kl_reference" in make(held, kl_coefficient=0.01).update(stale(), progress=0.0).metrics
    assert (free.compared, held.compared) == (0, 1)


def test_padding_is_nothing() -> None:
    given = responses(SmallTokenPolicy(7))
    algorithms = [make(), make()]
    told = [
        algorithm.update(batch_of(made), progress=0.0).metrics
        for algorithm, made in zip(
            algorithms, (fragment(given), fragment(given, pad=8, steps=17)), strict=True
        )
    ]
    assert told[0] == told[1]
    assert same(algorithms[0].state(), algorithms[1].state())


def test_the_order_of_the_batch_is_nothing() -> None:
    given = responses(SmallTokenPolicy(7))
    one, other = make(**SMOOTH), make(**SMOOTH)
    told = [
        one.update(batch_of(fragment(given)), progress=0.0).metrics,
        other.update(batch_of(fragment(given[5:]), fragment(given[4::-1])), progress=0.0).metrics,
    ]
    assert told[0] == pytest.approx(told[1], abs=1e-5)
    assert torch.allclose(flat(one), flat(other), atol=1e-5)


def test_rewards_of_minus_one_and_zero_are_rewards() -> None:
    given = [replace(one, score=score) for one, score in zip(responses(), [-1.0, 0.0] * 6, strict=True)]
    update = make().update(batch_of(fragment(given)), progress=0.0)
    assert update.steps == sum(len(one.tokens) for one in given)
    assert update.metrics["score"] == -0.5
    assert update.metrics["left_out"] == 0.0


def test_what_is_between_sampled_tokens_is_read_and_not_trained() -> None:
    one = Response((2, 3), (4, 5, 6, 7), (-1.0, -1.0, -1.0, -1.0), 0.5, True)
    batch = batch_of(fragment([one]))
    valid = batch.valid.clone()
    valid[2, 0] = False
    responses = read_responses(replace(batch, valid=valid))
    assert responses is not None
    section = TokenPPOSection(
        kl_coefficient=0.0, normalise_advantages=False, value_lambda=0.9, gae_lambda=0.9
    )
    read = torch.tensor([[-1.0] * 3, [0.0] * 3, [0.3, -0.2, 0.7], [-1.0] * 3])
    prepared = prepare(responses, read, section, section.kl_coefficient)
    value = prepared.old_value
    expected = brute_force(torch.tensor([0.0, 0.0, 0.5]), value, 1.0, 0.9)
    assert torch.allclose(prepared.target - value, expected, atol=1e-6)
    assert responses.tokens.tolist() == [[2, 3, 4, 5, 6]]
    assert responses.action.tolist() == [4, 6, 7]


def test_columns_that_are_no_whole_response_are_left_out() -> None:
    batch = batch_of(fragment(responses()))
    truncated, terminated = batch.truncated.clone(), batch.terminated.clone()
    truncated[:, 0] = terminated[:, 0] = False
    terminated[:, 1] |= batch.valid[:, 1]
    broken = replace(batch, truncated=truncated, terminated=terminated)
    update = make().update(broken, progress=0.0)
    assert update.metrics["left_out"] == 2.0
    assert update.steps == int(batch.valid[:, 2:].sum())
    nothing = torch.zeros_like(batch.valid)
    update = make().update(replace(batch, truncated=nothing, terminated=nothing), progress=0.0)
    assert (update.applied, update.reason) == (False, "empty")


# ---------------------------------------------------------------- conversations


def test_a_column_that_was_cut_is_worth_what_its_critic_sees_behind_it() -> None:
    policy = SmallTokenPolicy()
    cut = replace(responses(policy, count=1)[0], finished=False)
    found = read_responses(batch_of(fragment([cut])))
    assert found is not None
    whole = torch.tensor([[*cut.prompt, *cut.tokens]])
    place = torch.tensor([whole.shape[1] - 1])
    rows = TokenRows(whole, torch.ones_like(whole, dtype=torch.bool), place, torch.tensor([0]))
    behind = policy.outputs(rows).value.item()
    targets = {}
    for goes_on in (False, True):
        algorithm = make(policy, bootstrap_truncated=goes_on, kl_coefficient=0.0)
        beyond = algorithm._beyond(found)
        read = torch.stack(_read(policy, cut)[:3]).detach()
        targets[goes_on] = prepare(found, read, algorithm.section, 0.0, beyond).target[-1].item()
    assert targets[False] == pytest.approx(cut.score, abs=1e-6)
    assert targets[True] == pytest.approx(cut.score + behind, abs=1e-5)
    assert abs(behind) > 1e-3


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"advantage": "group", "turn_discount": 0.9}, "turn_discount values turns; use gae"),
        (
            {"advantage": "reinforce", "bootstrap_truncated": True},
            "bootstrap_truncated values turns; use gae",
        ),
        ({"eos_penalty": 0.1, "bootstrap_truncated": True}, "with bootstrap_truncated it goes on"),
    ],
)
def test_what_needs_a_critic_or_an_end_is_refused_without(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenPPOSection(**section)
