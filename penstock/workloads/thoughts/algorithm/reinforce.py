"""REINFORCE of thoughts (Zelikman et al. 2024, Quiet-STaR): what helps the answer becomes likelier.

With x a question, z a thought that the weights μ sampled, y the answer, and π the weights of this moment:

    R = clip(log π(y|x,z) − log π(y|x), ± bound)           without gradient, computed here
    A = R − b,  b: mean of the question's thoughts, a learned guess, both, none;  or GAE over the tokens of z
    L = −mean_t min(π/μ, C) A_t log π(z_t)  + λ₁ NLL(y|x,z) + λ₀ NLL(y|x)
        + c_v ½ mean_t (V_t − R)² − c_e mean_t H(π(z_t)) + β mean_t KL(π‖start)

The third term keeps the answer without a thought honest: without it, R rises because that answer gets worse.
Thoughts that a validation (`penstock.workloads.thoughts.validation`) calls theatre end the run.
"""

import logging
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from penstock.policy.tokens import TokenRows
from penstock.workloads.language.policy.language_policy import LanguagePolicy
from penstock.workloads.language.tokenizer import pad
from penstock.workloads.plugin.learning import (
    AlgorithmState,
    Batch,
    LearnsOnce,
    Update,
    contained,
    copies,
    decayed,
    factor,
    load_copies,
    taken_over,
    under,
    verdict,
    warmup,
)
from penstock.workloads.thoughts.algorithm.advantage import (
    ThoughtBaseline,
    gae_advantages,
    of_another_question,
    pooled,
    return_advantages,
    rewards,
)
from penstock.workloads.thoughts.algorithm.rows import (
    Reading,
    ThoughtRows,
    read_rows,
    with_thoughts,
    without_thoughts,
)
from penstock.workloads.thoughts.algorithm.validation import ThoughtValidation
from penstock.workloads.thoughts.environment import Layout
from penstock.workloads.thoughts.model import Outputs, head_of, outputs, weighed
from penstock.workloads.thoughts.settings import ThoughtReinforceSection
from penstock.workloads.thoughts.tasks import Task
from penstock.workloads.thoughts.validation import coherence

# ---- AdamW over named parameters, with a state that a checkpoint holds and an update can go back to.

_MOMENTS = ("exp_avg", "exp_avg_sq")
_BETAS = (0.9, 0.98)


Copy = tuple[dict[str, Tensor], dict[str, Tensor], int]
"""All that a step changes: parameters, moments, steps."""


class ThoughtAdam:
    """Owns parameters from now on."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], epsilon: float) -> None:
        self._parameters = dict(parameters)
        self._optimiser = torch.optim.AdamW(
            self._parameters.values(), lr=0.0, betas=_BETAS, eps=epsilon, weight_decay=0.0
        )
        self.steps = 0
        """Steps made."""
        self._fill({name: torch.zeros_like(one) for name, one in self._by_moment()}, 0)

    def clear(self) -> None:
        self._optimiser.zero_grad()

    def step(self, rate: float, max_norm: float) -> float:
        """Make a step down the gradients and return their norm before it was cut to `max_norm`; 0: uncut."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), max_norm or float("inf"))
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.step()
        self.steps += 1
        return float(norm)

    def moments(self) -> dict[str, Tensor]:
        """Return copies of the moments, by `NAME/moment`."""
        return {
            f"{name}/{moment}": self._optimiser.state[one][moment].clone()
            for name, one in self._parameters.items()
            for moment in _MOMENTS
        }

    def load_moments(self, found: Mapping[str, Tensor], steps: int) -> None:
        """Become what `moments` was taken from; raises ValueError that names what is missing or misshapen."""
        for name, one in self._by_moment():
            if name not in found or found[name].shape != one.shape:
                raise ValueError(f"optimiser/{name}: missing or not {tuple(one.shape)}")
        self._fill(found, steps)

    def copy(self) -> Copy:
        parameters = {name: one.detach().clone() for name, one in self._parameters.items()}
        return parameters, self.moments(), self.steps

    @torch.no_grad()
    def go_back(self, copy: Copy) -> None:
        parameters, moments, steps = copy
        for name, one in self._parameters.items():
            one.copy_(parameters[name])
        self._fill(moments, steps)

    def _by_moment(self) -> list[tuple[str, nn.Parameter]]:
        return [(f"{name}/{moment}", one) for name, one in self._parameters.items() for moment in _MOMENTS]

    def _fill(self, moments: Mapping[str, Tensor], steps: int) -> None:
        for name, one in self._parameters.items():
            self._optimiser.state[one] = {
                "step": torch.tensor(float(steps)),
                **{moment: moments[f"{name}/{moment}"].detach().clone() for moment in _MOMENTS},
            }
        self.steps = steps


