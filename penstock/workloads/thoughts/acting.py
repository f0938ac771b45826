"""What a rollout worker of thoughts generates with: questions, several thoughts on each, their rewards.

    unroll   G thoughts on each of N / G questions, and what each adds to the log-probability of the answer
    cut      all of it as one fragment

One fragment is one batch of thoughts under one version of the weights. A column is question, thought and
answer (`penstock.workloads.thoughts.environment`), of which the thought was sampled; all columns have the
rows of `actor.unroll_length`, so that every fragment takes the same from the budget. The reward is the
actor's own, under the weights that sampled; the learner computes it anew under newer ones. A batch that a
drain ends early is no experience.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from penstock.config.sections import EvaluationSection
from penstock.config.settings import ConfigurationError, Settings
from penstock.protocol.fragment import Fragment
from penstock.protocol.messages import Episode
from penstock.protocol.specification import RunSpecification
from penstock.runtime.health import Health
from penstock.workloads.language.conversation.live_conversation import Column, ColumnFragments, SampledTurn
from penstock.workloads.language.quiet import quieten
from penstock.workloads.plugin import acting
from penstock.workloads.plugin.acting import (
    GENERATING,
    LocalPolicy,
    Played,
    Run,
    Session,
    action_seed,
    environment_seeds,
    note_lag,
    place_of,
    watch,
)
from penstock.workloads.plugin.fragments import HeaderFields
from penstock.workloads.thoughts.environment import Ids, Layout, Thoughts, task_of, thoughts_section
from penstock.workloads.thoughts.model import ThinkingModel
from penstock.workloads.thoughts.tasks import Example, Task, draw_mixed, draw_tests

# ---- What generates thoughts, to train or to measure: the task, its rows, and the model under newest
# weights.


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtEquipment:
    """Of one run."""

    section: Thoughts
    task: Task
    layout: Layout
    local: LocalPolicy
    model: ThinkingModel


def equip_thoughts(of: Run) -> ThoughtEquipment:
    """Return what a run needs, from the places of this machine; raises ConfigurationError."""
    quieten()
    torch.set_num_threads(of.actor.threads)
    task, layout = task_of(of.environment)
    local = of.make_policy(of.specification.seed)
    network = local.policy.network  # type: ignore[attr-defined] # a LanguagePolicy
    return ThoughtEquipment(
        section=thoughts_section(of.environment),
        task=task,
        layout=layout,
        local=local,
        model=ThinkingModel(network, layout),
    )


Sampled = tuple[Ids, tuple[float, ...]]


def make_generator(specification: RunSpecification, settings: Settings, health: Health) -> "ThoughtGenerator":
    """Return the generator of a run. settings: of this process.

    Raises what `acting.read` does, and ConfigurationError.
    """
    return ThoughtGenerator(acting.read(specification, settings.actor), health)


class ThoughtGenerator:
    """Generates with a local policy (see `acting.FragmentGenerator`)."""

    def __init__(self, of: Run, health: Health) -> None:
        self._equipment: ThoughtEquipment = equip_thoughts(of)
        self._slots, self._rows = of.environment.count, of.specification.unroll_length
        watch(health, of.actor.stall_timeout_s)
        self._health, self._actors = health, of.actor.count
        self.specification = of.specification
        self.outbox_fragments = of.actor.outbox_fragments
        pad = self._equipment.layout.pad
        self._fragments = ColumnFragments(of.specification.schema, self._slots, pad)
        self._random = np.random.default_rng(of.specification.seed)
        self._columns: list[Any] | None = None

    def begin(self, actor_id: str, session: Session) -> None:
        """Ask other questions and make other draws in every session."""
        seed, salt, local = self.specification.seed, session.seed_salt, self._equipment.local
        self._equipment.model.seed(action_seed(seed, actor_id, salt))
        (questions_seed,) = environment_seeds(seed, actor_id, salt, 1)
        self._random = np.random.default_rng(questions_seed)
        local.place = place_of(actor_id, self._actors, self._slots)
        self._fragments.restart(self._slots)
        session.follow_lag(partial(note_lag, self._health))
        if local.publication.version:
            local.answer_probe(session)

    def follow(self, session: Session) -> None:
        """Apply newer weights and answer the probe with them."""
        self._equipment.local.follow(session)

    def unroll(self, is_over: Callable[[], bool]) -> None:
        """Make one batch of thoughts and their rewards."""
        equipment, group = self._equipment, self._equipment.section.group
        model = equipment.model
        drawn = draw_mixed(equipment.task, self._random, self._slots // group)
        examples = [one for one in drawn for _ in range(group)]
        questions, answers = model.questions(examples), model.answers(examples)
        sampled = model.sample(
            questions,
            equipment.section.thought_tokens,
            is_over=is_over,
            on_token=partial(self._health.progress, GENERATING),
        )
        rewards = None
        if sampled is not None:
            with_thought = model.answered(questions, [one for one, _ in sampled], answers)
            without = model.answered(questions, None, answers)
            rewards = with_thought.log_prob - without.log_prob
        self._health.progress(GENERATING)
        self._columns = self._laid_out(examples, sampled, rewards)

    def _laid_out(
        self, examples: Sequence[Example], sampled: Sequence[Sampled] | None, rewards: Any
    ) -> list[Column]:
        layout = self._equipment.layout
        publication = self._equipment.local.publication
        columns = []
        for number, example in enumerate(examples):
            question, answer = layout.question(example.question), layout.ids(example.answer)
            if sampled is None:
                columns.append(Column(ids=self._padded(layout.direct(question, answer), layout)))
                continue
            thought, log_prob = sampled[number]
            turn = SampledTurn(
                start=len(question) + 1,
                log_prob=log_prob,
                version=publication.version,
                update=publication.update,
                reward=float(rewards[number]),
            )
            row = self._padded(layout.thinking(question, thought, answer), layout)
            columns.append(Column(ids=row, turns=(turn,), terminated=thought[-1] == layout.end))
        return columns

    def _padded(self, row: Ids, layout: Layout) -> Ids:
        if len(row) > self._rows + 1:
            raise ConfigurationError(
                f"actor.unroll_length={self._rows}: a question with its thought and answer needs "
                f"{len(row) - 1}; give that, or shorter questions"
            )
        return (*row, *[layout.pad] * (self._rows + 1 - len(row)))

    @property
    def collected(self) -> int:
        """Return 0: the rewards of a batch come last."""
        return 0

    def cut(self, session: int, sequence: int, round_: int) -> tuple[Fragment, list[Episode]]:
        """Return the batch that was collected."""
        assert self._columns is not None, "unroll comes before cut"
        fields = HeaderFields(
            run=self.specification.run,
            session=session,
            sequence=sequence,
            weights=self._equipment.local.publication,
            round=round_,
        )
        return self._fragments.cut(self._columns, fields)

    def close(self) -> None:
        """Do nothing: nothing is held."""


# ---- What an evaluation measures thoughts by: held-out questions of the hardest level that are answered
# right.

_BATCH: Final = 256
"""Questions at once."""


def make_runner(
    specification: RunSpecification, settings: Settings, episodes: int | None = None
) -> "ThoughtRunner":
    """Return the evaluation runner of a run. settings: of this process.

    Raises what `acting.read` does, and ConfigurationError.
    """
    del episodes  # no more is made for many than for few
    return ThoughtRunner(acting.read(specification, settings.actor))


class ThoughtRunner:
    """Asks held-out questions (see `acting.EvaluationRunner`)."""

    def __init__(self, of: Run) -> None:
        self._equipment: ThoughtEquipment = equip_thoughts(of)
        self.evaluation: EvaluationSection = of.evaluation
        self.stall_timeout_s = float(of.actor.stall_timeout_s)
        self.local: LocalPolicy = self._equipment.local

    def play(
        self,
        *,
        episodes: int,
        seed: int,
        deterministic: bool,
        stop: threading.Event,
        on_step: Callable[[], None] = lambda: None,
    ) -> list[Played] | None:
        """Answer a question an episode; equal for equal seeds and weights.

        deterministic: behind the likeliest thoughts.
        """
        equipment = self._equipment
        model = equipment.model
        examples = draw_tests(equipment.task, seed, episodes)
        model.seed(seed)
        played: list[Played] = []
        for start in range(0, episodes, _BATCH):
            part = examples[start : start + _BATCH]
            questions = model.questions(part)
            thoughts = model.think(
                questions,
                equipment.section.thought_tokens,
                deterministic=deterministic,
                is_over=stop.is_set,
                on_token=on_step,
            )
            if thoughts is None or stop.is_set():
                return None
            answered = model.answered(questions, thoughts, model.answers(part))
            played += [
                Played(episode_return=float(right), length=len(thought), terminated=True)
                for right, thought in zip(answered.is_right.tolist(), thoughts, strict=True)
            ]
        return played

    def close(self) -> None:
        """Do nothing: nothing is held."""
