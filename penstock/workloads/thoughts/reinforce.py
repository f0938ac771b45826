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
    Hardware,
    LearnsOnce,
    Model,
    RankGroup,
    Update,
    choose,
    contained,
    copies,
    decayed,
    factor,
    hardware_of,
    load_copies,
    model_of,
    taken_over,
    target_of,
    under,
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
from penstock.workloads.thoughts.validation import LEAST_GAIN, Probed, Validation, coherence, probe, validate


def rewards(with_thought: Tensor, without: Tensor, *, bound: float) -> Tensor:
    """Log p(y|x,z) − log p(y|x) within ± bound, [R]."""
    return (with_thought - without).clamp(-bound, bound)


def of_another_question(reward: Tensor, group: Tensor) -> Tensor:
    """Return for each thought the reward of one on the next question, [R]; the last one gets the first's."""
    return reward.roll(-int((group == 0).sum()))


def group_mean(values: Tensor, group: Tensor) -> Tensor:
    """Return for each thought the mean over those on its question, [R]."""
    count = int(group[-1]) + 1
    sums = values.new_zeros(count).index_add(0, group, values)
    return (sums / torch.bincount(group, minlength=count))[group]


def group_scale(group: Tensor) -> Tensor:
    """Return G / (G − 1) for each thought, 1 for one alone, [R]: a mean holds a G-th of its own reward."""
    sizes = torch.bincount(group)[group].double()
    return torch.where(sizes > 1, sizes / (sizes - 1).clamp(min=1), torch.ones_like(sizes)).float()


def return_advantages(
    reward: Tensor, row: Tensor, group: Tensor, *, value: Tensor | None, is_grouped: bool
) -> Tensor:
    """Return R − b of each token, [n].

    value: [n], b of a learned baseline; None: there is none. is_grouped: the mean of what is left over the
    thoughts of a question is taken away too, and the difference scaled by G / (G − 1).
    """
    left = reward[row] if value is None else reward[row] - value
    if not is_grouped:
        return left
    means = left.new_zeros(len(reward)).index_add(0, row, left) / torch.bincount(row, minlength=len(reward))
    return (left - group_mean(means, group)[row]) * group_scale(group)[row]


def gae_advantages(
    reward: Tensor, value: Tensor, row: Tensor, last: Tensor, *, discount: float, gae_lambda: float
) -> Tensor:
    """Return GAE(λ) over the tokens of each thought (Schulman et al. 2016), [n].

    δ_t = r_t + γ V_{t+1} − V_t with r = R and V = 0 behind the last token;  A_t = Σ (γλ)^k δ_{t+k}.
    last: int64 [R], the last token of each thought.
    """
    advantage, carried = torch.zeros_like(value), 0.0
    ends = set(last.tolist())
    numbers, values, rows = reward.tolist(), value.tolist(), row.tolist()
    for token in range(len(values) - 1, -1, -1):
        is_last = token in ends
        delta = (numbers[rows[token]] if is_last else discount * values[token + 1]) - values[token]
        carried = delta + (0.0 if is_last else discount * gae_lambda * carried)
        advantage[token] = carried
    return advantage


# ---- A network that guesses the reward of a thought from the states of the model.


class ThoughtBaseline(nn.Module):
    """States [n, H] → guesses [n]; 0 until it is trained. layers: 1 is a linear guess."""

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
        guesses: Tensor = self.network(states)
        return guesses.squeeze(-1)


def pooled(states: Tensor, row: Tensor) -> Tensor:
    """Return the mean of the states of a thought up to each of its tokens, [n, H].

    row: int64 [n], rising. What comes later is left out: a guess that knew it would bias the gradient.
    """
    sums = states.cumsum(0)
    places = torch.arange(len(row))
    begins = torch.ones_like(row, dtype=torch.bool)
    begins[1:] = row[1:] != row[:-1]
    first = places[begins][row.unique_consecutive(return_inverse=True)[1]]
    before = sums[first] - states[first]
    return (sums - before) / (places - first + 1).unsqueeze(1)


# ---- AdamW over named parameters, with a state that a checkpoint holds and an update can go back to.

_MOMENTS = ("exp_avg", "exp_avg_sq")
Copy = tuple[dict[str, Tensor], dict[str, Tensor], int]
"""All that a step changes: parameters, moments, steps."""