# ---- Coherence of the thoughts of a batch, whose questions come as tokens.


def batch_coherence(task: Task, layout: Layout, rows: ThoughtRows, log_prob: Tensor) -> float:
    """Return the mean coherence of thoughts. log_prob: [n], of the sampled tokens."""
    values, ends = log_prob.tolist(), rows.counts.cumsum().tolist()
    total = 0.0
    for number, (end, count) in enumerate(zip(ends, rows.counts.tolist(), strict=True)):
        question = rows.questions[int(rows.question_of[number])]
        words = layout.text(layout.said(rows.thoughts[number]))
        total += _coherence(task, layout.text(question[1:]), words, values[end - count : end])
    return total / len(rows)


def _coherence(task: Task, question: tuple[str, ...], words: tuple[str, ...], log_prob: list[float]) -> float:
    """Return the coherence of one; raises ValueError for a question that the task cannot read."""
    try:
        return coherence(task, question, words, log_prob)
    except Exception as error:
        # What a fragment says may be no question, and a task of one's own fails at it as it likes: the
        # fragment is to blame, and is left out.
        raise ValueError(f"{' '.join(question)[:200]!r}: no question of the task: {error!r}") from error


# ---- One pass over a batch of thoughts: what was sampled, the answers behind it, and those without it.


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtPass:
    """Outputs of R thoughts with n sampled tokens on D questions.

    log_prob, entropy: [n], of the sampled tokens, differentiable. states: [n, H], which they are made of.
    reference: [n], log-probability under the start; None: nothing holds the policy to it.
    with_thought: [R], log p(y|x,z). without: [D], log p(y|x). Both differentiable.
    share: that thoughts have in the answers behind them, a mean in 0 … 1; 1 without a mixing head.
    is_right: bool [R], is_directly_right: bool [D]: the likeliest answer is the true one.
    """

    log_prob: Tensor
    entropy: Tensor
    states: Tensor
    reference: Tensor | None
    with_thought: Tensor
    without: Tensor
    share: Tensor
    is_right: Tensor
    is_directly_right: Tensor


def read_batch(
    policy: LanguagePolicy, rows: ThoughtRows, layout: Layout, *, has_reference: bool
) -> ThoughtPass:
    thinking, direct = with_thoughts(rows, layout), without_thoughts(rows, layout)
    found = outputs(policy.network, thinking.rows, thinking.place, layout.pad)
    found_directly = outputs(policy.network, direct.rows, direct.place, layout.pad)
    sampled = rows.sampled
    log_probs = found.log_probs[:sampled]
    behind = Outputs(found.log_probs[sampled:], found.states[sampled:])
    without = behind if head_of(policy.network) is None else _of_thoughts(found_directly, direct, rows)
    answers, share = weighed(policy.network, behind, without)
    return ThoughtPass(
        log_prob=_chosen(log_probs, thinking.action[:sampled]),
        entropy=-(log_probs.exp() * log_probs).sum(-1),
        states=found.states[:sampled],
        reference=_reference(policy, thinking, sampled, layout) if has_reference else None,
        with_thought=_by_row(_chosen(answers, thinking.action[sampled:]), thinking.answer_row),
        without=_by_row(_chosen(found_directly.log_probs, direct.action), direct.answer_row),
        share=share.mean(),
        is_right=_all_right(answers, thinking.action[sampled:], thinking.answer_row),
        is_directly_right=_all_right(found_directly.log_probs, direct.action, direct.answer_row),
    )


