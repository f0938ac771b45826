"""The actor's part of a run of thoughts: generate thoughts with rewards, evaluate, and serve.

One fragment is one batch of thoughts under one version of the weights, in rows of `actor.unroll_length`.
The learner computes the reward again. A batch that a drain ends early contains no experience.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from penstock.config.settings import ConfigurationError, Settings
from penstock.protocol.specification import RunSpecification
from penstock.runtime.health import Health
from penstock.workloads.language.conversation import Column, ColumnGenerator, SampledTurn
from penstock.workloads.language.pretraining import tiny_models
from penstock.workloads.language.settings import quieten
from penstock.workloads.plugin import acting
from penstock.workloads.plugin.acting import GENERATING, Played, Playing, Run
from penstock.workloads.thoughts.environment import Ids, Layout, sample_questions, task_of, thoughts_section
from penstock.workloads.thoughts.model import MIXING, Sampled, ThinkingModel, mixing_width
from penstock.workloads.thoughts.tasks import Example, Task, draw_mixed, draw_tests

if TYPE_CHECKING:
    from penstock.workloads.language.serving.text_answerer import ThinkingForm
    from penstock.workloads.language.serving.text_server import TextServer
    from penstock.workloads.plugin.serving import RunFollower, Source


class ThoughtEquipment:
    """The settings, task, layout and model of a run, from the places of this machine."""

    def __init__(self, of: Run) -> None:
        """Raise ConfigurationError where something is missing or does not fit."""
        quieten()
        torch.set_num_threads(of.actor.threads)
        self.section = thoughts_section(of.environment)
        self.task, self.layout = task_of(of.environment)
        self.local = of.make_policy(of.specification.seed)
        network = self.local.policy.network  # type: ignore[attr-defined] # a LanguagePolicy
        self.model = ThinkingModel(network, self.layout)


def make_generator(specification: RunSpecification, settings: Settings, health: Health) -> "ThoughtGenerator":
    return ThoughtGenerator(acting.read(specification, settings.actor), health)


class ThoughtGenerator(ColumnGenerator):
    """Generates a batch of thoughts at a time with a local policy."""

    def __init__(self, of: Run, health: Health) -> None:
        self._equipment = ThoughtEquipment(of)
        super().__init__(of, self._equipment.local, self._equipment.layout.pad, health)
        self._rows = of.specification.unroll_length
        self._random = np.random.default_rng(of.specification.seed)

    def draw_from(self, seed: int, asked: int) -> None:
        self._equipment.model.seed(seed)
        self._random = np.random.default_rng(asked)

    def columns(self, is_over: Callable[[], bool]) -> tuple[list[Column], bytes]:
        equipment, group = self._equipment, self._equipment.section.group
        model = equipment.model
        drawn = draw_mixed(equipment.task, self._random, self.slots // group)
        examples = [one for one in drawn for _ in range(group)]
        questions, answers = model.questions(examples), model.answers(examples)
        sampled = model.sample(
            questions,
            equipment.section.thought_tokens,
            is_over=is_over,
            on_token=partial(self.health.progress, GENERATING),
        )
        rewards = None
        if sampled is not None:
            with_thought = model.answered(questions, [one for one, _ in sampled], answers)
            rewards = with_thought.log_prob - model.answered(questions, None, answers).log_prob
        return self._laid_out(examples, sampled, rewards), b""

    def _laid_out(
        self, examples: Sequence[Example], sampled: Sequence[Sampled] | None, rewards: Any
    ) -> list[Column]:
        layout = self._equipment.layout
        publication = self._equipment.local.publication
        columns = []
        for number, example in enumerate(examples):
            question, answer = layout.question(example.question), layout.ids(example.answer)
            if sampled is None:
                columns.append(Column(ids=self._padded(layout.direct(question, answer))))
                continue
            thought, log_prob = sampled[number]
            turn = SampledTurn(
                start=len(question) + 1,
                log_prob=log_prob,
                version=publication.version,
                update=publication.update,
                reward=float(rewards[number]),
            )
            row = self._padded(layout.thinking(question, thought, answer))
            columns.append(Column(ids=row, turns=(turn,), terminated=thought[-1] == layout.end))
        return columns

    def _padded(self, row: Ids) -> Ids:
        if len(row) > self._rows + 1:
            raise ConfigurationError(
                f"actor.unroll_length={self._rows}: a question with its thought and answer needs "
                f"{len(row) - 1}; give that, or shorter questions"
            )
        return (*row, *[self._equipment.layout.pad] * (self._rows + 1 - len(row)))


_BATCH: Final = 256
"""Questions at once."""


def make_runner(
    specification: RunSpecification, settings: Settings, episodes: int | None = None
) -> "ThoughtRunner":
    del episodes
    return ThoughtRunner(acting.read(specification, settings.actor))


class ThoughtRunner(acting.Runner):
    """Answers one held-out question per episode; deterministic: behind the likeliest thought."""

    def __init__(self, of: Run) -> None:
        self._equipment = ThoughtEquipment(of)
        super().__init__(of, self._equipment.local)

    def waves(self, episodes: int, seed: int, how: Playing) -> Iterator[list[Played] | None]:
        examples = draw_tests(self._equipment.task, seed, episodes)
        self._equipment.model.seed(seed)
        for first in range(0, episodes, _BATCH):
            yield self._answered(examples[first : first + _BATCH], how)

    def _answered(self, part: Sequence[Example], how: Playing) -> list[Played] | None:
        """Return an episode for each question; None when stopped first."""
        model = self._equipment.model
        questions = model.questions(part)
        sampled = model.sample(
            questions,
            self._equipment.section.thought_tokens,
            deterministic=how.deterministic,
            is_over=how.stop.is_set,
            on_token=how.on_step,
        )
        if sampled is None or how.stop.is_set():
            return None
        thoughts = [thought for thought, _ in sampled]
        answered = model.answered(questions, thoughts, model.answers(part))
        return [
            Played(episode_return=float(right), length=len(thought), terminated=True)
            for right, thought in zip(answered.is_right.tolist(), thoughts, strict=True)
        ]


# ---- The server of `penstock serve`: the last message is a question of the task.

_TEMPLATE: Final = (
    "{% if tools %}{{ raise_exception('a model of thoughts calls no tools') }}{% endif %}"
    "{% for message in messages %}{% if message.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('a model of thoughts knows the roles user and assistant') }}{% endif %}{% endfor %}"
    "{{ bos_token }} {{ messages[-1].content }}"
)


def make_server(
    settings: Settings,
    source: "Source",
    specification: RunSpecification,
    run_follower: "RunFollower | None",
) -> "TextServer":
    """Return the server; settings: of this process. Raises ConfigurationError, and as `acting.read`."""
    from penstock.workloads.language.serving.text_answerer import open_guard  # noqa: PLC0415 - no actor's
    from penstock.workloads.language.serving.text_server import TextServer  # noqa: PLC0415

    of = acting.read(specification, settings.actor)
    if width := mixing_width(of.policy):
        raise ConfigurationError(
            f"policy.kwargs.{MIXING}={width}: a server does not mix answers; serve a run that was trained "
            "without it"
        )
    section = thoughts_section(of.environment)
    task, layout = task_of(of.environment)
    answer_tokens = length_of_answers(section.task, task)
    return TextServer(
        settings,
        source,
        of,
        run_follower,
        tokenizer=question_tokenizer(layout),
        answer_tokens=answer_tokens,
        device="cpu",
        engine_name="transformers",
        guard=open_guard(section),
        form=thinking_form(layout, section.thought_tokens, answer_tokens),
        words=task.words,
    )


def question_tokenizer(layout: Layout) -> Any:
    """Return the tokenizer of a task, whose chat template makes a question of the last message."""
    tokenizer = tiny_models.build_tokenizer(layout.words)
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def thinking_form(layout: Layout, thought_tokens: int, answer_tokens: int) -> "ThinkingForm":
    """Return the form of thoughts. thought_tokens: most of a thought. answer_tokens: of every answer."""
    from penstock.workloads.language.serving.text_answerer import ThinkingForm  # noqa: PLC0415 - no actor's

    return ThinkingForm(
        opens=(layout.think,),
        end=layout.end,
        closes=(layout.equals,),
        directly=(layout.equals,),
        most=thought_tokens,
        answer_tokens=answer_tokens,
    )


def length_of_answers(name: str, task: Task) -> int:
    """Return the tokens of every answer of a task; no mark in a row ends an answer."""
    lengths = {len(one.answer) for one in sample_questions(task)}
    if len(lengths) > 1:
        raise ConfigurationError(
            f"environment.kwargs.task={name!r}: its answers have {min(lengths)} to {max(lengths)} words, and "
            "a server needs answers of one length: fill shorter ones with a filler word"
        )
    return lengths.pop()
