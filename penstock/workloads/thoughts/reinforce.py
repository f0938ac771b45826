"""REINFORCE of thoughts (Zelikman et al. 2024, Quiet-STaR): thoughts that help the answer become likelier.

With x a question, z a thought that the weights μ sampled, y the answer, and π the current weights:

    R = clip(log π(y|x,z) − log π(y|x), ± bound)           without gradient, computed here
    A = R − b,  b: mean of the question's thoughts, a learned baseline, both, none;  or GAE over tokens of z
    L = −mean_t min(π/μ, C) A_t log π(z_t)  + λ₁ NLL(y|x,z) + λ₀ NLL(y|x)
        + c_v ½ mean_t (V_t − R)² − c_e mean_t H(π(z_t)) + β mean_t KL(π‖start)

Without the third term, R could rise because the answer without a thought gets worse. The run ends where
validations (`penstock.workloads.thoughts.validation`) call its thoughts theatre.
"""

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.config.settings import ConfigurationError, Settings
from penstock.config.workload import Workload
from penstock.workloads.language.language_model import make_probe
from penstock.workloads.language.policy import LanguagePolicy
from penstock.workloads.plugin.learning import (
    Algorithm,
    AlgorithmState,
    Batch,
    FlatAdam,
    Hardware,
    LearnsOnce,
    Model,
    RankGroup,
    Trained,
    Update,
    choose,
    contained,
    decayed,
    factor,
    hardware_of,
    model_of,
    target_of,
    verdict,
    warmup,
)
from penstock.workloads.thoughts.environment import (
    Layout,
    ThoughtReinforceSection,
    spaces,
    task_of,
    thoughts_section,
)
from penstock.workloads.thoughts.model import ThinkingModel, build
from penstock.workloads.thoughts.rows import ThoughtPass, ThoughtRows, read_batch, read_rows
from penstock.workloads.thoughts.start import check_lengths
from penstock.workloads.thoughts.tasks import Task, draw_tests
from penstock.workloads.thoughts.validation import (
    LEAST_GAIN,
    Probed,
    Validation,
    coherence,
    gains,
    has_risen,
    probe,
    validate,
)


def of_another_question(reward: Tensor, question: Tensor) -> Tensor:
    """Return for each thought the reward of one on the next question, [R]; after the last comes the first.

    reward: float32 [R]. question: int64 [R], number of each thought's question, rising from 0.
    """
    return reward.roll(-int((question == 0).sum()))


def return_advantages(
    reward: Tensor, row: Tensor, question: Tensor, *, value: Tensor | None, is_grouped: bool
) -> Tensor:
    """Return R − b of each token, float32 [n].

    Args:
        reward: float32 [R], of each thought.
        row: int64 [n], the thought of each token, rising.
        question: int64 [R], the question of each thought, rising from 0.
        value: float32 [n], the learned baseline; None: there is none.
        is_grouped: also subtract the mean over the thoughts of a question, and multiply the difference by
            G / (G − 1), because that mean holds a G-th of each thought's own reward.
    """
    left = reward[row] if value is None else reward[row] - value
    if not is_grouped:
        return left
    means = left.new_zeros(len(reward)).index_add(0, row, left) / torch.bincount(row, minlength=len(reward))
    sizes = torch.bincount(question)
    of_question = left.new_zeros(len(sizes)).index_add(0, question, means) / sizes
    scale = sizes / (sizes - 1).clamp(min=1)
    return (left - of_question[question][row]) * scale[question][row]


def gae_advantages(
    reward: Tensor, value: Tensor, row: Tensor, *, discount: float, gae_lambda: float
) -> Tensor:
    """Return GAE(λ) over the tokens of each thought (Schulman et al. 2016), float32 [n].

    δ_t = r_t + γ V_{t+1} − V_t with r = R and V = 0 behind the last token;  A_t = Σ (γλ)^k δ_{t+k}.

    reward: float32 [R]. value: float32 [n]. row: int64 [n], the thought of each token, rising.
    """
    rewards, values, rows = reward.tolist(), value.tolist(), row.tolist()
    advantages = [0.0] * len(rows)
    following, following_value, thought = 0.0, 0.0, None
    for token in reversed(range(len(rows))):
        is_last = rows[token] != thought
        thought = rows[token]
        delta = (rewards[thought] if is_last else discount * following_value) - values[token]
        following = delta + (0.0 if is_last else discount * gae_lambda * following)
        following_value, advantages[token] = values[token], following
    return torch.tensor(advantages)