def _of_thoughts(found: Outputs, direct: Reading, rows: ThoughtRows) -> Outputs:
    """Return the outputs of direct answers once for each thought, as answers behind thoughts lie."""
    counts = torch.bincount(direct.answer_row)
    first = counts.cumsum(0) - counts
    tokens = torch.cat(
        [torch.arange(int(first[one]), int(first[one] + counts[one])) for one in rows.question_of.tolist()]
    )
    return Outputs(found.log_probs[tokens], found.states[tokens])


def _chosen(log_probs: Tensor, action: Tensor) -> Tensor:
    return log_probs.gather(1, action[:, None])[:, 0]


def _by_row(values: Tensor, row: Tensor) -> Tensor:
    return values.new_zeros(int(row[-1]) + 1).index_add(0, row, values)


def _all_right(log_probs: Tensor, action: Tensor, row: Tensor) -> Tensor:
    wrong = (log_probs.detach().argmax(1) != action).long()
    return torch.zeros(int(row[-1]) + 1, dtype=torch.long).index_add(0, row, wrong) == 0


def _reference(policy: LanguagePolicy, reading: Reading, sampled: int, layout: Layout) -> Tensor:
    tokens, present = pad(reading.rows, layout.pad)
    rows = TokenRows(tokens, present.bool(), reading.place[:sampled], reading.action[:sampled])
    return policy.reference_log_prob(rows)


_RECENT: Final = 100
_DEVIATION_FLOOR: Final = 1e-4
_POLICY: Final = "policy/"
_BASELINE: Final = "baseline/"

log = logging.getLogger(__name__)


