"""REINFORCE of thoughts (Zelikman et al. 2024, Quiet-STaR): what helps the answer becomes likelier.

With x a question, z a thought that the weights μ sampled, y the answer, and π the weights of this moment:

    R = clip(log π(y|x,z) − log π(y|x), ± bound)           without gradient, computed here
    A = R − b,  b: mean of the question's thoughts, a learned guess, both, none;  or GAE over the tokens of z
    L = −mean_t min(π/μ, C) A_t log π(z_t)  + λ₁ NLL(y|x,z) + λ₀ NLL(y|x)
        + c_v ½ mean_t (V_t − R)² − c_e mean_t H(π(z_t)) + β mean_t KL(π‖start)

The third term keeps the answer without a thought honest: without it, R rises because that answer gets worse.
One gradient step is made on each batch. Every so many updates the thoughts are validated on questions that
were held out (`penstock.workloads.thoughts.validation`), and those that are theatre end the run once their
grace is over.
"""

import logging
import math
from collections import deque
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from penstock.workloads.language.policy.language_policy import LanguagePolicy
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
from penstock.workloads.thoughts.algorithm import thought_metrics as figures
from penstock.workloads.thoughts.algorithm.thought_adam import ThoughtAdam
from penstock.workloads.thoughts.algorithm.thought_advantage import (
    gae_advantages,
    of_another_question,
    return_advantages,
    rewards,
)
from penstock.workloads.thoughts.algorithm.thought_baseline import ThoughtBaseline, pooled
from penstock.workloads.thoughts.algorithm.thought_coherence import batch_coherence
from penstock.workloads.thoughts.algorithm.thought_pass import ThoughtPass, read_batch
from penstock.workloads.thoughts.algorithm.thought_rows import ThoughtRows, read_rows
from penstock.workloads.thoughts.algorithm.thought_validation import ThoughtValidation
from penstock.workloads.thoughts.tasks.example import Task
from penstock.workloads.thoughts.thought_layout import Layout
from penstock.workloads.thoughts.thought_settings import ThoughtReinforceSection

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
        """Return the policy, as `default`."""
        return {"default": self.policy.published}

    @property
    def has_rejected(self) -> bool:
        """Return whether the thoughts are theatre and their grace is over."""
        return self.section.ends_theatre and self._validation.is_over

    def findings(self) -> dict[str, Any]:
        """Return a validation of the weights as they are, as `theatre`, and its words.

        The last one is of weights before them, or of others where the best are the newest again. That of
        thoughts that ended the run is what it ended by.
        """
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
                metrics["rl/avg_reward_100"] = figures.average(self._recent)
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
        losses = self._losses(rows, read, weight * advantage, value, reward, entropy_coefficient)
        self._optimiser.clear()
        losses.total.backward()
        rate = self._learning_rate(progress)
        norm = self._optimiser.step(rate, section.max_gradient_norm)
        farthest = float(log_ratio.abs().max())
        judged = [float(losses.total.detach()), norm, float(reward.sum()), self._checksum(), farthest]
        squares = weight.square().sum()
        metrics = {
            **figures.of_losses(losses),
            **figures.of_thoughts(rows, self._layout),
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
    ) -> figures.Losses:
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
        return figures.Losses(
            total=total,
            policy=policy,
            with_thought=with_thought,
            direct=direct,
            value=error,
            entropy=entropy,
            divergence=divergence,
        )

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
        """Return copies of weights and moments, and what validations have found."""
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
