import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.config.algorithm_sections import TokenPPOSection
from penstock.learner.algorithms.responses import (
    DEVIATION_FLOOR,
    Grid,
    Responses,
    divergence_reward,
    group_relative,
    leave_one_out,
    prepare,
    read_responses,
    returns,
    scored,
    token_gae,
    turn_discounts,
    whitened,
)
from penstock.learner.algorithms.rows import edges
from penstock.policy import weights
from penstock.policy.tokens import TokenOutputs, TokenRows
from penstock.protocol.fragment import Fragment
from tests.support.experience.experience import same
from tests.support.experience.token_experience import (
    SMOOTH,
    Response,
    SmallTokenPolicy,
    batch_of,
    flat,
    fragment,
    make,
    move,
    responses,
    stale,
)

GIVEN = (
    Response((2, 3), (4, 5, 6), (-0.1, -0.2, -0.3), 1.0, True),
    Response((2, 3, 7), (8,), (-0.4,), -1.0, False),
    Response((2, 3), (9, 9), (-0.5, -0.6), 0.0, True),
)


def responses_of(*fragments: Fragment, gap: bool = False) -> Responses:
    """Of fragments of whole rows; with a gap, the third token of the first row is not sampled."""
    batch = batch_of(*fragments)
    valid = batch.valid.clone()
    if gap:
        valid[2, 0] = False
    found = read_responses(replace(batch, valid=valid))
    assert found is not None
    return found


def read() -> Responses:
    return responses_of(fragment(GIVEN[:2]), fragment(GIVEN[2:]))


def test_sampled_tokens_lie_row_by_row() -> None:
    found = read()
    assert found.action.tolist() == [4, 5, 6, 8, 9, 9]
    assert found.behaviour.tolist() == [np.float32(x) for x in (-0.1, -0.2, -0.3, -0.4, -0.5, -0.6)]
    assert found.reward.tolist() == [0.0, 0.0, 1.0, -1.0, 0.0, 0.0]
    assert found.counts.tolist() == [3, 1, 2]
    assert found.lengths.tolist() == [4, 3, 3]
    assert found.cut_short.tolist() == [False, True, False]
    assert found.last.tolist() == [2, 3, 5]
    assert found.left_out == 0
    first, second, third = found.prompts().tolist()
    assert first == third != second, "equal prompts have one number"


def test_a_micro_batch_computes_only_the_sampled_tokens_of_its_rows() -> None:
    found = read()
    parts = list(found.micro_batches(np.array([2, 0, 1]), 6))
    assert [part.rows.tokens.shape for part in parts] == [(2, 3), (1, 4)]
    assert sorted(torch.cat([part.index for part in parts]).tolist()) == list(range(6))
    for part in parts:
        rows = part.rows
        assert rows.action.tolist() == found.action[part.index].tolist()
        following = torch.cat([rows.tokens[:, 1:], torch.full((len(rows.tokens), 1), -1)], 1).flatten()[
            rows.place
        ]
        inside = following >= 0
        known = rows.present.flatten()[rows.place.clamp(max=rows.place.max() - 1) + 1] & inside
        assert (following[known] == rows.action[known]).all()
        assert rows.present.flatten()[rows.place].all()
    assert [part.rows.present.sum().item() for part in parts] == [6, 4]
    assert [len(part.rows.tokens) for part in found.micro_batches(np.arange(3), 1)] == [1, 1, 1]
    assert (edges(5, 2), edges(2, 4)) == ([0, 2, 5], [0, 1, 2]), "whole responses to a minibatch"


def test_turns_end_where_the_next_token_was_not_sampled() -> None:
    batch = batch_of(fragment(GIVEN))
    assert read_responses(replace(batch, valid=torch.zeros_like(batch.valid))) is None
    found = responses_of(fragment(GIVEN), gap=True)
    assert found.turn_ends.tolist() == [True, False, False, False, False]
    assert not read().turn_ends.any()
    grid, numbers = Grid(found), torch.arange(1.0, 6.0)
    assert grid.spread(numbers).tolist() == [[1.0, 3.0, 4.0], [2.0, 0.0, 5.0]]
    assert grid.sampled.tolist() == [[True, True, True], [True, False, True]]
    assert torch.equal(grid.gather(grid.spread(numbers)), numbers)


