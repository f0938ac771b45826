"""Rows of a batch: question, thought and answer, and the same questions without a thought.

Columns are data from other processes: one of another layout is left out and counted.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.policy.tokens import TokenRows
from penstock.workloads.language.policy import LanguagePolicy
from penstock.workloads.language.tokenizer import pad
from penstock.workloads.plugin.learning import Batch
from penstock.workloads.thoughts.environment import Ids, Layout
from penstock.workloads.thoughts.model import Outputs, answer_places, head_of, outputs, weighed

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtRows:
    """R thoughts on D questions, with n sampled tokens in the order of the thoughts.

    questions: [D].   question_of: int64 [R], the question of each thought, rising.   thoughts, answers: [R].
    behaviour: float32 [n], log-probability under the weights that sampled.
    row_of: int64 [n], the thought of each sampled token.   counts: int64 [R], sampled tokens of each thought.
    sent: float32 [R], the reward that the actor computed.   left_out: columns of another layout.
    """

    questions: tuple[Ids, ...]
    question_of: Tensor
    thoughts: tuple[Ids, ...]
    answers: tuple[Ids, ...]
    behaviour: Tensor
    row_of: Tensor
    counts: Index
    sent: Tensor
    left_out: int

    def __len__(self) -> int:
        return len(self.thoughts)

    @property
    def sampled(self) -> int:
        return len(self.row_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Rows, and the places to read in them: those of n sampled tokens, then those of m answer tokens.

    rows: [R].   place, action: int64 [n + m], the places and the tokens that follow them.
    answer_row: int64 [m], the row of each answer token.
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


class _Column(NamedTuple):
    question: Ids
    thought: Ids
    answer: Ids
    first: int


def read_rows(batch: Batch, layout: Layout) -> ThoughtRows | None:
    """Return the rows of a batch, those of equal questions together; None where there is none."""
    tokens, valid = (rows.t().numpy() for rows in (batch.observation["observation"], batch.valid))
    read = [(number, _read(*row, layout)) for number, row in enumerate(zip(tokens, valid, strict=True))]
    found = [(number, column) for number, column in read if column is not None]
    if not found:
        return None
    distinct = dict.fromkeys((one.question, one.answer) for _, one in found)
    number_of = {key: number for number, key in enumerate(distinct)}
    found.sort(key=lambda pair: number_of[pair[1].question, pair[1].answer])
    order, columns = zip(*found, strict=True)
    counts = np.array([len(one.thought) for one in columns])
    row = np.repeat(np.arange(len(order)), counts)
    step = np.concatenate([one.first + np.arange(len(one.thought)) for one in columns])
    at = torch.from_numpy(step), torch.from_numpy(np.array(order)[row])
    return ThoughtRows(
        questions=tuple(question for question, _ in distinct),
        question_of=torch.tensor([number_of[one.question, one.answer] for one in columns]),
        thoughts=tuple(one.thought for one in columns),
        answers=tuple(one.answer for one in columns),
        behaviour=batch.log_prob[at],
        row_of=torch.from_numpy(row),
        counts=counts,
        sent=batch.reward.sum(0)[torch.tensor(order)],
        left_out=int(valid.any(1).sum()) - len(found),
    )


def _read(tokens: NDArray[np.int64], valid: NDArray[np.bool_], layout: Layout) -> _Column | None:
    """Return the parts of a column; None where it has another layout, or nothing of it was sampled."""
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


# ---- One pass over a batch: the sampled tokens, the answers behind thoughts, and those without.


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtPass:
    """Outputs of R thoughts with n sampled tokens on D questions.

    log_prob, entropy: [n], of the sampled tokens, differentiable. states: [n, H], the hidden states there.
    reference: [n], log-probability under the start model; None: there is no KL penalty.
    with_thought: [R], log p(y|x,z). without: [D], log p(y|x). Both differentiable.
    share: mean weight of thoughts in the answers behind them, 0 … 1; 1 without a mixing head.
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
    """Return the outputs of direct answers, repeated for each thought on their question."""
    tokens = torch.cat([(direct.answer_row == one).nonzero()[:, 0] for one in rows.question_of])
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