# ---- The learned baseline: a network that predicts the reward of a thought from the states of the model.


class ThoughtBaseline(nn.Module):
    """States [n, H] → predicted rewards [n], 0 at the start. layers: 1: linear."""

    def __init__(self, states: int, *, layers: int, width: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            widths = [states, *[width] * (layers - 1)]
            hidden = [part for one, other in pairwise(widths) for part in (nn.Linear(one, other), nn.Tanh())]
            last = nn.Linear(widths[-1], 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.network = nn.Sequential(*hidden, last)

    def forward(self, states: Tensor) -> Tensor:
        values: Tensor = self.network(states)
        return values.squeeze(-1)


def pooled(states: Tensor, row: Tensor) -> Tensor:
    """Return the mean of the states of a thought up to each of its tokens, [n, H].

    row: int64 [n], the thought of each token, rising. Later tokens are left out: a baseline that depends on
    them would bias the gradient.
    """
    sums, first = states.cumsum(0), torch.searchsorted(row, row)
    before = sums[first] - states[first]
    return (sums - before) / (torch.arange(len(row)) - first + 1).unsqueeze(1)


_MOMENTS: Final = {"first": "exp_avg", "second": "exp_avg_sq"}


class ThoughtAdam(FlatAdam):
    """Adam whose moments have the paths that a checkpoint of thoughts has: `NAME/exp_avg`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], epsilon: float) -> None:
        super().__init__(parameters, epsilon, betas=(0.9, 0.98))

    def moments(self) -> dict[str, Tensor]:
        named = ((name.partition("/"), moment) for name, moment in super().moments().items())
        return {f"{name}/{_MOMENTS[kind]}": moment for (kind, _, name), moment in named}

    def load_moments(self, moments: Mapping[str, Tensor], steps: int) -> None:
        missing = [path for path in self.moments() if path not in moments]
        if missing:
            raise ValueError(f"optimiser/{missing[0]}: missing; is it the same policy?")
        kinds = {path: kind for kind, path in _MOMENTS.items()}
        named = ((name.rpartition("/"), moment) for name, moment in moments.items())
        super().load_moments(
            {f"{kinds.get(path)}/{name}": moment for (name, _, path), moment in named}, steps
        )


# ---- Coherence of the thoughts of a batch.


def batch_coherence(task: Task, layout: Layout, rows: ThoughtRows, log_prob: Tensor) -> float:
    """Return the mean coherence of thoughts; raises ValueError for a question that the task cannot read.

    log_prob: float32 [n], of the sampled tokens.
    """
    total = 0.0
    for number, given in enumerate(log_prob.split(rows.counts.tolist())):
        question = layout.text(rows.questions[int(rows.question_of[number])][1:])
        words = layout.text(layout.content(rows.thoughts[number]))
        try:
            total += coherence(task, question, words, given.tolist())
        except Exception as error:
            # The tokens of a fragment may form no question, and the task of a user may then raise anything:
            # ValueError blames the fragment, which is left out.
            raise ValueError(f"{' '.join(question)[:200]!r}: no question of the task: {error!r}") from error
    return total / len(rows)


# ---- Validations during training: when they are made, their results, when theatre ends a run.

_SEED: Final = 2_000_000
"""Of the questions: the same in every validation, different from those of evaluations."""
_IN_A_ROW: Final = 2
"""Successive validations that must find theatre to end a run.

While the learning rate is high, answers of an honest run sometimes follow too few mistakes.
"""


_LEAST_QUESTIONS: Final = 32
"""Questions of each level, at least."""

Gains = dict[int, NDArray[np.float64]]
"""Of the questions of each level, in nats."""


class ThoughtValidation:
    """Validates a network that is being trained; used by the learner's thread.

    The verdict is on the hardest level. The gain of each level is compared with that of its last rise,
    at first with none: while any level rises, nothing is theatre, and the grace begins anew.
    """

    def __init__(
        self,
        network: Any,
        task: Task,
        layout: Layout,
        section: ThoughtReinforceSection,
        *,
        thought_tokens: int,
    ) -> None:
        self._model, self._task, self._section = ThinkingModel(network, layout), task, section
        self._most = thought_tokens
        self._examples = draw_tests(task, _SEED, section.validation_questions)
        of_each = max(_LEAST_QUESTIONS, section.validation_questions // len(task.levels))
        self._levels = {level: draw_tests(task, _SEED, of_each, level) for level in task.levels}
        self._risen_from: Gains = {}
        self._risen: int | None = None
        """Update of the newest validation in which a level has risen."""
        self._start_losses: NDArray[np.float64] | None = None
        self._best_gain = -float("inf")
        self._last: dict[str, Any] | None = None
        self._in_a_row = 0
        self._figures: dict[str, float] = {}

    def begin(self, updates: int) -> None:
        if self._section.validate_every and self._start_losses is None and updates == 0:
            self._validate(0)

    def after(self, updates: int) -> None:
        every = self._section.validate_every
        if every and updates % every == 0:
            self._validate(updates)

    @property
    def is_over(self) -> bool:
        """Return whether successive validations found theatre after the grace, or after a gain was lost."""
        if self._last is None or self._in_a_row < _IN_A_ROW:
            return False
        is_lost = self._best_gain > LEAST_GAIN >= float(self._last["gain"])
        return is_lost or int(self._last["update"]) - (self._risen or 0) >= self._section.theatre_grace

    def figures(self) -> dict[str, float]:
        return dict(self._figures)

    def findings(self, updates: int | None = None) -> dict[str, Any]:
        """Return the validation in a run's summary. updates: validate the weights now; None: the last one."""
        if self._last is None:
            return {}
        found = self._last
        if updates is not None:
            now, probed = self._gains(), self._probe()
            risen = updates if self._rises(now) else self._risen
            found = {"update": updates, **self._called(self._judged(probed), now, updates, risen).json()}
        return {"theatre": found, "verdict": found["verdict"], "remarks": found["words"]}

    def _validate(self, updates: int) -> None:
        probed = self._probe()
        if updates == 0:
            self._start_losses = -probed.without.log_prob
        now = self._gains()
        if (rises := self._rises(now)) and updates > 0:  # the start may gain something, too
            self._risen = updates
        self._risen_from |= rises
        found = self._called(self._judged(probed), now, updates, self._risen)
        self._best_gain = max(self._best_gain, found.gain)
        self._last = {"update": updates, **found.json()}
        self._in_a_row = self._in_a_row + 1 if found.verdict == "theatre" else 0
        self._figures = found.figures()
        say = log.warning if found.verdict == "theatre" else log.info
        say("thoughts validated", extra={"update": updates, "verdict": found.verdict, "words": found.words()})

    def _gains(self) -> Gains:
        return {level: gains(self._model, one, self._most) for level, one in self._levels.items()}

    def _rises(self, now: Gains) -> Gains:
        """Return the gains of the levels that have risen since their last rise."""
        before, nothing = self._risen_from, np.zeros(1)
        return {
            level: values
            for level, values in now.items()
            if has_risen(values, before.get(level, nothing), comparisons=len(now))
        }

    def _called(self, found: Validation, now: Gains, updates: int, risen: int | None) -> Validation:
        """Return a validation that calls nothing theatre that rises, or that gains on an easier level."""
        found = replace(found, levels={str(level): float(values.mean()) for level, values in now.items()})
        if found.verdict != "theatre" or updates == 0:
            return found
        if risen is not None and updates - risen < self._section.validate_every:
            return replace(found, verdict="rising")
        still = [level for level in self._risen_from if found.levels[str(level)] > LEAST_GAIN]
        return replace(found, verdict="doubtful") if found.gain <= LEAST_GAIN and still else found

    def _probe(self) -> Probed:
        return probe(self._model, self._task, self._examples, self._most)

    def _judged(self, probed: Probed) -> Validation:
        most_gain = getattr(self._task, "most_gain", None)
        return validate(probed, start_losses=self._start_losses, most_gain=most_gain)

    # ---- a checkpoint

    def state(self) -> dict[str, Any]:
        return {
            "start_loss": None if self._start_losses is None else self._start_losses.tolist(),
            "best_gain": None if self._last is None else self._best_gain,
            "last": self._last,
            "in_a_row": self._in_a_row,
            "risen": self._risen,
            "risen_from": {str(level): values.tolist() for level, values in self._risen_from.items()},
            "figures": self._figures,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        losses, self._last = state["start_loss"], state["last"]
        self._start_losses = None if losses is None else np.asarray(losses, np.float64)
        self._best_gain = -float("inf") if state["best_gain"] is None else float(state["best_gain"])
        self._figures = dict(state["figures"])
        self._in_a_row = int(state["in_a_row"])
        self._risen = state.get("risen")  # absent from checkpoints of before
        kept = state.get("risen_from", {})
        self._risen_from = {int(level): np.asarray(values) for level, values in kept.items()}


_RECENT: Final = 100
_DEVIATION_FLOOR: Final = 1e-4

log = logging.getLogger(__name__)


class ThoughtReinforce(Trained, LearnsOnce[ThoughtReinforceSection]):
    """An `Algorithm` that trains the weights of a policy.

    Args:
        policy: its weights are trained; do not move or convert it afterwards.
        section: the algorithm's settings.
        task, layout: the questions, and the layout of their rows.
        thought_tokens: most tokens of a thought.
        total_updates: updates over which the learning rate falls; None: it falls by the run's progress.
        seed: of the learned baseline's first weights.
    """

    rejection = "theatre"
    going_on = ()
    needed = ("validation", "recent", "updates", "gradient_steps")

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
        LearnsOnce.__init__(self, section)
        self.policy, self._task, self._layout = policy, task, layout
        self._total_updates = total_updates
        width = int(policy.network.config.get_text_config().hidden_size)
        self._baseline = ThoughtBaseline(
            width, layers=section.baseline_layers, width=section.baseline_hidden, seed=seed
        )
        self._optimiser = ThoughtAdam(
            {
                **{f"policy/{name}": one for name, one in policy.trained().items()},
                **{f"baseline/{name}": one for name, one in self._baseline.named_parameters()},
            },
            section.adam_epsilon,
        )
        self.modules = {"policy": policy.published, "baseline": self._baseline}
        self.optimisers = {"": self._optimiser}
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
        """Return, as `theatre`, a validation of the present weights, or the one that ended the run."""
        return self._validation.findings(None if self.has_rejected else self._updates)

    # ---- an update

    def update(self, batch: Batch, *, progress: float) -> Update:
        """Make one gradient step on a batch, without fragments that make it fail."""
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
        with self.undoing() as trial:
            reason, metrics = self._step(rows, progress)
            trial.is_kept = not reason and not is_rehearsal
            if trial.is_kept:
                self._updates += 1
                self._recent.append(metrics["rl/reward"])
                metrics["rl/avg_reward_100"] = float(np.mean(self._recent))
        return Update(
            applied=not reason,
            reason=reason,
            steps=rows.sampled,
            gradient_steps=1,
            metrics={} if reason else metrics,
        )

    def _step(self, rows: ThoughtRows, progress: float) -> tuple[str, dict[str, float]]:
        """Make the gradient step; return the reason against keeping it, or "", and the metrics."""
        section = self.section
        read = read_batch(self.policy, rows, self._layout, has_reference=section.kl_coefficient > 0.0)
        gain = (read.with_thought - read.without[rows.question_of]).detach()
        reward = gain.clamp(-section.reward_clip, section.reward_clip)
        if section.reward_from == "another":
            reward = of_another_question(reward, rows.question_of)
        value = self._value(rows, read)
        advantage = self._advantage(rows, reward, value.detach())
        log_ratio = read.log_prob.detach() - rows.behaviour
        weight = log_ratio.exp().clamp(max=section.behaviour_weight_cap)
        entropy_coefficient = decayed(
            section.entropy_coefficient, section.entropy_decay, section.entropy_floor, self._updates
        )
        total, of_losses = self._losses(rows, read, weight * advantage, value, reward, entropy_coefficient)
        rate = self._learning_rate(progress)
        gradient = self._optimiser.gradient_of(total)
        norm = float(self._optimiser.step(gradient, rate, section.max_gradient_norm))
        farthest = float(log_ratio.abs().max())
        checksum = float(self._optimiser.checksum())
        judged = [float(total.detach()), norm, float(reward.sum()), checksum, farthest]
        squares = weight.square().sum()
        lengths = [len(self._layout.content(thought)) for thought in rows.thoughts]
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
        """Return the loss, and its unweighted terms by the names of their metrics."""
        section = self.section
        policy = -(weighted * read.log_prob).mean()
        with_thought, direct = -read.with_thought.mean(), -read.without.mean()
        error = 0.5 * (value - reward[rows.row_of]).square().mean()
        entropy = read.entropy.mean()
        against = rows.behaviour if read.reference is None else read.reference
        # KL(π‖other) from samples of π by Schulman's third estimator, which is never below 0.
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
        """Return the baseline of each token, [n]; 0 without a learned one. Its loss trains it alone."""
        if not self._has_baseline:
            return torch.zeros(rows.sampled)
        states = read.states.detach()
        is_pooled = self.section.baseline_reads == "pooled"
        values: Tensor = self._baseline(pooled(states, rows.row_of) if is_pooled else states)
        return values

    def _advantage(self, rows: ThoughtRows, reward: Tensor, value: Tensor) -> Tensor:
        section = self.section
        if section.advantage == "gae":
            advantage = gae_advantages(
                reward, value, rows.row_of, discount=section.discount, gae_lambda=section.gae_lambda
            )
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

    # ---- a checkpoint

    def state(self) -> AlgorithmState:
        state = super().state()
        state.numbers.update(recent=list(self._recent), validation=self._validation.state())
        return state

    def load(self, state: AlgorithmState) -> None:
        super().load(state)
        self._recent = deque(map(float, state.numbers["recent"]), maxlen=_RECENT)
        self._validation.load(state.numbers["validation"])


# ---- The model of a run.


def make_thought_model(
    settings: Settings, workload: Workload, group: RankGroup, device: torch.device
) -> Model:
    if device.type != "cpu":
        raise ConfigurationError(f"learner.device={str(device)!r}: thoughts are learned on the CPU; say cpu")
    check_lengths(settings)
    seen = spaces(settings.environment)
    held = isinstance(settings.algorithm, ThoughtReinforceSection) and settings.algorithm.kl_coefficient > 0.0
    policy = build(*seen, settings.policy, settings.seed, has_reference=held)
    task, layout = task_of(settings.environment)

    def make(policy: Any, section: Any, *, seed: int, hardware: Hardware) -> Algorithm:
        del hardware  # the section allows none
        log.info("thoughts are learned", extra=_what_is_on(settings, section))
        return ThoughtReinforce(
            policy,
            section,
            task=task,
            layout=layout,
            thought_tokens=thoughts_section(settings.environment).thought_tokens,
            total_updates=settings.learner.total_updates,
            seed=seed,
        )

    algorithm = choose(
        {"thought_reinforce": make},
        policy,
        settings.algorithm,
        seed=settings.seed,
        hardware=hardware_of(settings.learner, group),
        learns="thinks before it answers",
    )
    replica = build(*seen, settings.policy, settings.seed)
    probe = make_probe(policy.vocabulary, settings.seed)
    return model_of(settings, algorithm, replica, seen, probe, device, target_of(settings, workload))


def _what_is_on(settings: Settings, section: ThoughtReinforceSection) -> dict[str, str]:
    """Return the parts of the algorithm and their settings, in words for the log."""
    learned = section.baseline in ("learned", "both")
    layers = f", {section.baseline_layers} layers of {section.baseline_hidden}, {section.baseline_reads}"
    entropy = section.entropy_coefficient
    evaluation, validate_every = settings.evaluation, section.validate_every
    return {
        "baseline": section.baseline + (layers if learned else ""),
        "advantage": f"gae, λ {section.gae_lambda}" if section.advantage == "gae" else section.advantage,
        "schedule": f"{section.learning_rate_schedule}, {section.learning_rate} to a share of "
        f"{section.learning_rate_floor}, {section.warmup_updates} updates of warm-up",
        "entropy": f"{entropy} × {section.entropy_decay} an update, at least {section.entropy_floor}"
        if entropy
        else "off",
        "kl": f"{section.kl_coefficient} to the start" if section.kl_coefficient else "off",
        "answer_without_thought": f"λ₀ {section.direct_coefficient}" if section.direct_coefficient else "off",
        "patience": "off"
        if evaluation.patience is None
        else f"{evaluation.patience} evaluations, by {evaluation.min_improvement}",
        "validation": f"every {validate_every} updates on {section.validation_questions} questions, theatre "
        + (f"ends it after {section.theatre_grace}" if section.ends_theatre else "is only told")
        if validate_every
        else "off",
    }
