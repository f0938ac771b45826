"""Responses of token policies for tests."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from penstock.config.algorithm_sections import TokenPPOSection
from penstock.learner.algorithms.token_ppo import TokenPPO
from penstock.learner.batch import Batch, assemble, check_meaning
from penstock.policy.tokens import TokenOutputs, TokenPolicy, TokenRows
from penstock.protocol.fragment import Fragment, WeightSpan, build, check
from penstock.protocol.schema import fragment_schema
from penstock.protocol.spaces import Discrete
from tests.support.experience.experience import header_of

RUN: Final = "tokens"
PAD, EOS = 0, 1


class SmallTokenPolicy(nn.Module):
    """A recurrent network over eleven tokens; of two with other seeds, critic and reference differ too."""

    def __init__(self, seed: int = 0, vocabulary: int = 11, width: int = 16) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.body = nn.ModuleList(
                [nn.Embedding(vocabulary, width), nn.GRU(width, width, batch_first=True)]
            )
            self.head = nn.Linear(width, vocabulary)
            self.critic = nn.Linear(width, 1)
        self._reference = copy.deepcopy(nn.ModuleList([self.body, self.head])).requires_grad_(False)

    def trained(self) -> Mapping[str, nn.Parameter]:
        return dict(self.published.named_parameters())

    @property
    def published(self) -> nn.Module:
        return nn.ModuleList([self.body, self.head])

    def outputs(self, rows: TokenRows) -> TokenOutputs:
        features = self._features(self.body, rows)
        log_probs = self.head(features).log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return TokenOutputs(_of(log_probs, rows.action), entropy, self.critic(features).squeeze(-1))

    @torch.no_grad()
    def reference_log_prob(self, rows: TokenRows) -> Tensor:
        body, head = self._reference
        return _of(head(self._features(body, rows)).log_softmax(-1), rows.action)

    def _features(self, body: nn.Module, rows: TokenRows) -> Tensor:
        embedding, core = body.children()
        features: Tensor = core(embedding(rows.tokens))[0]
        return features.flatten(0, 1)[rows.place]


def _of(log_probs: Tensor, action: Tensor) -> Tensor:
    return log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True, slots=True)
class Response:
    """A sampled response to a prompt.

    prompt, tokens: ids.
    log_prob: of each of `tokens`, when it was sampled.
    finished: not cut short.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    log_prob: tuple[float, ...]
    score: float
    finished: bool


@torch.no_grad()
def next_log_probs(policy: TokenPolicy, tokens: Tensor, vocabulary: int) -> Tensor:
    """Of every token behind rows without padding: [B, L] → [B, V]."""
    count, length = tokens.shape
    place = (torch.arange(count) * length + length - 1).repeat_interleave(vocabulary)
    every = torch.arange(vocabulary).repeat(count)
    rows = TokenRows(tokens, torch.ones_like(tokens, dtype=torch.bool), place, every)
    return policy.outputs(rows).log_prob.view(count, vocabulary)