def test_the_last_token_of_a_row_is_read_too() -> None:
    found = read()
    parts = list(found.behind(np.array([0, 1]), 9))
    assert [part.index.tolist() for part in parts] == [[1], [0]]
    shorter, longer = (part.rows for part in parts)
    assert longer.tokens.tolist() == [[2, 3, 4, 5, 6]]
    assert longer.present.all()
    assert longer.place.tolist() == [4]
    assert shorter.tokens.tolist() == [[2, 3, 7, 8]]
    (both,) = found.behind(np.array([0, 1]), 10)
    assert both.rows.tokens[both.index.tolist().index(1)].tolist()[:4] == [2, 3, 7, 8]
    assert both.rows.present.sum().item() == 9
    assert sorted(both.rows.place.tolist()) == [3, 9]


COUNTS = (4, 1, 3)


def tokens(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values and which tokens there are, of responses of different lengths: [S, R] each."""
    generator = torch.Generator().manual_seed(seed)
    sampled = torch.arange(max(COUNTS))[:, None] < torch.tensor(COUNTS)
    reward, value = (torch.randn(sampled.shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return reward.where(sampled, 0.0), value.where(sampled, 0.0), sampled


@pytest.mark.parametrize(
    ("discount", "turn", "gae_lambda", "value_lambda", "goes_on"),
    [
        (1.0, 1.0, 0.95, 1.0, False),
        (0.9, 1.0, 0.5, 0.5, False),
        (1.0, 1.0, 0.0, 1.0, False),
        (0.9, 0.5, 1.0, 1.0, False),
        (0.9, 1.0, 1.0, 0.7, True),
    ],
    ids=["value return", "both decay", "no trace", "turns", "rows that go on"],
)
def test_gae_and_returns_are_the_sums_that_define_them(
    discount: float, turn: float, gae_lambda: float, value_lambda: float, *, goes_on: bool
) -> None:
    reward, value, sampled = tokens()
    turn_end = torch.zeros_like(sampled)
    turn_end[1, 0] = turn_end[0, 2] = True
    decay = turn_discounts(turn_end, discount=discount, turn_discount=turn).double()
    beyond = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64) * goes_on
    lambdas = {"gae_lambda": gae_lambda, "value_lambda": value_lambda}
    estimated = token_gae(reward, value, sampled, discount=decay, **lambdas, beyond=beyond)
    returned = returns(reward, sampled, discount=discount)
    for row, count in enumerate(COUNTS):
        r, v = reward[:count, row].tolist(), [*value[:count, row].tolist(), beyond[row].item()]
        gamma = [discount * (turn if turn_end[t, row] else 1.0) for t in range(count)]
        delta = [r[t] + gamma[t] * v[t + 1] - v[t] for t in range(count)]
        for t in range(count):
            left = [math.prod(gamma[t:k]) for k in range(t, count)]
            for found, trace, first in (
                (estimated.advantage, gae_lambda, 0.0),
                (estimated.target, value_lambda, v[t]),
            ):
                wanted = first + sum(
                    w * trace**k * d for k, (w, d) in enumerate(zip(left, delta[t:], strict=True))
                )
                assert found[t, row].item() == pytest.approx(wanted, abs=1e-6)
            whole = sum(discount**k * later for k, later in enumerate(r[t:]))
            assert returned[t, row].item() == pytest.approx(whole, abs=1e-12)
        assert not estimated.advantage[count:, row].any()
        assert not estimated.target[count:, row].any()


def test_the_penalties_of_a_token() -> None:
    divergence = divergence_reward(torch.tensor([0.5, -30.0, 30.0, 0.0]), coefficient=0.1, bound=10.0)
    assert divergence.tolist() == pytest.approx([-0.05, 1.0, -1.0, 0.0])
    score = scored(torch.tensor([1.0, -1.0]), torch.tensor([0.0, 1.0]), eos_penalty=0.25)
    assert score.tolist() == [1.0, -1.25]


def test_a_response_is_compared_with_the_others_of_its_group() -> None:
    sampled = torch.ones((2, 4), dtype=torch.bool)
    reward = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 3.0, 7.0, 5.0]])
    group = torch.tensor([0, 0, 1, 1])
    free = torch.zeros_like(reward)
    plain = group_relative(reward, free, sampled, group, discount=1.0, by_deviation=False)
    assert plain.tolist() == [[-1.0, 1.0, 1.0, -1.0]] * 2
    reward[1, 1] = 5.0
    divided = group_relative(reward, free, sampled, group, discount=1.0, by_deviation=True)
    assert divided[0].tolist() == pytest.approx([-1.0, 1.0, 1.0, -1.0])


@pytest.mark.parametrize("beta", [0.05, 0.005, 0.001, 0.0])
@pytest.mark.parametrize("by_deviation", [True, False])
def test_with_equal_scores_only_the_kl_term_moves_the_policy(beta: float, by_deviation: bool) -> None:
    log_ratio = torch.tensor([[-0.02, -0.27, -0.01, 0.13], [0.4, 0.1, 0.0, -0.3]])
    sampled = torch.tensor([[True] * 4, [True, True, False, True]])
    score = torch.tensor([[0.0] * 4, [1.0] * 4]).where(sampled, 0.0)
    score[0, 2] = 1.0
    divergence = divergence_reward(log_ratio.where(sampled, 0.0), coefficient=beta, bound=10.0)
    advantage = group_relative(
        score, divergence, sampled, torch.zeros(4, dtype=torch.long), discount=1.0, by_deviation=by_deviation
    )
    expected = -beta * (log_ratio - log_ratio[sampled].mean())
    assert advantage[sampled].tolist() == pytest.approx(expected[sampled].tolist(), abs=1e-6)
    assert not advantage[~sampled].any()


@pytest.mark.parametrize("by_deviation", [True, False])
def test_a_response_without_a_group_is_compared_with_the_batch(by_deviation: bool) -> None:
    sampled = torch.ones((1, 3), dtype=torch.bool)
    reward = torch.tensor([[1.0, 0.0, 0.0]])
    group = torch.tensor([0, 1, 1])
    free = torch.zeros_like(reward)
    advantage = group_relative(reward, free, sampled, group, discount=1.0, by_deviation=by_deviation)
    assert advantage[0, 0] > 0.5
    assert advantage[0, 1:].tolist() == [0.0, 0.0]
    one = reward[:, :1], free[:, :1], sampled[:, :1], group[:1]
    assert group_relative(*one, discount=1.0, by_deviation=by_deviation).tolist() == [[1.0]]


def test_the_baseline_of_a_response_is_the_mean_of_the_others() -> None:
    sampled = torch.tensor([[True, True], [True, False]])
    reward = torch.tensor([[1.0, 4.0], [2.0, 0.0]])
    assert leave_one_out(reward, sampled, discount=1.0).tolist() == [[-1.0, 1.0], [-2.0, 0.0]]
    assert leave_one_out(reward[:, :1], sampled[:, :1], discount=1.0).tolist() == [[3.0], [2.0]]


def test_whitening_keeps_a_single_response_and_equal_advantages_finite() -> None:
    one = torch.tensor([0.3, 0.3, 0.3])
    assert torch.equal(whitened(one, 1), one)
    many = whitened(torch.tensor([1.0, 2.0, 3.0, 6.0]), 2)
    assert many.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert many.std(correction=0).item() == pytest.approx(1.0)
    alike = torch.tensor([1.0, 1.0, 1.0, 1.0 + 1e-6])
    assert whitened(alike, 4).abs().max() <= 1e-6 / DEVIATION_FLOOR


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
    section = {"kl_coefficient": 0.3, "eos_penalty": 0.5, "entropy_coefficient": 0.02, "value_clip": None}
    section |= {"log_ratio_bound": 0.2, "gae_lambda": 0.9, "discount": 0.97}
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


def test_the_engines_difference_is_reported_for_the_learners_own_weights_only() -> None:
    policy = SmallTokenPolicy()
    given = responses(policy)
    exact = make(SmallTokenPolicy()).update(batch_of(fragment(given)), progress=0.0).metrics
    assert (exact["engine_difference"], exact["max_ratio"]) == pytest.approx((0.0, 1.0), abs=1e-5)
    assert exact["clip_fraction"] == exact["kl_reference"] == 0.0
    assert (exact["kl_behaviour"], exact["effective_sample_size"]) == pytest.approx((0.0, 1.0), abs=1e-6)
    off = [replace(one, log_prob=tuple(number - 0.1 for number in one.log_prob)) for one in given]
    algorithm = make(policy)
    found = algorithm.update(batch_of(fragment(off)), progress=0.0)
    assert found.metrics["engine_difference"] == pytest.approx(0.1, abs=1e-5)
    assert "engine_difference" not in algorithm.update(batch_of(fragment(given)), progress=0.0).metrics


def test_padding_and_order_of_the_batch_do_not_matter() -> None:
    given = responses(SmallTokenPolicy(7))
    one, padded, other = (make(**SMOOTH) for _ in range(3))
    reordered = batch_of(fragment(given[5:]), fragment(given[4::-1]))
    told = [
        one.update(batch_of(fragment(given)), progress=0.0).metrics,
        padded.update(batch_of(fragment(given, pad=8, steps=17)), progress=0.0).metrics,
        other.update(reordered, progress=0.0).metrics,
    ]
    assert told[0] == told[1]
    assert same(one.state(), padded.state())
    assert told[0] == pytest.approx(told[2], abs=1e-5)
    assert torch.allclose(flat(one), flat(other), atol=1e-5)


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
    def __init__(self) -> None:
        super().__init__()
        self.asked, self.compared = 0, 0

    def outputs(self, rows: TokenRows) -> TokenOutputs:
        self.asked += 1
        return super().outputs(rows)

    def reference_log_prob(self, rows: TokenRows) -> Tensor:
        self.compared += 1
        return super().reference_log_prob(rows)


@pytest.mark.parametrize("advantage", ["gae", "group"])
def test_a_one_step_update_needs_one_forward_pass(advantage: str) -> None:
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


def test_without_a_penalty_the_reference_is_not_computed() -> None:
    free, held = Counted(), Counted()
    assert "kl_reference" not in make(free, kl_coefficient=0.0).update(stale(), progress=0.0).metrics
    assert "kl_reference" in make(held, kl_coefficient=0.01).update(stale(), progress=0.0).metrics
    assert (free.compared, held.compared) == (0, 1)


def test_tokens_between_sampled_ones_are_read_and_not_trained() -> None:
    one = Response((2, 3), (4, 5, 6, 7), (-1.0, -1.0, -1.0, -1.0), 0.5, True)
    responses = responses_of(fragment([one]), gap=True)
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


def test_columns_without_a_whole_response_are_left_out() -> None:
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


def test_a_cut_column_is_bootstrapped_with_the_value_after_it() -> None:
    policy = SmallTokenPolicy()
    cut = replace(responses(policy, count=1)[0], finished=False)
    found = responses_of(fragment([cut]))
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
def test_settings_that_need_a_critic_or_an_end_are_refused_without(
    section: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TokenPPOSection(**section)


def test_the_critic_learns_first() -> None:
    algorithm = make(critic_warmup_updates=1, kl_target=1.0, kl_horizon=20.0)
    policy, critic = weights.encode(algorithm.policy.published), weights.encode(algorithm.policy.critic)
    told = algorithm.update(stale(), progress=0.0).metrics
    assert told["learning_rate"] == told["gradient_norm"] == 0.0
    assert weights.encode(algorithm.policy.published) == policy
    assert weights.encode(algorithm.policy.critic) != critic
    assert algorithm.update(stale(), progress=0.0).metrics["kl_coefficient"] == told["kl_coefficient"]
    assert weights.encode(algorithm.policy.published) != policy


def test_the_coefficient_follows_the_divergence() -> None:
    for target, expected in ((1e-6, 1.2), (1e6, 0.8)):
        policy = SmallTokenPolicy()
        move(policy)
        algorithm = make(policy, kl_target=target, kl_horizon=12.0, kl_coefficient=0.1, learning_rate=0.0)
        told = [
            algorithm.update(batch_of(fragment(responses(policy))), progress=0.0).metrics for _ in range(2)
        ]
        assert told[0]["kl_reference"] > 0
        assert told[1]["kl_coefficient"] == pytest.approx(0.1 * expected)


def test_findings_report_the_divergence_from_the_reference() -> None:
    policy = SmallTokenPolicy()
    move(policy)
    algorithm = make(policy)
    assert algorithm.findings() == {}
    told = algorithm.update(batch_of(fragment(responses(policy))), progress=0.0).metrics["kl_reference"]
    found = algorithm.findings()
    assert found["kl_reference"] == told > 0
    assert found["remarks"] == [f"KL to the reference in the last update: {told:.3g} nats per response"]
    without = make(kl_coefficient=0.0)
    without.update(stale(), progress=0.0)
    assert without.findings() == {}


def test_epochs_end_where_the_policy_has_moved_far() -> None:
    for most, epochs in ((1e-9, 1.0), (1e9, 4.0)):
        algorithm = make(epochs=4, minibatches=4, target_kl=most)
        assert algorithm.update(stale(), progress=0.0).metrics["epochs"] == epochs


Kind = Literal["gae", "group", "reinforce"]


VOCABULARY = 11
REWARDS = np.random.default_rng(0).uniform(-1.0, 1.0, VOCABULARY)
REFERENCE = np.random.default_rng(1).dirichlet(np.ones(VOCABULARY))


def advantages(policy: np.ndarray, beta: float, value: float, advantage: Kind, *, whiten: bool) -> Tensor:
    """Of every token once, one token to a response, under π_prox = `policy`."""
    given = [
        Response((2,), (token,), (math.log(policy[token]),), float(REWARDS[token]), True)
        for token in range(VOCABULARY)
    ]
    responses = responses_of(fragment(given))
    section = TokenPPOSection(
        advantage=advantage, normalise_advantages=whiten, kl_coefficient=beta, log_ratio_bound=30.0
    )
    logs = [torch.from_numpy(np.log(one)).float() for one in (policy, REFERENCE)]
    read = torch.stack([logs[0], torch.zeros(VOCABULARY), torch.full((VOCABULARY,), value), logs[1]])
    advantages: torch.Tensor = prepare(responses, read, section, beta).weighted_advantage
    return advantages


@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize("advantage", ["gae", "group", "reinforce"])
@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0])
def test_advantages_are_zero_at_the_best_policy(beta: float, advantage: Kind, whiten: bool) -> None:
    unit = float(REWARDS.std()) if advantage == "group" and whiten else 1.0
    gain = REWARDS / unit / beta
    normaliser = float(REFERENCE @ np.exp(gain))
    best = REFERENCE * np.exp(gain) / normaliser
    value = beta * math.log(normaliser)
    assert advantages(best, beta, value, advantage, whiten=whiten).abs().max() < (0.05 if whiten else 1e-5)
    pulled = advantages(best, 2.0 * beta, value, advantage, whiten=whiten)
    assert pulled.std() > 0.3
