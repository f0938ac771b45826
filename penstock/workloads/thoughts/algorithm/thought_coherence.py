"""Coherence of the thoughts of a batch, whose questions come as tokens."""

from torch import Tensor

from penstock.workloads.thoughts.algorithm.thought_rows import ThoughtRows
from penstock.workloads.thoughts.tasks.example import Task
from penstock.workloads.thoughts.thought_layout import Layout
from penstock.workloads.thoughts.validation.coherence import coherence


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
