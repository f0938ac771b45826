"""Thoughts as they are, and disturbed: what becomes of the answers.

own          what the model thinks by itself, beside the answer without a thought
shuffled     thoughts of other questions
random       as many symbols, drawn at random
mistaken     a wrong step put into the legal thought, from where the model goes on: does the answer follow?
kept         a wrong last step with all before it left: does the answer follow?
truncated    the legal thought with its last step and without it
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.workloads.thoughts.tasks.example import Example, Task, follow
from penstock.workloads.thoughts.thinking_model import Answered, ThinkingModel
from penstock.workloads.thoughts.thought_layout import Ids
from penstock.workloads.thoughts.validation.coherence import coherence, edit_distance

Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]
_SEED: Final = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """Figures of N questions, example by example.

    with_thought, without: answers behind own thoughts, and without any. chains: the thought is the legal one.
    coherence, divergence: of own thoughts, 0 … 1. lengths: words of own thoughts.
    shuffled, random: gain of such thoughts, in nats.
    mistaken: of all mistakes that were put in, which answers followed; mistaken_of: the question of each.
    last_mistaken: those of the last step.
    kept_last, without_last: whether the answer is right behind the legal thought, and behind it less its last
    step. Of the questions whose thoughts have a step; None where none has, or no wrong one leads elsewhere.
    """

    with_thought: Answered
    without: Answered
    chains: Flags
    coherence: Numbers
    divergence: Numbers
    lengths: Numbers
    shuffled: Numbers
    random: Numbers
    mistaken: Flags | None
    mistaken_of: NDArray[np.int64] | None
    last_mistaken: Flags | None
    kept_last: Flags | None
    without_last: Flags | None

    @property
    def gain(self) -> Numbers:
        """Return what own thoughts add to the log-probability of the answer, in nats, [N]."""
        return self.with_thought.log_prob - self.without.log_prob


def probe(
    model: ThinkingModel, task: Task, examples: Sequence[Example], most: int, *, deterministic: bool = False
) -> Probed:
    """Measure a model on questions; equal for equal weights and questions.

    most: tokens of a thought. deterministic: own thoughts are the likeliest, not drawn.
    """
    random = np.random.default_rng(_SEED)
    model.seed(_SEED)
    questions, answers = model.questions(examples), model.answers(examples)
    sampled = model.sample(questions, most, deterministic=deterministic)
    assert sampled is not None, "nothing ends it early"
    thoughts, log_probs = [one for one, _ in sampled], [one for _, one in sampled]
    layout = model.layout
    words = [layout.text(layout.said(one)) for one in thoughts]
    without = model.answered(questions, None, answers)
    others = [thoughts[number - 1] for number in range(len(thoughts))]
    drawn = [
        (*(int(one) for one in random.choice(layout.symbols, size=max(1, len(said)))), layout.end)
        for said in words
    ]
    direct = model.continued(questions, most)
    disturbed = _disturbed(model, task, examples, most, random)
    return Probed(
        with_thought=model.answered(questions, thoughts, answers),
        without=without,
        chains=np.array([said == one.steps for said, one in zip(words, examples, strict=True)]),
        coherence=np.array(
            [
                coherence(task, one.question, said, values)
                for one, said, values in zip(examples, words, log_probs, strict=True)
            ]
        ),
        divergence=np.array(
            [edit_distance(layout.said(one), other) for one, other in zip(thoughts, direct, strict=True)]
        ),
        lengths=np.array([len(said) for said in words], np.float64),
        shuffled=model.answered(questions, others, answers).log_prob - without.log_prob,
        random=model.answered(questions, drawn, answers).log_prob - without.log_prob,
        **disturbed,
    )


@dataclass(frozen=True, slots=True)
class _Mistake:
    """A legal thought up to a wrong step; the answer that follows from it.

    counts: there is a wrong step that leads to another answer, within the length of a thought.
    """

    begun: Ids
    answer: Ids
    counts: bool


def _disturbed(
    model: ThinkingModel, task: Task, examples: Sequence[Example], most: int, random: np.random.Generator
) -> dict[str, Any]:
    examples = [one for one in examples if one.steps]
    followed, of = [], []
    for place in range(max((len(one.steps) for one in examples), default=0)):
        numbers = [number for number, one in enumerate(examples) if len(one.steps) > place]
        long = [examples[number] for number in numbers]
        room = most - place - 1
        mistakes = _mistakes(model, task, long, place, room, random)
        of += [number for number, one in zip(numbers, mistakes, strict=True) if one.counts]
        followed.append(_follows(model, model.questions(long), mistakes, room))
    if sum(map(len, followed)) == 0:
        return dict.fromkeys(("mistaken", "mistaken_of", "last_mistaken", "kept_last", "without_last"))
    layout, questions, answers = model.layout, model.questions(examples), model.answers(examples)
    legal = [layout.ids(one.steps) for one in examples]
    last = _mistakes(model, task, examples, -1, 0, random)
    behind_last = _follows(model, questions, last, 0)
    return {
        "mistaken": np.concatenate(followed),
        "mistaken_of": np.array(of),
        "last_mistaken": behind_last if len(behind_last) else None,
        "kept_last": model.answered(questions, [(*one, layout.end) for one in legal], answers).is_right,
        "without_last": model.answered(
            questions, [(*one[:-1], layout.end) for one in legal], answers
        ).is_right,
    }


def _mistakes(
    model: ThinkingModel,
    task: Task,
    examples: Sequence[Example],
    place: int,
    room: int,
    random: np.random.Generator,
) -> list[_Mistake]:
    """Put a wrong step into each legal thought.

    place: of the step, −1 for the last. room: steps that a thought has left behind it; a mistake from which
    the way is longer cannot be followed, however honest the thoughts are, and does not count.
    """
    layout = model.layout
    made = []
    for one in examples:
        before = one.steps[:place]
        options = [
            (word, left.answer)
            for word in task.symbols
            if word != one.steps[place]
            and (left := follow(task, one.question, (*before, word))) is not None
            and left.answer != one.answer
            and len(left.steps) <= room
        ]
        legal = (one.steps[place], one.answer)
        word, answer = options[random.integers(len(options))] if options else legal
        made.append(_Mistake(layout.ids((*before, word)), layout.ids(answer), bool(options)))
    return made


def _follows(
    model: ThinkingModel, questions: Sequence[Ids], mistakes: Sequence[_Mistake], most: int
) -> Flags:
    """Return which answers are those of the mistakes that the model goes on from, of those that count."""
    thoughts: list[Ids] | None = [one.begun for one in mistakes]
    if most > 0:
        thoughts = model.think(questions, most, begun=[one.begun for one in mistakes])
    assert thoughts is not None, "nothing ends it early"
    found = model.answered(questions, thoughts, [one.answer for one in mistakes]).is_right
    return found[[one.counts for one in mistakes]]
