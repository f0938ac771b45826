"""A language model that thinks before it answers: thoughts are sampled, answers are the likeliest tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from penstock.config.settings import ConfigurationError, PolicySection
from penstock.protocol.spaces import Space
from penstock.workloads.language.cached_generation import CachedGeneration
from penstock.workloads.language.policy import LanguagePolicy, read
from penstock.workloads.language.policy import build as build_language_policy
from penstock.workloads.language.tokenizer import pad
from penstock.workloads.thoughts.environment import Ids, Layout
from penstock.workloads.thoughts.tasks import Example

# ---- The policy: a language model, and optionally a head that mixes its answers.

MIXING: Final = "mixing"
"""Key of `policy.kwargs`: width of the head; 0 or absent: no head, answers are those behind the thought."""
_HEAD: Final = "mixing_head"


class MixingHead(nn.Module):
    """States behind a thought and without it, [n, H] each, to log-odds of the first, [n]; 0 at the start."""

    def __init__(self, states: int, *, width: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.hidden, self.last = nn.Linear(2 * states, width), nn.Linear(width, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, behind: Tensor, without: Tensor) -> Tensor:
        odds: Tensor = self.last(torch.relu(self.hidden(torch.cat([behind, without], -1))))
        return odds.squeeze(-1)


def build(
    observation: Space, action: Space, section: PolicySection, seed: int, *, has_reference: bool = False
) -> LanguagePolicy:
    width = mixing_width(section)
    plain = {key: value for key, value in section.kwargs.items() if key != MIXING}
    if plain.get("critic", "head") != "head":
        raise ConfigurationError(
            f"policy.kwargs.critic={plain['critic']!r}: thoughts have no critic of tokens; leave it out"
        )
    section = section.model_copy(update={"kwargs": plain})
    policy = build_language_policy(observation, action, section, seed, has_reference=has_reference)
    if width:
        states = policy.network.config.get_text_config().hidden_size
        policy.network.add_module(_HEAD, MixingHead(states, width=width, seed=seed))
    return policy


def mixing_width(section: PolicySection) -> int:
    """Return the width of the head, 0 for none; raises ConfigurationError."""
    width = section.kwargs.get(MIXING, 0)
    if not isinstance(width, int) or isinstance(width, bool) or width < 0:
        raise ConfigurationError(f"policy.kwargs.{MIXING}={width!r}: the width of a layer; 0: no head")
    return width


def head_of(network: Any) -> MixingHead | None:
    head: MixingHead | None = getattr(network, _HEAD, None)
    return head


def mixed(odds: Tensor, behind: Tensor, without: Tensor) -> Tensor:
    """Return the mixture of two answers, [n, V] log-probabilities each. odds: log-odds of the first, [n]."""
    share, rest = logsigmoid(odds)[:, None], logsigmoid(-odds)[:, None]
    return torch.logaddexp(behind + share, without.detach() + rest)


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs at n places. log_probs: [n, V]. states: [n, H], the last hidden states."""

    log_probs: Tensor
    states: Tensor


@dataclass(frozen=True, slots=True)
class Answered:
    """Answers to N questions.

    log_prob: float64 [N], of the true answer. given: the most likely answer, token by token.
    is_right: bool [N], whether that is the true one.
    """

    log_prob: NDArray[np.float64]
    given: tuple[Ids, ...]
    is_right: NDArray[np.bool_]


Sampled = tuple[Ids, tuple[float, ...]]
"""A thought, and the log-probabilities of its sampled tokens."""


def outputs(network: Any, rows: Sequence[Ids], place: Tensor, pad_id: int) -> Outputs:
    """Return the outputs at places, int64 [n], in the flattened rows, padded to the longest."""
    tokens, present = pad(rows, pad_id)
    logits, states = read(network, tokens, present, place)
    return Outputs(logits.float().log_softmax(-1), states.float())