class ThoughtReinforce(LearnsOnce[ThoughtReinforceSection]):
    """An `Algorithm`. Owns the policy's weights from now on.

    thought_tokens: most tokens of a thought. total_updates: by which schedules are gone through; None: by the
    progress that the loop tells.
    """

    rejection = "theatre"

    def __init__(
        self,
        policy: LanguagePolicy,
        section: ThoughtReinforceSection,
        *,
        task: Task,
        layout: Layout,
        thought_tokens: int,
        total_updates: int | None,
        seed: int,
    ) -> None:
        super().__init__(section)
        self.policy, self._task, self._layout = policy, task, layout
        self._total_updates = total_updates
        width = int(policy.network.config.get_text_config().hidden_size)
        self._baseline = ThoughtBaseline(
            width, layers=section.baseline_layers, width=section.baseline_hidden, seed=seed
        )
        self._optimiser = ThoughtAdam(
            {
                **{f"{_POLICY}{name}": one for name, one in policy.trained().items()},
                **{f"{_BASELINE}{name}": one for name, one in self._baseline.named_parameters()},
            },
            section.adam_epsilon,
        )
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._validation = ThoughtValidation(
            policy.network, task, layout, section, thought_tokens=thought_tokens
        )

    def published_modules(self) -> dict[str, nn.Module]:
        return {"default": self.policy.published}

    @property
    def has_rejected(self) -> bool:
        """Return whether the thoughts are theatre and their grace is over."""
        return self.section.ends_theatre and self._validation.is_over

    def findings(self) -> dict[str, Any]:
        """Return a validation of the weights as they are, as `theatre`; of an ended run what ended it."""
        return self._validation.findings(None if self.has_rejected else self._updates)

    # ---- an update

    def update(self, batch: Batch, *, progress: float) -> Update:
        """Make one gradient step on a batch, without the fragments that make it fail."""
        self._validation.begin(self._updates)
        update = contained(partial(self._attempt, progress=progress), batch)
        if update.applied:
            self._validation.after(self._updates)
            update.metrics.update(self._validation.figures())
        return update

    def _attempt(self, batch: Batch, *, is_rehearsal: bool, progress: float) -> Update:
        rows = read_rows(batch, self._layout)
        if rows is None:
            return Update(applied=False, reason="empty", steps=0, gradient_steps=0, metrics={})
        before = self._optimiser.copy()
        is_kept = False
        try:
            reason, metrics = self._step(rows, progress)
            is_kept = not reason and not is_rehearsal
            if is_kept:
                self._updates += 1
                self._recent.append(metrics["rl/reward"])
                metrics["rl/avg_reward_100"] = float(np.mean(self._recent))
        finally:
            if not is_kept:
                self._optimiser.go_back(before)
        return Update(
            applied=not reason,
            reason=reason,
            steps=rows.sampled,
            gradient_steps=1,
            metrics={} if reason else metrics,
        )

    def _step(self, rows: ThoughtRows, progress: float) -> tuple[str, dict[str, float]]:
        """Make the gradient step; return why it is not to be kept, or "", and the metrics."""
        section = self.section
        read = read_batch(self.policy, rows, self._layout, has_reference=section.kl_coefficient > 0.0)
        gain = (read.with_thought - read.without[rows.question_of]).detach()
        reward = rewards(read.with_thought.detach(), read.without.detach()[rows.question_of],
                         bound=section.reward_clip)  # fmt: skip
        if section.reward_from == "another":
            reward = of_another_question(reward, rows.question_of)
        value = self._value(rows, read)
        advantage = self._advantage(rows, reward, value.detach())
        log_ratio = read.log_prob.detach() - rows.behaviour
        weight = log_ratio.exp().clamp(max=section.behaviour_weight_cap)
        entropy_coefficient = self._entropy_coefficient()
        total, of_losses = self._losses(rows, read, weight * advantage, value, reward, entropy_coefficient)
        self._optimiser.clear()
        total.backward()
        rate = self._learning_rate(progress)
        norm = self._optimiser.step(rate, section.max_gradient_norm)
        farthest = float(log_ratio.abs().max())
        judged = [float(total.detach()), norm, float(reward.sum()), self._checksum(), farthest]
        squares = weight.square().sum()
        lengths = [len(self._layout.said(thought)) for thought in rows.thoughts]
        metrics = {
            **of_losses,
            "rl/num_thoughts": float(sum(length > 0 for length in lengths)),
            "thought_length": float(np.mean(lengths)),
            "left_out": float(rows.left_out),
            "rl/episode": float(self._updates + 1),
            "rl/reward": float(reward.mean()),
            "rl/entropy_coefficient": entropy_coefficient,
            "rl/advantages": float(advantage.mean()),
            "rl/coherence": batch_coherence(self._task, self._layout, rows, read.log_prob.detach()),
            "rl/learning_rate": rate,
            "learning_rate": rate,
            "entropy_coefficient": entropy_coefficient,
            "gradient_norm": norm,
            "kl_behaviour": float((log_ratio.exp() - 1.0 - log_ratio).mean()),
            "effective_sample_size": float(weight.sum().square() / squares / len(weight)),
            "score": float(rows.sent.mean()),
            "gain": float(gain.mean()),
            "reward_difference": float((rows.sent - gain).abs().mean()),
            "answers_right": float(read.is_right.float().mean()),
            "direct_answers_right": float(read.is_directly_right.float().mean()),
            "thought_share": float(read.share),
        }
        return verdict(judged, section.max_log_ratio), metrics

    def _losses(
        self,
        rows: ThoughtRows,
        read: ThoughtPass,
        weighted: Tensor,
        value: Tensor,
        reward: Tensor,
        entropy_coefficient: float,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the loss, and its terms before their weights, by the names of their figures."""
        section = self.section
        policy = -(weighted * read.log_prob).mean()
        with_thought, direct = -read.with_thought.mean(), -read.without.mean()
        error = 0.5 * (value - reward[rows.row_of]).square().mean()
        entropy = read.entropy.mean()
        against = rows.behaviour if read.reference is None else read.reference
        # KL(π‖other) by samples of π, as Schulman's third estimator has it: never below 0.
        ratio = against - read.log_prob
        divergence = (ratio.exp() - 1.0 - ratio).mean()
        total = (
            policy
            + section.answer_coefficient * with_thought
            + section.direct_coefficient * direct
            - entropy_coefficient * entropy
        )
        if self._has_baseline:
            total = total + section.value_coefficient * error
        if read.reference is not None:
            total = total + section.kl_coefficient * divergence
        terms = {
            "rl/policy_loss": policy,
            "rl/value_loss": error,
            "rl/entropy": entropy,
            "rl/kl_divergence": divergence,
            "rl/total_loss": total,
            "policy_loss": policy,
            "entropy": entropy,
            "loss_with_thought": with_thought,
            "loss_without_thought": direct,
        }
        return total, {name: float(term.detach()) for name, term in terms.items()}

    @property
    def _has_baseline(self) -> bool:
        return self.section.baseline in ("learned", "both")

    def _value(self, rows: ThoughtRows, read: ThoughtPass) -> Tensor:
        """Return the guess of each token, [n]; 0 without a learned baseline. Its loss trains it alone."""
        if not self._has_baseline:
            return torch.zeros(rows.sampled)
        states = read.states.detach()
        is_pooled = self.section.baseline_reads == "pooled"
        guesses: Tensor = self._baseline(pooled(states, rows.row_of) if is_pooled else states)
        return guesses

    def _advantage(self, rows: ThoughtRows, reward: Tensor, value: Tensor) -> Tensor:
        section = self.section
        if section.advantage == "gae":
            advantage = gae_advantages(
                reward, value, rows.row_of, rows.last, discount=section.discount,
                gae_lambda=section.gae_lambda,
            )  # fmt: skip
        else:
            advantage = return_advantages(
                reward,
                rows.row_of,
                rows.question_of,
                value=value if self._has_baseline else None,
                is_grouped=section.baseline in ("group", "both"),
            )
        if not section.normalise_advantages:
            return advantage
        return advantage / advantage.std(correction=0).clamp(min=_DEVIATION_FLOOR)

    def _learning_rate(self, progress: float) -> float:
        section = self.section
        done = progress if self._total_updates is None else self._updates / self._total_updates
        floor = section.learning_rate_floor
        share = floor + (1.0 - floor) * factor(section.learning_rate_schedule, done)
        return section.learning_rate * share * warmup(self._updates, section.warmup_updates)

    def _entropy_coefficient(self) -> float:
        section = self.section
        return decayed(
            section.entropy_coefficient, section.entropy_decay, section.entropy_floor, self._updates
        )

    def _checksum(self) -> float:
        return math.fsum(float(one.detach().sum()) for one in self.policy.trained().values())

    # ---- a checkpoint

    def state(self) -> AlgorithmState:
        tensors = copies("policy", self.policy.published) | copies("baseline", self._baseline)
        tensors |= {f"optimiser/{name}": moment for name, moment in self._optimiser.moments().items()}
        numbers = {
            "updates": self._updates,
            "gradient_steps": self._optimiser.steps,
            "recent": list(self._recent),
            "validation": self._validation.state(),
        }
        return AlgorithmState(tensors=tensors, numbers=numbers)

    def restore(self, state: AlgorithmState) -> None:
        """Take over weights and moments, as `Algorithm.restore`; counts and validations go on."""
        self.load(taken_over(self.state(), state, going_on=()))

    def load(self, state: AlgorithmState) -> None:
        """Become what `state` was taken from; raises ValueError that names what is missing or misshapen."""
        missing = {"updates", "gradient_steps", "recent", "validation"} - state.numbers.keys()
        if missing:
            raise ValueError(f"algorithm state: {sorted(missing)} missing")
        moments = under(state.tensors, "optimiser/")
        self._optimiser.load_moments(moments, int(state.numbers["gradient_steps"]))
        load_copies(self.policy.published, "policy", state.tensors)
        load_copies(self._baseline, "baseline", state.tensors)
        self._updates = int(state.numbers["updates"])
        self._recent = deque(map(float, state.numbers["recent"]), maxlen=_RECENT)
        self._validation.load(state.numbers["validation"])