def sample(
    policy: TokenPolicy, prompt: Sequence[int], count: int, most: int, seed: int, *, vocabulary: int = 11
) -> list[Response]:
    """Responses of up to `most` tokens, one token after the other as an actor does; with score 0."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([prompt] * count)
    shares = []
    for _ in range(most):
        log_probs = next_log_probs(policy, tokens, vocabulary)
        drawn = torch.multinomial(log_probs.exp(), 1, generator=generator)
        shares.append(log_probs.gather(1, drawn))
        tokens = torch.cat([tokens, drawn], 1)
    rows = zip(tokens[:, len(prompt) :].tolist(), torch.cat(shares, 1).tolist(), strict=True)
    return [_ended(tuple(prompt), row, log_prob) for row, log_prob in rows]


def _ended(prompt: tuple[int, ...], tokens: list[int], log_prob: list[float]) -> Response:
    end = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
    return Response(prompt, tuple(tokens[:end]), tuple(log_prob[:end]), 0.0, EOS in tokens)


def fragment(
    responses: Sequence[Response], *, vocabulary: int = 11, update: int = 0, steps: int = 0, pad: int = PAD
) -> Fragment:
    """One fragment of these responses, checked as broker and learner do.

    steps: T; 0: as many as are needed.
    """
    schema = fragment_schema(Discrete(vocabulary), Discrete(vocabulary))
    count, most = len(responses), max(len(one.prompt) + len(one.tokens) - 1 for one in responses)
    steps = steps or most
    arrays: dict[str, np.ndarray] = {
        "observation": np.full((steps + 1, count), pad, np.int64),
        "action": np.full((steps, count), pad, np.int64),
        **{name: np.zeros((steps, count), np.float32) for name in ("reward", "log_prob")},
        **{name: np.zeros((steps, count), bool) for name in ("valid", "terminated", "truncated")},
    }
    for column, one in enumerate(responses):
        _write(arrays, column, one)
    slot, step = (arrays["terminated"] | arrays["truncated"]).T.nonzero()
    arrays["final/slot"], arrays["final/step"] = slot.astype(np.int32), step.astype(np.int32)
    arrays["final/observation"] = arrays["observation"][step + 1, slot]
    span = WeightSpan(0, 0, steps, update + 1, update)
    header = replace(header_of(1, 1, steps, count, span), run=RUN, schema_id=schema.schema_id)
    made = build(header, arrays)
    check(made, schema, RUN)
    check_meaning(made.header, made.arrays())
    return made


def _write(arrays: dict[str, np.ndarray], column: int, one: Response) -> None:
    whole, first = (*one.prompt, *one.tokens), len(one.prompt) - 1
    last = len(whole) - 2
    arrays["observation"][: len(whole), column] = whole
    arrays["action"][: len(whole) - 1, column] = whole[1:]
    arrays["valid"][first : last + 1, column] = True
    arrays["log_prob"][first : last + 1, column] = one.log_prob
    arrays["reward"][last, column] = one.score
    arrays["terminated" if one.finished else "truncated"][last, column] = True


def batch_of(*fragments: Fragment) -> Batch:
    return assemble([(one.header, one.arrays()) for one in fragments], torch.device("cpu"))


SMOOTH: dict[str, Any] = {"adam_epsilon": 1.0, "learning_rate": 1.0, "critic_learning_rate": 1.0}
"""Settings under which Adam's first steps follow the size of the gradient.

With a small epsilon these steps have one size, even where rounding decides the sign of a gradient next to 0.
"""
PROMPTS = ((2, 3), (2, 4, 5), (2, 3), (2, 6, 7, 8))


def make(policy: SmallTokenPolicy | None = None, **section: Any) -> TokenPPO:
    """One gradient step on everything, unless it is said otherwise."""
    usual: dict[str, Any] = {
        "epochs": 1,
        "minibatches": 1,
        "learning_rate": 1e-2,
        "critic_learning_rate": 1e-2,
    }
    return TokenPPO(policy or SmallTokenPolicy(), TokenPPOSection(**(usual | section)), seed=0)


def responses(policy: SmallTokenPolicy | None = None, count: int = 3, seed: int = 0) -> list[Response]:
    made = [
        one
        for index, prompt in enumerate(PROMPTS)
        for one in sample(policy or SmallTokenPolicy(), prompt, count, 6, seed + index)
    ]
    return [replace(one, score=one.tokens.count(9) / len(one.tokens) - 0.25) for one in made]


def stale(seed: int = 0) -> Batch:
    return batch_of(fragment(responses(SmallTokenPolicy(7), seed=seed)))


def flat(algorithm: TokenPPO) -> Tensor:
    everything = (*algorithm.policy.trained().values(), *algorithm.policy.critic.parameters())
    return torch.cat([one.detach().flatten() for one in everything])


def move(policy: SmallTokenPolicy) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.trained().values():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