def weighed(network: Any, behind: Outputs, without: Outputs) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities [n, V] of answers, and the weight [n] of the outputs behind thoughts.

    behind, without: outputs at the n tokens of the answers, behind the thoughts and without any. Without a
    mixing head the result is that of `behind`, and weights of 1.
    """
    head = head_of(network)
    if head is None:
        return behind.log_probs, torch.ones(len(behind.log_probs))
    odds = head(behind.states, without.states.detach())
    return mixed(odds, behind.log_probs, without.log_probs), odds.detach().sigmoid()


class ThinkingModel:
    """Thinks and answers with a causal language model of transformers, on the CPU; used by one thread."""

    def __init__(self, network: Any, layout: Layout) -> None:
        self.network, self.layout = network, layout
        self._generation = CachedGeneration(network, end_ids=(layout.end,), pad_id=layout.pad)

    def seed(self, seed: int) -> None:
        self._generation.seed(seed)

    def questions(self, examples: Sequence[Example]) -> list[Ids]:
        return [self.layout.question(one.question) for one in examples]

    def answers(self, examples: Sequence[Example]) -> list[Ids]:
        return [self.layout.ids(one.answer) for one in examples]

    def sample(
        self,
        questions: Sequence[Ids],
        most: int,
        *,
        begun: Sequence[Ids] | None = None,
        deterministic: bool = False,
        is_over: Callable[[], bool] = lambda: False,
        on_token: Callable[[], None] = lambda: None,
    ) -> list[Sampled] | None:
        """Return a thought on each question, with the log-probabilities of its sampled tokens.

        most: tokens after `begun`, the given beginnings. Returns None where `is_over` ended it early.
        """
        before = [()] * len(questions) if begun is None else begun
        prompts = [self.layout.begun(one, start) for one, start in zip(questions, before, strict=True)]
        generated = self._generation.generate(
            prompts, most, deterministic=deterministic, is_over=is_over, on_token=on_token
        )
        if not generated.whole.all():
            return None
        lengths = generated.lengths.tolist()
        return [
            ((*start, *generated.response(row)), tuple(generated.log_prob[row, : lengths[row]].tolist()))
            for row, start in enumerate(before)
        ]

    def continued(self, questions: Sequence[Ids], most: int) -> list[Ids]:
        """Return the most likely continuation of each question without a thought, of `most` tokens."""
        prompts = [(*one, self.layout.equals) for one in questions]
        generated = self._generation.generate(prompts, most, deterministic=True)
        return [generated.response(row) for row in range(len(prompts))]

    @torch.no_grad()
    def answered(
        self, questions: Sequence[Ids], thoughts: Sequence[Ids] | None, answers: Sequence[Ids]
    ) -> Answered:
        """Return the answers behind thoughts; thoughts: None: without any."""
        layout = self.layout
        counts = [len(answer) for answer in answers]

        def read_answers(rows: list[Ids]) -> Outputs:
            return outputs(self.network, rows, answer_places(rows, counts), layout.pad)

        directly = [layout.direct(*one) for one in zip(questions, answers, strict=True)]
        if thoughts is None:
            found = read_answers(directly).log_probs
        else:
            behind = read_answers(
                [layout.thinking(*one) for one in zip(questions, thoughts, answers, strict=True)]
            )
            without = behind if head_of(self.network) is None else read_answers(directly)
            found, _ = weighed(self.network, behind, without)
        wanted = torch.tensor([token for answer in answers for token in answer])
        chosen = found.gather(1, wanted[:, None])[:, 0].double().numpy()
        likely = found.argmax(1).tolist()
        starts = np.cumsum([0, *counts])
        given = tuple(tuple(likely[a:b]) for a, b in pairwise(starts.tolist()))
        return Answered(
            log_prob=np.add.reduceat(chosen, starts[:-1]),
            given=given,
            is_right=np.array([one == tuple(other) for one, other in zip(given, answers, strict=True)]),
        )


def answer_places(rows: Sequence[Ids], counts: Sequence[int]) -> Tensor:
    """Return the places that predict the last `counts` tokens of each padded row, int64 [Σ counts]."""
    longest = max(map(len, rows))
    return torch.tensor(
        [
            number * longest + place
            for number, (row, count) in enumerate(zip(rows, counts, strict=True))
            for place in range(len(row) - 1 - count, len(row) - 1)
        ]
    )
