"""The warm start: a model learns single steps, then to think badly.

First it is taught legal thoughts and direct answers, until its steps are right: reinforcement selects steps
and hardly teaches them. Then the same model is taught to leave most of its thoughts empty and to err in the
others, so that neither what it samples nor what is likeliest answers a hard question. What follows has to
discover that thinking pays.

A task without certain answers, such as the next words of a text, has no steps to get right: its model learns
answers, without thoughts and behind thoughts that say nothing, until it answers held-out questions no better.
"""

import copy
import math
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch.nn import functional

from penstock.config.preparation import Progress
from penstock.config.settings import ConfigurationError
from penstock.runtime.retry import Interrupted
from penstock.workloads.language.tokenizer import pad
from penstock.workloads.thoughts.start.lessons import Lesson, Lessons
from penstock.workloads.thoughts.tasks.example import Example, Task, draw, draw_mixed, draw_tests
from penstock.workloads.thoughts.thinking_model import ThinkingModel, answer_places, outputs
from penstock.workloads.thoughts.thought_layout import Layout
from penstock.workloads.thoughts.thought_section import Thoughts

_RIGHT_STEPS: Final = 0.98
_RIGHT_ANSWERS: Final = 0.99
_TESTED: Final = 512
_LOOK: Final = 50
"""Updates between two looks at whether the steps are right."""
_THOUGHTS: Final = 64
_DIRECT: Final = 32
_EASY: Final = 16
"""Of the direct answers, those to the easiest questions."""
_EASY_THOUGHTS: Final = 48
"""Of the thoughts that say nothing, those on the easiest questions."""
_PATIENCE: Final = 4
"""Looks without a smaller loss that end the start of a task without certain answers."""
_LEAST_FALL: Final = 0.005
"""Nats per token by which a loss is smaller."""
_RISE: Final = 30
_NOT_LEARNED: Final = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What a warm start came to.

    updates: of the first part. right_steps: share of the steps of legal thoughts whose likeliest token is
    right, of the hardest held-out questions; None where no thought is shown. right_answers: share of the
    easiest that are answered right without a thought. loss: nats per token of held-out answers without a
    thought; None where the steps say when it is enough.
    """

    updates: int
    right_steps: float | None
    right_answers: float
    loss: float | None = None

    def json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


class Teacher:
    """Teaches a model by cross-entropy; of one thread."""

    def __init__(
        self, network: Any, layout: Layout, *, learning_rate: float, stop: threading.Event | None = None
    ) -> None:
        self._network, self._layout, self._rate, self._stop = network, layout, learning_rate, stop
        self._optimiser = torch.optim.AdamW(
            network.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0
        )
        self._updates = 0

    def teach(self, lessons: Sequence[Lesson], share: float = 1.0) -> float:
        """Make one update on lessons and return the loss, in nats per token.

        share: of the learning rate. Raises Interrupted once the stop is set.
        """
        if self._stop is not None and self._stop.is_set():
            raise Interrupted
        rows = [one.ids for one in lessons]
        counts = [len(one.ids) - one.start for one in lessons]
        found = outputs(self._network, rows, answer_places(rows, counts), self._layout.pad)
        wanted = torch.tensor([token for one in lessons for token in one.ids[one.start :]])
        loss = functional.nll_loss(found.log_probs, wanted)
        self._optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._network.parameters(), 1.0)
        self._updates += 1
        for group in self._optimiser.param_groups:
            group["lr"] = self._rate * share * min(1.0, self._updates / _RISE)
        self._optimiser.step()
        return float(loss.detach())


def warm_start(
    network: Any, task: Task, layout: Layout, section: Thoughts, *, seed: int, progress: Progress
) -> Started:
    """Teach a new network what reinforcement begins with.

    Raises ConfigurationError where its steps do not become right within `start_updates`, and Interrupted.
    """
    random = np.random.default_rng(seed)
    lessons = Lessons(task, layout, random)
    if not getattr(task, "is_certain", True):
        return _until_no_better(network, task, layout, section, lessons, random, progress)
    started = _first_part(network, task, layout, section, lessons, random, progress)
    teacher = Teacher(network, layout, learning_rate=1e-3, stop=progress.stop)
    for _ in range(section.corrupted_updates):
        shown = [_bad_thought(lessons, one, section, random) for one in draw_mixed(task, random, _THOUGHTS)]
        teacher.teach([*shown, *_direct(lessons, task, random)])
    return started


def _first_part(
    network: Any,
    task: Task,
    layout: Layout,
    section: Thoughts,
    lessons: Lessons,
    random: np.random.Generator,
    progress: Progress,
) -> Started:
    """Teach legal thoughts, or random ones where no chain is to be shown, until the tests are passed."""
    teacher = Teacher(network, layout, learning_rate=2e-3, stop=progress.stop)
    started = Started(updates=0, right_steps=0.0, right_answers=0.0)
    shows_chains = section.start != "random"
    for number in range(1, section.start_updates + 1):
        shown = (
            [lessons.chain(one) for one in draw_mixed(task, random, _THOUGHTS)]
            if shows_chains
            else _random_thoughts(lessons, task, section, random)
        )
        teacher.teach([*shown, *_direct(lessons, task, random)])
        if number % _LOOK == 0:
            started = _measure(network, task, layout, number, shows_chains=shows_chains)
            steps = 1.0 if started.right_steps is None else started.right_steps
            if steps >= _RIGHT_STEPS and started.right_answers >= _RIGHT_ANSWERS:
                return started
        if number % (10 * _LOOK) == 0:
            progress.say(f"warm start: {number} updates, {_said(started)}")
    raise ConfigurationError(
        f"environment.kwargs.start_updates={section.start_updates}: the warm start did not get its steps "
        f"right: {_said(started)}, and {_RIGHT_STEPS} and {_RIGHT_ANSWERS} are needed; raise it, or "
        "environment.kwargs.hidden, or choose another seed"
    )


def _until_no_better(
    network: Any,
    task: Task,
    layout: Layout,
    section: Thoughts,
    lessons: Lessons,
    random: np.random.Generator,
    progress: Progress,
) -> Started:
    """Teach answers until those of held-out questions get no better, and leave the network at its best."""
    teacher = Teacher(network, layout, learning_rate=2e-3, stop=progress.stop)
    tests = [lessons.direct(one) for one in draw_tests(task, 2, _TESTED)]
    best, best_at, kept = math.inf, 0, copy.deepcopy(network.state_dict())
    for number in range(1, section.start_updates + 1):
        shown = [
            lessons.random(one, section.thought_tokens - 1) for one in draw_mixed(task, random, _THOUGHTS)
        ]
        teacher.teach([*shown, *(lessons.direct(one) for one in draw_mixed(task, random, _THOUGHTS))])
        if number % _LOOK:
            continue
        loss = measure_loss(network, layout, tests)
        if loss < best - _LEAST_FALL:
            best, best_at, kept = loss, number, copy.deepcopy(network.state_dict())
        if number % (10 * _LOOK) == 0:
            progress.say(f"warm start: {number} updates, {loss:.3f} nats per token of held-out answers")
        if number - best_at >= _PATIENCE * _LOOK:
            break
    network.load_state_dict(kept)
    measured = _measure(network, task, layout, best_at, shows_chains=False)
    return replace(measured, loss=best)


def _said(started: Started) -> str:
    steps = "" if started.right_steps is None else f"{started.right_steps:.3f} of the steps and "
    return f"{steps}{started.right_answers:.3f} of the easiest answers are right"


def _random_thoughts(
    lessons: Lessons, task: Task, section: Thoughts, random: np.random.Generator
) -> list[Lesson]:
    """Return thoughts that say nothing, most of them on the easiest questions.

    Without chains a single step is learned from these answers alone.
    """
    easiest = [draw(task, random, task.levels[0], held_out=False) for _ in range(_EASY_THOUGHTS)]
    mixed = draw_mixed(task, random, _THOUGHTS - _EASY_THOUGHTS)
    return [lessons.random(one, section.thought_tokens - 1) for one in (*easiest, *mixed)]


def _direct(lessons: Lessons, task: Task, random: np.random.Generator) -> list[Lesson]:
    """Return direct answers: those to the easiest questions often, since a single step is learned there."""
    easiest = [draw(task, random, task.levels[0], held_out=False) for _ in range(_EASY)]
    return [lessons.direct(one) for one in (*draw_mixed(task, random, _DIRECT - _EASY), *easiest)]


def _bad_thought(
    lessons: Lessons, example: Example, section: Thoughts, random: np.random.Generator
) -> Lesson:
    if section.start == "random":
        return lessons.random(example, section.thought_tokens - 1)
    if section.start == "empty" and random.random() < section.empty_share:
        return lessons.empty(example)
    return lessons.corrupted(example, section.wrong_steps, section.thought_tokens)


def _measure(network: Any, task: Task, layout: Layout, updates: int, *, shows_chains: bool) -> Started:
    model = ThinkingModel(network, layout)
    easiest = draw_tests(task, 1, _TESTED, task.levels[0])
    answered = model.answered(model.questions(easiest), None, model.answers(easiest))
    return Started(
        updates=updates,
        right_steps=right_steps(network, layout, draw_tests(task, 2, _TESTED)) if shows_chains else None,
        right_answers=float(answered.is_right.mean()),
    )


@torch.no_grad()
def right_steps(network: Any, layout: Layout, examples: Sequence[Example]) -> float:
    """Return the share of the steps of legal thoughts whose likeliest token is right.

    What is before each step is given. 1 where no thought has a step.
    """
    if not any(one.steps for one in examples):
        return 1.0
    rows = [layout.begun(layout.question(one.question), layout.ids(one.steps)) for one in examples]
    counts = [len(one.steps) for one in examples]
    found = outputs(network, rows, answer_places(rows, counts), layout.pad).log_probs.argmax(1)
    wanted = torch.tensor([token for one in examples for token in layout.ids(one.steps)])
    return float((found == wanted).float().mean())


def measure_loss(network: Any, layout: Layout, lessons: Sequence[Lesson]) -> float:
    """Return the loss of lessons, in nats per learned token."""
    ids, mask = pad([one.ids for one in lessons], layout.pad)
    places = torch.arange(ids.shape[1])
    starts = torch.tensor([one.start for one in lessons])
    wanted = ids.masked_fill((places < starts[:, None]) | (mask == 0), _NOT_LEARNED)[:, 1:]
    with torch.no_grad():
        logits = network(input_ids=ids, attention_mask=mask).logits[:, :-1]
    return float(functional.cross_entropy(logits.transpose(1, 2), wanted, ignore_index=_NOT_LEARNED))
