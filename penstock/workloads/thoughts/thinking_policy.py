"""The policy of a run of thoughts: a language model, and where it is asked for a head that mixes its answers.

The head is that of Zelikman et al. 2024 (Quiet-STaR): what follows a thought is weighed with what would have
been said without it, so that a model that has not yet learned to use its thoughts is not hurt by them.

    p(y | x, z) = a · p(y | x, z alone) + (1 − a) · p(y | x),   a = σ(head(state behind z, state without z))

The paper mixes log-probabilities; probabilities are mixed here, which leaves a distribution. The answer
without a thought enters without gradient: its own loss alone trains it, so that no weight can make it worse.
"""

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from penstock.config.settings import ConfigurationError, PolicySection
from penstock.protocol.spaces import Space
from penstock.workloads.language.policy.language_policy import LanguagePolicy
from penstock.workloads.language.policy.language_policy import build as build_language_policy

MIXING: Final = "mixing"
"""Key of `policy.kwargs`: width of the head; 0 or absent: answers behind a thought come from it alone."""
_HEAD: Final = "mixing_head"


class MixingHead(nn.Module):
    """States behind a thought and without it, [n, H] both, to the log-odds of the first, [n].

    It begins with even odds. width: of the layer between.
    """

    def __init__(self, states: int, *, width: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.hidden, self.last = nn.Linear(2 * states, width), nn.Linear(width, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, behind: Tensor, without: Tensor) -> Tensor:
        """Return the log-odds."""
        odds: Tensor = self.last(torch.relu(self.hidden(torch.cat([behind, without], -1))))
        return odds.squeeze(-1)


def build(
    observation: Space, action: Space, section: PolicySection, seed: int, *, has_reference: bool = False
) -> LanguagePolicy:
    """From the `policy` section of a run; raises ConfigurationError."""
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
    """Return the head of a policy's network; None where it has none."""
    head: MixingHead | None = getattr(network, _HEAD, None)
    return head


def mixed(odds: Tensor, behind: Tensor, without: Tensor) -> Tensor:
    """Return the log-probabilities of both answers mixed, [n, V].

    odds: log-odds of the first, [n]. behind, without: log-probabilities, [n, V].
    """
    share, rest = logsigmoid(odds)[:, None], logsigmoid(-odds)[:, None]
    return torch.logaddexp(behind + share, without.detach() + rest)
