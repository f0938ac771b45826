"""One pass over a batch of thoughts: what was sampled, the answers behind it, and those without it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.policy.tokens import TokenRows
from penstock.workloads.language.policy.language_policy import LanguagePolicy
from penstock.workloads.language.tokenizer import pad
from penstock.workloads.thoughts.algorithm.thought_rows import (
    Reading,
    ThoughtRows,
    with_thoughts,
    without_thoughts,
)
from penstock.workloads.thoughts.thinking_model import Outputs, outputs, weighed
from penstock.workloads.thoughts.thinking_policy import head_of
from penstock.workloads.thoughts.thought_layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtPass:
    """Outputs of R thoughts with n sampled tokens on D questions.

    log_prob, entropy: [n], of the sampled tokens, differentiable. states: [n, H], which they are made of.
    reference: [n], log-probability under the start; None: nothing holds the policy to it.
    with_thought: [R], log p(y|x,z). without: [D], log p(y|x). Both differentiable.
    share: that thoughts have in the answers behind them, a mean in 0 … 1; 1 without a mixing head.
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
    """Return what a policy says of a batch; differentiable where gradients are on."""
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
    """Return the outputs of direct answers once for each thought, as answers behind thoughts lie."""
    counts = torch.bincount(direct.answer_row)
    first = counts.cumsum(0) - counts
    tokens = torch.cat(
        [torch.arange(int(first[one]), int(first[one] + counts[one])) for one in rows.question_of.tolist()]
    )
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