class ThoughtAdam:
    """Owns parameters from now on."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], epsilon: float) -> None:
        self._parameters = dict(parameters)
        self._optimiser = torch.optim.AdamW(
            self._parameters.values(), lr=0.0, betas=(0.9, 0.98), eps=epsilon, weight_decay=0.0
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
        state = self._optimiser.state
        return {name: state[one][name.rpartition("/")[2]].clone() for name, one in self._by_moment()}

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
    """Return the mean coherence of thoughts; raises ValueError for a question that the task cannot read.

    log_prob: [n], of the sampled tokens.
    """
    values, ends = log_prob.tolist(), rows.counts.cumsum().tolist()
    total = 0.0
    for number, (end, count) in enumerate(zip(ends, rows.counts.tolist(), strict=True)):
        question = layout.text(rows.questions[int(rows.question_of[number])][1:])
        words = layout.text(layout.said(rows.thoughts[number]))
        try:
            total += coherence(task, question, words, values[end - count : end])
        except Exception as error:
            # What a fragment says may be no question, and a task of one's own fails at it as it likes: the
            # fragment is to blame, and is left out.
            raise ValueError(f"{' '.join(question)[:200]!r}: no question of the task: {error!r}") from error
    return total / len(rows)


# ---- Validations in the course of learning: when they are made, what was found, when theatre ends a run.

_SEED: Final = 2_000_000
"""Of the questions: the same in every validation, and others than evaluations ask."""

_IN_A_ROW: Final = 2
"""Validations that must find theatre, one behind the other, to end a run.

While the learning rate is high, answers of an honest run now and then follow fewer mistakes than they should.
"""


class ThoughtValidation:
    """Validates a network that is being trained; used by the learner's thread."""

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
        """Return whether validations found theatre in a row, and the grace is over or a gain was lost."""
        if self._last is None or self._in_a_row < _IN_A_ROW:
            return False
        is_lost = self._best_gain > LEAST_GAIN >= float(self._last["gain"])
        return is_lost or int(self._last["update"]) >= self._section.theatre_grace

    def figures(self) -> dict[str, float]:
        return dict(self._figures)

    def findings(self, updates: int | None = None) -> dict[str, Any]:
        """Return what a run's summary shows. updates: of the weights now; None: the last validation."""
        if self._last is None:
            return {}
        found = self._last if updates is None else {"update": updates, **self._judged(self._probe()).json()}
        return {"theatre": found, "remarks": found["words"]}

    def _validate(self, updates: int) -> None:
        probed = self._probe()
        if updates == 0:
            self._start_losses = -probed.without.log_prob
        found = self._judged(probed)
        self._best_gain = max(self._best_gain, found.gain)
        self._last = {"update": updates, **found.json()}
        self._in_a_row = self._in_a_row + 1 if found.verdict == "theatre" else 0
        self._figures = found.figures()
        say = log.warning if found.verdict == "theatre" else log.info
        say("thoughts validated", extra={"update": updates, "verdict": found.verdict, "words": found.words()})

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
            "figures": self._figures,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        losses, self._last = state["start_loss"], state["last"]
        self._start_losses = None if losses is None else np.asarray(losses, np.float64)
        self._best_gain = -float("inf") if state["best_gain"] is None else float(state["best_gain"])
        self._figures = dict(state["figures"])
        self._in_a_row = int(state["in_a_row"])


_RECENT: Final = 100
_DEVIATION_FLOOR: Final = 1e-4

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
                **{f"policy/{name}": one for name, one in policy.trained().items()},
                **{f"baseline/{name}": one for name, one in self._baseline.named_parameters()},
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
        entropy_coefficient = decayed(
            section.entropy_coefficient, section.entropy_decay, section.entropy_floor, self._updates
        )
        total, of_losses = self._losses(rows, read, weight * advantage, value, reward, entropy_coefficient)
        self._optimiser.clear()
        total.backward()
        rate = self._learning_rate(progress)
        norm = self._optimiser.step(rate, section.max_gradient_norm)
        farthest = float(log_ratio.abs().max())
        checksum = math.fsum(float(one.detach().sum()) for one in self.policy.trained().values())
        judged = [float(total.detach()), norm, float(reward.sum()), checksum, farthest]
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


# ---- What a run of thoughts learns with.


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
        del hardware  # the section's class says that it can use none
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
    """Return what a run learns with, by what it is for, in words."""
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
