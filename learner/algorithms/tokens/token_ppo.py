"""Proximal policy optimisation of a language model, token by token.

Three policies of the same model: μ that sampled, π_prox at the start of this batch, π_θ being trained; and
the reference that training began with. Of n sampled tokens, with s the score at the end of a response:

    r_t = 1[last] s − penalty 1[cut short] − β clip(log π_prox − log π_ref, ±bound)
    A   = GAE(γ, λ), with γ γ_turn between the turns of a conversation,
          or returns less those of other responses (`token_advantage`), whitened
    L   = −1/n Σ min(π_prox/μ, C) · min(ρ A, clip(ρ, 1−ε, 1+ε) A),   ρ = π_θ/π_prox   (Hilton et al. 2021)
        + c_v ½ 1/n Σ max((V − R)², (clip(V, V_old ± δ) − R)²) − c_e 1/n Σ H

Means are over the tokens of a minibatch, whose responses are gone through in micro-batches that add up to it.
An update reads the device at its beginning (where the tokens lie) and at its end, and per epoch with a target
KL.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from penstock.config.algorithm_sections import TokenPPOSection
from penstock.learner.algorithms.algorithm import AlgorithmState, Update
from penstock.learner.algorithms.shared.advantage import Advantages, carries, gae
from penstock.learner.algorithms.shared.containment import contained, verdict
from penstock.learner.algorithms.shared.learn_once import LearnsOnce
from penstock.learner.algorithms.shared.loss import (
    clip_fraction,
    decoupled,
    divergence,
    effective_sample_size,
    explained_variance,
    largest_ratio,
    policy_loss,
    value_loss,
)
from penstock.learner.algorithms.shared.rank_group import edges
from penstock.learner.algorithms.shared.rows import AllRankSteps, Steps
from penstock.learner.algorithms.shared.schedule import (
    Hardware,
    ScheduleValues,
    adapted,
    decayed,
    factor,
    warmup,
)
from penstock.learner.algorithms.shared.stored import copies, load_copies, taken_over, under
from penstock.learner.algorithms.tokens.responses import Grid, Index, Responses, read_responses
from penstock.learner.algorithms.tokens.token_network import CRITIC, POLICY, Pass, TokenNetwork
from penstock.learner.batch import Batch
from penstock.policy.tokens import TokenOutputs, TokenPolicy

# ---- Rewards and advantages of sampled tokens; pure functions.

DEVIATION_FLOOR = 1e-4
"""Differences below it are noise that division by a deviation must not blow up, in the unit of the score."""


def scored(reward: Tensor, cut: Tensor, *, eos_penalty: float) -> Tensor:
    """r_t − penalty · 1[t is where the length ended a response]; all [n]."""
    return reward - eos_penalty * cut.to(reward.dtype)


def divergence_reward(log_ratio: Tensor, *, coefficient: float, bound: float) -> Tensor:
    """−β clip(log π/π_ref, ±bound), [n].

    The estimator of KL(π‖π_ref) is a reward, without gradient (Ziegler et al. 2019, eq. 2): its policy
    gradient is that of the divergence itself.
    """
    return -coefficient * log_ratio.clamp(-bound, bound)


def turn_discounts(turn_end: Tensor, *, discount: float, turn_discount: float) -> Tensor:
    """γ of each token, and γ γ_turn of the last one of a turn that another follows; bool → float [S, R]."""
    within = torch.full(turn_end.shape, discount, device=turn_end.device)
    return within.masked_fill(turn_end, discount * turn_discount)


def token_gae(
    reward: Tensor,
    value: Tensor,
    sampled: Tensor,
    *,
    discount: float | Tensor,
    gae_lambda: float,
    value_lambda: float,
    beyond: Tensor | None = None,
) -> Advantages:
    """GAE(λ) for the policy and GAE(λ_V) for the critic (Yuan et al. 2025); [S, R] each.

    δ_t = r_t + γ V_{t+1} − V_t, V = `beyond` behind the last token;
    A_t = Σ (γλ)^k δ_{t+k};  target = V_t + Σ (γλ_V)^k δ_{t+k}.

    discount: γ, of all tokens or of each, [S, R], as `turn_discounts` says.
    beyond: [R], 0 where a row ended; None: all of them did.
    """
    following = torch.zeros_like(value)
    following[:-1] = value[1:]
    carried = _carried(sampled)
    following = following.masked_fill(~carried, 0.0)
    if beyond is not None:
        following = torch.where(sampled & ~carried, beyond, following)
    unroll = (reward, value, following, carried, sampled)
    for_policy = gae(*unroll, discount=discount, gae_lambda=gae_lambda)
    if value_lambda == gae_lambda:
        return for_policy
    return Advantages(for_policy.advantage, gae(*unroll, discount=discount, gae_lambda=value_lambda).target)


def returns(reward: Tensor, sampled: Tensor, *, discount: float) -> Tensor:
    """Σ γ^k r_{t+k} to the end of the response, [S, R]."""
    nothing = torch.zeros_like(reward)
    return gae(
        reward, nothing, nothing, _carried(sampled), sampled, discount=discount, gae_lambda=1.0
    ).advantage


def leave_one_out(reward: Tensor, sampled: Tensor, *, discount: float) -> Tensor:
    """Return the advantages of REINFORCE with a leave-one-out baseline (Kool et al. 2019), [S, R].

    The baseline is the mean return of the other responses of the batch.
    Nothing is subtracted from a response that is alone.
    """
    ahead = returns(reward, sampled, discount=discount)
    return (ahead - _of_others(ahead[0])).masked_fill(~sampled, 0.0)


def group_relative(
    score: Tensor,
    divergence: Tensor,
    sampled: Tensor,
    group: Tensor,
    *,
    discount: float,
    by_deviation: bool,
) -> Tensor:
    """Return (G − mean)/deviation of the scores G of a group, and each token's divergence beside it, [S, R].

    Shao et al. 2024: the score alone is normalised (section 4.1.2), and all tokens of a response share it.
    The divergence is a term of each token (eq. 4): nothing divides it, so that a group of equal scores moves
    the policy by β alone. Its mean over the batch is taken away, which changes no expected gradient.

    score, divergence: [S, R], of `scored` and of `divergence_reward`.
    group: int64 [R], numbers of the prompts.   by_deviation: False: G − mean (Liu et al. 2025).
    A response without another to its prompt is held against the rest of the batch instead: its own mean would
    leave nothing of it.
    """
    total = returns(score, sampled, discount=discount)[0]
    sums = total.new_zeros(len(group)).index_add(0, group, total)
    sizes = total.new_zeros(len(group)).index_add(0, group, torch.ones_like(total))
    alone = (sizes == 1)[group]
    difference = total - torch.where(alone, _of_others(total), (sums / sizes)[group])
    if by_deviation:
        squares = total.new_zeros(len(group)).index_add(0, group, difference.square())
        of_group = (squares / sizes).sqrt()[group]
        # A batch of one has no deviation to divide by.
        of_batch = total.std(correction=0) if len(total) > 1 else torch.ones_like(total)
        difference = difference / torch.where(alone, of_batch, of_group).clamp(min=DEVIATION_FLOOR)
    charged = divergence - divergence[sampled].mean()
    return (difference + charged).masked_fill(~sampled, 0.0)


def whitened(advantage: Tensor, responses: int) -> Tensor:
    """Mean 0 and deviation 1 over the tokens [n] of two responses or more; one alone keeps what it has."""
    if responses < 2:
        return advantage
    centred = advantage - advantage.mean()
    return centred / centred.std(correction=0).clamp(min=DEVIATION_FLOOR)


def _carried(sampled: Tensor) -> Tensor:
    nowhere = torch.zeros_like(sampled)
    return carries(nowhere, nowhere, sampled)


def _of_others(total: Tensor) -> Tensor:
    """Mean of all the others, [R]; 0 where there are none."""
    if len(total) == 1:
        return torch.zeros_like(total)
    return (total.sum() - total) / (len(total) - 1)


# ---- What is computed once per batch of responses, before its epochs.


@dataclass(frozen=True, slots=True)
class Prepared(Steps):
    """What is prepared of the n sampled tokens.

    columns: [6, n], see `Steps`. entropy: scalar. kl_reference: scalar, nats per response; None: nothing
    holds the policy to a reference.
    """

    columns: Tensor
    entropy: Tensor
    kl_reference: Tensor | None


class Rewards(NamedTuple):
    """Of each token, [S, R]: what it was given, and what its divergence from the reference costs."""

    score: Tensor
    divergence: Tensor


def prepare(
    responses: Responses,
    read: Tensor,
    section: TokenPPOSection,
    kl_coefficient: float,
    beyond: Tensor | None = None,
) -> Prepared:
    """Return what the epochs of an update take.

    read: log π_prox, entropy, V, [3, n], and log π_ref, [4, n], where a coefficient multiplies it.
    beyond: [R], the value of what follows each row; None: nothing follows any.
    """
    (proximal, entropy, value), reference = read[:3], read[3:]
    log_ratio = proximal - (reference[0] if len(reference) else proximal)
    grid = Grid(responses)
    ends = responses.cut_short.to(read.dtype)
    cut = torch.zeros_like(proximal).index_copy(0, responses.last, ends)
    rewards = Rewards(
        grid.spread(scored(responses.reward, cut, eos_penalty=section.eos_penalty)),
        grid.spread(divergence_reward(log_ratio, coefficient=kl_coefficient, bound=section.log_ratio_bound)),
    )
    estimated = _advantages(responses, grid, section, rewards, grid.spread(value), beyond)
    advantage, target = grid.gather(estimated.advantage), grid.gather(estimated.target)
    if section.normalise_advantages and section.advantage != "group":
        advantage = whitened(advantage, len(responses))
    surrogate = decoupled(responses.behaviour, proximal, advantage, section.behaviour_weight_cap)
    fixed = (surrogate.anchor, surrogate.weighted_advantage, target, value, responses.behaviour, proximal)
    kl_reference = log_ratio.sum() / len(responses) if len(reference) else None
    return Prepared(torch.stack(fixed), entropy.mean(), kl_reference)


def _advantages(
    responses: Responses,
    grid: Grid,
    section: TokenPPOSection,
    rewards: Rewards,
    value: Tensor,
    beyond: Tensor | None,
) -> Advantages:
    """[S, R] each; without a critic the targets are its values."""
    discount, reward = section.discount, rewards.score + rewards.divergence
    match section.advantage:
        case "gae":
            return token_gae(
                reward,
                value,
                grid.sampled,
                discount=_discounts(responses, grid, section),
                gae_lambda=section.gae_lambda,
                value_lambda=section.value_lambda,
                beyond=beyond,
            )
        case "group":
            prompts, by_deviation = responses.prompts(), section.normalise_advantages
            advantage = group_relative(
                *rewards, grid.sampled, prompts, discount=discount, by_deviation=by_deviation
            )
        case "reinforce":
            advantage = leave_one_out(reward, grid.sampled, discount=discount)
    return Advantages(advantage, value)


def _discounts(responses: Responses, grid: Grid, section: TokenPPOSection) -> float | Tensor:
    if section.turn_discount == 1.0:
        return section.discount
    return turn_discounts(
        grid.spread(responses.turn_ends), discount=section.discount, turn_discount=section.turn_discount
    )


# ---- What an update of a token policy tells: metrics of sampled tokens, of whole responses, of the critic.

METRICS: Final = (
    "policy_loss",
    "entropy",
    "gradient_norm",
    "kl_behaviour",
    "kl_proximal",
    "effective_sample_size",
    "max_ratio",
    "clip_fraction",
    "engine_difference",
    "kl_reference",
    "kl_coefficient",
    "score",
    "response_length",
    "finished_fraction",
    "left_out",
    "learning_rate",
    "entropy_coefficient",
    "epochs",
)
"""The metrics of PPO, over sampled tokens.

