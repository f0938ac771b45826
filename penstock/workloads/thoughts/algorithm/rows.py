"""Rows of a batch: question, thought and answer, and the same questions without a thought.

What a column says is data from elsewhere: one that is laid out otherwise is left out and counted.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.workloads.plugin.learning import Batch
from penstock.workloads.thoughts.environment import Ids, Layout
from penstock.workloads.thoughts.model import answer_places

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtRows:
    """R thoughts on D questions, with n sampled tokens, those of a thought behind one another.

    questions: [D].   question_of: int64 [R], rising.   thoughts, answers: [R].
    behaviour: float32 [n], log-probability under the weights that sampled.
    row_of: int64 [n], of each sampled token.   counts: int64 [R], sampled tokens.
    sent: float32 [R], reward that the actor computed.   update: int64 [R], of the weights that sampled.
    """

    questions: tuple[Ids, ...]
    question_of: Tensor
    thoughts: tuple[Ids, ...]
    answers: tuple[Ids, ...]
    behaviour: Tensor
    row_of: Tensor
    counts: Index
    sent: Tensor
    update: Tensor
    left_out: int

    def __len__(self) -> int:
        return len(self.thoughts)

    @property
    def sampled(self) -> int:
        return len(self.row_of)

    @property
    def last(self) -> Tensor:
        return torch.from_numpy(np.cumsum(self.counts) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Rows to be read, and where: the places of sampled tokens, then those of the answers.

    rows: [R].   place, action: int64 [n + m], the places and the tokens behind them.
    answer_row: int64 [m], row of each token of an answer.
    """

    rows: tuple[Ids, ...]
    place: Tensor
    action: Tensor
    answer_row: Tensor


def with_thoughts(rows: ThoughtRows, layout: Layout) -> Reading:
    """Return the rows with their thoughts: n sampled tokens, then those of R answers."""
    questions = [rows.questions[number] for number in rows.question_of.tolist()]
    full = tuple(layout.thinking(*one) for one in zip(questions, rows.thoughts, rows.answers, strict=True))
    longest = max(map(len, full))
    places = [
        number * longest + len(question) + place
        for number, (question, thought) in enumerate(zip(questions, rows.thoughts, strict=True))
        for place in range(len(thought))
    ]
    return _reading(full, rows.answers, places, [token for one in rows.thoughts for token in one])


def without_thoughts(rows: ThoughtRows, layout: Layout) -> Reading:
    """Return each of the D questions once, with its answer alone."""
    first = np.searchsorted(rows.question_of.numpy(), np.arange(len(rows.questions)))
    answers = tuple(rows.answers[number] for number in first.tolist())
    full = tuple(layout.direct(*one) for one in zip(rows.questions, answers, strict=True))
    return _reading(full, answers, [], [])


def _reading(
    full: tuple[Ids, ...], answers: tuple[Ids, ...], places: list[int], actions: list[int]
) -> Reading:
    counts = [len(answer) for answer in answers]
    return Reading(
        rows=full,
        place=torch.cat([torch.tensor(places, dtype=torch.long), answer_places(full, counts)]),
        action=torch.tensor([*actions, *(token for answer in answers for token in answer)]),
        answer_row=torch.arange(len(full)).repeat_interleave(torch.tensor(counts)),
    )


@dataclass(frozen=True, slots=True)
class _Column:
    """One column, read."""

    question: Ids
    thought: Ids
    answer: Ids
    first: int


def read_rows(batch: Batch, layout: Layout) -> ThoughtRows | None:
    """Return the rows of a batch, those of equal questions beside one another; None where there is none."""
    tokens = batch.observation["observation"].t().numpy()
    valid = batch.valid.t().numpy()
    found = {
        number: column
        for number in range(len(tokens))
        if (column := _read(tokens[number], valid[number], layout)) is not None
    }
    if not found:
        return None
    distinct = dict.fromkeys((one.question, one.answer) for one in found.values())
    number_of = {key: number for number, key in enumerate(distinct)}
    order = sorted(found, key=lambda number: number_of[found[number].question, found[number].answer])
    columns = [found[number] for number in order]
    counts = np.array([len(one.thought) for one in columns])
    row = np.repeat(np.arange(len(order)), counts)
    step = np.concatenate([one.first + np.arange(len(one.thought)) for one in columns])
    at = torch.from_numpy(step), torch.from_numpy(np.array(order)[row])
    kept = torch.tensor(order)
    return ThoughtRows(
        questions=tuple(question for question, _ in distinct),
        question_of=torch.tensor([number_of[one.question, one.answer] for one in columns]),
        thoughts=tuple(one.thought for one in columns),
        answers=tuple(one.answer for one in columns),
        behaviour=batch.log_prob[at],
        row_of=torch.from_numpy(row),
        counts=counts,
        sent=batch.reward.sum(0)[kept],
        update=batch.update[kept],
        left_out=int(valid.any(1).sum()) - len(found),
    )


def _read(tokens: NDArray[np.int64], valid: NDArray[np.bool_], layout: Layout) -> _Column | None:
    """Return what a column holds; None where it is no row of this task, or nothing of it was sampled."""
    sampled = valid.nonzero()[0]
    if not len(sampled):
        return None
    first, last = int(sampled[0]), int(sampled[-1])
    present = (tokens != layout.pad).nonzero()[0]
    end = int(present[-1]) + 1 if len(present) else 0
    thought = tuple(tokens[first + 1 : last + 2].tolist())
    behind = tuple(tokens[last + 2 : end].tolist())
    marks = (layout.equals,) if thought[-1] == layout.end else (layout.end, layout.equals)
    answer = behind[len(marks) :]
    is_whole = (
        len(sampled) == last + 1 - first
        and tokens[first] == layout.think
        and behind[: len(marks)] == marks
        and len(answer) > 0
        and layout.end not in thought[:-1]
    )
    return _Column(tuple(tokens[:first].tolist()), thought, answer, first) if is_whole else None