`kl_reference`: KL(π_prox‖π_ref) in nats per response; it is what β (`kl_coefficient`) is adapted to; absent
where that is 0, when nothing reads the reference. `engine_difference`: mean |log π − log μ| of tokens that
the learner's own weights sampled, in nats: how far what generates computes otherwise than what learns;
absent where no token is of these weights. `score`: mean reward of a response before penalties.
`finished_fraction`: share of the responses that ended by themselves. `left_out`: columns that are no whole
response.
"""
CRITIC_METRICS: Final = (
    "value_loss",
    "explained_variance",
    "mean_value",
    "critic_gradient_norm",
    "critic_learning_rate",
)
"""Beside these where there is a critic."""


@dataclass(slots=True)
class TokenGradientRecord:
    """What the gradient steps leave behind, on the device.

    log_prob: [n], of π_θ before each step of the last epoch.
    """

    log_prob: Tensor
    losses: list[Tensor] = field(default_factory=list)
    norms: dict[str, list[Tensor]] = field(default_factory=lambda: {POLICY: [], CRITIC: []})
    epochs: int = 0


def watched(prepared: Prepared, record: TokenGradientRecord, clip_range: float) -> dict[str, Tensor]:
    """Of tokens: how far the policy has moved, from what, and by which loss."""
    log_prob, behaviour, norms = record.log_prob, prepared.behaviour, record.norms[POLICY]
    still = torch.zeros_like(prepared.entropy)
    found = {
        "policy_loss": torch.stack(record.losses).mean(0)[0],
        "entropy": prepared.entropy,
        "gradient_norm": torch.stack(norms).mean() if norms else still,
        "kl_behaviour": divergence(behaviour, log_prob),
        "kl_proximal": divergence(prepared.proximal, log_prob),
        "effective_sample_size": effective_sample_size(behaviour, log_prob),
        "max_ratio": largest_ratio(behaviour, log_prob),
        "clip_fraction": clip_fraction(log_prob, prepared.anchor, clip_range),
    }
    return found if prepared.kl_reference is None else found | {"kl_reference": prepared.kl_reference}


def engine_difference(prepared: Prepared, is_own: Tensor) -> Tensor:
    """Return how far the generator's log-probabilities are from the learner's; is_own: bool [n], else nan."""
    difference: Tensor = (prepared.proximal - prepared.behaviour).abs()
    return difference.mul(is_own).sum() / is_own.sum()


def of_responses(responses: Responses) -> dict[str, Tensor]:
    """Return what was said of them."""
    return {
        "score": responses.reward.sum() / len(responses),
        "finished_fraction": 1.0 - responses.cut_short.float().mean(),
    }


def of_critic(prepared: Prepared, record: TokenGradientRecord) -> dict[str, Tensor]:
    """Return how well it foretells the returns."""
    return {
        "value_loss": torch.stack(record.losses).mean(0)[1],
        "explained_variance": explained_variance(prepared.old_value, prepared.target),
        "mean_value": prepared.old_value.mean(),
        "critic_gradient_norm": torch.stack(record.norms[CRITIC]).mean(),
    }


_KL_TOLERANCE: Final = 1.5
_JUDGED: Final = ("policy_loss", "entropy", "gradient_norm", "value_loss", "critic_gradient_norm")
"""Metrics that must be finite for an update to be kept, beside parameters and moments."""
_PERMUTATIONS: Final = "generator/permutations"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScheduleValues(ScheduleValues):
    """The scheduled numbers of one update.

    kl_coefficient: β of the penalty on leaving the reference.
    critic_learning_rate: None without a critic.
    """

    kl_coefficient: float
    critic_learning_rate: float | None

    def learning_rate_of(self, name: str) -> float:
        """Step size of the policy or of the critic."""
        rate = self.learning_rate if name == POLICY else self.critic_learning_rate
        assert rate is not None
        return rate


class TokenPPO(LearnsOnce[TokenPPOSection]):
    """An `Algorithm`. Owns the policy's weights from now on: do not convert or move the policy."""

    def __init__(
        self, policy: TokenPolicy, section: TokenPPOSection, *, seed: int, hardware: Hardware | None = None
    ) -> None:
        super().__init__(section)
        self.policy = policy
        self._network = TokenNetwork(policy, section.adam_epsilon, hardware or Hardware())
        self._has_critic = section.advantage == "gae"
        self._permutations = torch.Generator().manual_seed(seed)
        self._kl_coefficient = section.kl_coefficient
        self._kl_reference: float | None = None

    def published_modules(self) -> dict[str, nn.Module]:
        """Return the policy without its critic, as `default`."""
        return {"default": self.policy.published}

    # ---- an update

    def update(self, batch: Batch, *, progress: float) -> Update:
        """Consume one batch with all its gradient steps, without the fragments that make it fail."""
        return contained(partial(self._attempt, progress=progress), batch)

    def _attempt(self, batch: Batch, *, is_rehearsal: bool, progress: float) -> Update:
        """See `Attempt`."""
        responses = read_responses(batch)
        if responses is None:
            return Update(applied=False, reason="empty", steps=0, gradient_steps=0, metrics={})
        scheduled, network = self._schedule(progress), self._network
        with torch.no_grad():
            kept = self._only_pass(responses)
            passes = (kept,) if kept else self._passes(responses, np.arange(len(responses)))
            read = network.read(passes, responses.sampled, has_reference=self._kl_coefficient > 0.0)
            prepared = prepare(responses, read, self.section, self._kl_coefficient, self._beyond(responses))
        backup, drawn = network.backup(), self._permutations.get_state()
        is_kept = False
        try:
            charge = sum(source.steps * source.columns for source in batch.sources)
            count = self.minibatches(batch, charge)
            record = self._train(responses, prepared, scheduled, kept, count)
            with torch.no_grad():
                reason, metrics = self._measure(responses, prepared, record)
            is_kept = not reason and not is_rehearsal
            if is_kept:
                self._commit(len(responses), metrics)
        finally:
            if not is_kept:
                network.restore(backup)
                self._permutations.set_state(drawn)
        return Update(
            applied=not reason,
            reason=reason,
            steps=responses.sampled,
            gradient_steps=len(record.losses),
            metrics={} if reason else metrics | scheduled.metrics(),
        )

    def _only_pass(self, responses: Responses) -> Pass | None:
        """Return the one forward pass of an update of one gradient step and one micro-batch.

        It serves for preparation and for the step. None for any other update.
        """
        section, most = self.section, self.section.micro_batch_tokens
        if section.epochs * section.minibatches > 1 or not responses.fit_at_once(most):
            return None
        with torch.enable_grad():
            return next(self._passes(responses, np.arange(len(responses))))

    def _beyond(self, responses: Responses) -> Tensor | None:
        if not self.section.bootstrap_truncated:
            return None
        return self._network.values_beyond(responses, self.section.micro_batch_tokens)

    def _passes(self, responses: Responses, rows: Index) -> Iterator[Pass]:
        return self._network.passes(responses, rows, self.section.micro_batch_tokens)

    def _schedule(self, progress: float) -> TokenScheduleValues:
        section, updates = self.section, self._updates
        share = factor(section.learning_rate_schedule, progress) * warmup(updates, section.warmup_updates)
        entropy = decayed(section.entropy_coefficient, section.entropy_decay, section.entropy_floor, updates)
        return TokenScheduleValues(
            learning_rate=section.learning_rate * share if POLICY in self._learning else 0.0,
            entropy_coefficient=entropy,
            kl_coefficient=self._kl_coefficient,
            critic_learning_rate=section.critic_learning_rate * share if self._has_critic else None,
        )

    @property
    def _learning(self) -> Sequence[str]:
        """What learns in this update."""
        if not self._has_critic:
            return (POLICY,)
        return (CRITIC,) if self._updates < self.section.critic_warmup_updates else (POLICY, CRITIC)

    # ---- the epochs

    def _train(
        self,
        responses: Responses,
        prepared: Prepared,
        scheduled: TokenScheduleValues,
        kept: Pass | None,
        count: int,
    ) -> TokenGradientRecord:
        """Make the epochs, each of `count` minibatches. kept: the only pass, where there is one."""
        record = TokenGradientRecord(torch.empty_like(prepared.proximal))
        for _ in range(self.section.epochs):
            order = torch.randperm(len(responses), generator=self._permutations).numpy()
            for rows in minibatches(order, count):
                total = int(responses.counts[rows].sum())
                passes = (kept,) if kept else self._passes(responses, rows)
                self._gradient_step(passes, total, prepared, scheduled, record)
            record.epochs += 1
            if self._moved_far(prepared, record):
                break
        return record

    def _gradient_step(
        self,
        passes: Iterable[Pass],
        total: int,
        prepared: Prepared,
        scheduled: TokenScheduleValues,
        record: TokenGradientRecord,
    ) -> None:
        """Make the gradient of one minibatch.

        The gradients of its micro-batches add up to that of the mean over its `total` tokens.
        """
        network, learning = self._network, self._learning
        network.clear(learning)
        losses = torch.zeros(2, device=network.device)
        for one in passes:
            record.log_prob[one.part.index] = one.outputs.log_prob.detach()
            columns = AllRankSteps(prepared.columns[:, one.part.index])
            losses += self._accumulate(one.outputs, columns, total, scheduled.entropy_coefficient)
        record.losses.append(losses)
        for name in learning:
            norm = network.step(name, scheduled.learning_rate_of(name), self.section.max_gradient_norm)
            record.norms[name].append(norm)

    def _accumulate(
        self, outputs: TokenOutputs, columns: Steps, total: int, entropy_coefficient: float
    ) -> Tensor:
        """Add a micro-batch's share of the gradient; its shares of policy and value loss, [2]."""
        section, learning = self.section, self._learning
        value, log_prob = outputs.value.detach(), outputs.log_prob.detach()
        surrogate = policy_loss(
            log_prob,
            columns.anchor,
            columns.weighted_advantage,
            section.clip_range,
            section.dual_clip,
            total,
        )
        error = value_loss(value, columns.target, columns.old_value, section.value_clip, total)
        built: list[Tensor] = []
        slopes: list[Tensor] = []
        if POLICY in learning:
            built.append(outputs.log_prob)
            slopes.append(surrogate.slope)
        if POLICY in learning and entropy_coefficient:
            built.append(outputs.entropy)
            slopes.append(torch.full_like(value, -entropy_coefficient / total))
        if CRITIC in learning:
            built.append(outputs.value)
            slopes.append(error.slope.mul_(section.value_coefficient))
        self._network.accumulate(learning, built, slopes)
        return torch.stack([surrogate.loss, error.loss])

    def _moved_far(self, prepared: Prepared, record: TokenGradientRecord) -> bool:
        """KL(π_prox‖π_θ) over the epoch just made exceeds its target; reads the device."""
        target = self.section.target_kl
        if target is None:
            return False
        return bool(divergence(prepared.proximal, record.log_prob) > _KL_TOLERANCE * target)

    # ---- after it

    def _measure(
        self, responses: Responses, prepared: Prepared, record: TokenGradientRecord
    ) -> tuple[str, dict[str, float]]:
        """The one read of the device: why the update is not kept, or "", and the metrics."""
        tensors = watched(prepared, record, self.section.clip_range) | of_responses(responses)
        if self._has_critic:
            tensors |= of_critic(prepared, record)
        tensors["engine_difference"] = engine_difference(prepared, responses.sampled_by(self._updates))
        farthest = (prepared.proximal - prepared.behaviour).abs().max()
        numbers = torch.stack([*tensors.values(), self._network.checksum(), farthest]).tolist()
        found = dict(zip(tensors, numbers, strict=False))
        judged = [number for name, number in found.items() if name in _JUDGED] + numbers[len(tensors) :]
        metrics = {name: number for name, number in found.items() if math.isfinite(number)} | {
            "response_length": responses.sampled / len(responses),
            "left_out": float(responses.left_out),
            "epochs": float(record.epochs),
        }
        return verdict(judged, self.section.max_log_ratio), metrics

    def _commit(self, count: int, metrics: dict[str, float]) -> None:
        section = self.section
        if section.kl_target is not None and POLICY in self._learning:
            self._kl_coefficient = adapted(
                self._kl_coefficient, metrics["kl_reference"], section.kl_target, count, section.kl_horizon
            )
        self._kl_reference = metrics.get("kl_reference")
        self._updates += 1

    def findings(self) -> dict[str, Any]:
        """Return how far the policy is from the reference, where this process has measured it."""
        if self._kl_reference is None:
            return {}
        remark = f"KL to the reference in the last update: {self._kl_reference:.3g} nats per response"
        return {"kl_reference": self._kl_reference, "remarks": [remark]}

    # ---- a checkpoint

    def state(self) -> AlgorithmState:
        """Return copies of the trained weights, the moments, the generator and β.

        Frozen weights are read from their folder again.
        """
        tensors = copies("policy", self.policy.published) | copies("critic", self.policy.critic)
        optimisers = self._network.optimisers
        for name, optimiser in optimisers.items():
            tensors |= {f"optimiser/{name}/{key}": moment for key, moment in optimiser.moments().items()}
        tensors[_PERMUTATIONS] = self._permutations.get_state()
        numbers = {
            "updates": self._updates,
            "gradient_steps": {name: optimiser.steps for name, optimiser in optimisers.items()},
            "kl_coefficient": self._kl_coefficient,
        }
        return AlgorithmState(tensors=tensors, numbers=numbers)

    def restore(self, state: AlgorithmState) -> None:
        """Become what the state was taken from, as `Algorithm.restore`; β is scheduled, so it goes on."""
        self.load(taken_over(self.state(), state, going_on=("generator/",)))

    def load(self, state: AlgorithmState) -> None:
        """Become what `state` was taken from; raises ValueError that names what is missing or misshapen."""
        missing = {"updates", "gradient_steps", "kl_coefficient"} - state.numbers.keys()
        if missing or _PERMUTATIONS not in state.tensors:
            raise ValueError(f"algorithm state: {sorted(missing) or _PERMUTATIONS} missing")
        for name, optimiser in self._network.optimisers.items():
            moments = under(state.tensors, f"optimiser/{name}/")
            optimiser.load_moments(moments, int(state.numbers["gradient_steps"][name]))
        load_copies(self.policy.published, "policy", state.tensors)
        load_copies(self.policy.critic, "critic", state.tensors)
        self._permutations.set_state(state.tensors[_PERMUTATIONS])
        self._updates = int(state.numbers["updates"])
        # A fixed one is the setting's, which a resumed run may have changed.
        if self.section.kl_target is not None:
            self._kl_coefficient = float(state.numbers["kl_coefficient"])


def minibatches(order: Index, count: int) -> Iterator[Index]:
    """Nearly equal parts; fewer when there are fewer responses."""
    for start, end in pairwise(edges(len(order), count)):
        yield order[start:end]
