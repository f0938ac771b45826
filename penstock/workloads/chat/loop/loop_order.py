"""How the loop goes: how many labels, which rewards, how a canary is tried."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Final

from penstock.config.configuration_error import ConfigurationError
from penstock.config.settings import load, parse_assignment
from penstock.workloads.chat.loop.ensemble import member_heads, member_weights
from penstock.workloads.chat.loop.round_files import KNOWN
from penstock.workloads.chat.ratings.rating_rules import RatingRules
from penstock.workloads.language.heads.head import PREFERRED, parse_heads, parse_weights, reward_weights
from penstock.workloads.language.reward.training_section import training_settings

_ROUND: Final = {"workload": "rlhf", "environment": {"id": "chat"}, "algorithm": {"name": "token_ppo"}}
"""What the training of every round is, as far as settings are checked by it."""
_OWN: Final = (
    "workload",
    "run",
    "environment.id",
    "environment.kwargs.model",
    "environment.kwargs.prompts",
    "environment.kwargs.reward",
    "learner.feed_from",
    "policy.kwargs.begin_with",
    "registry",
    "serving.policy",
)
"""Settings that are the loop's: with another one a round would learn from something else, or for nobody."""
NOTHING: Final[Mapping[str, float]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOrder:
    """How the loop goes.

    labels: new ones that count, by which a round begins. share: of the people who get a canary. patience: so
    many ratings may come before a canary that nothing is proved of is withdrawn. least_auc: of the reward
    model, on ratings that were held out; 0: any. heads: NAME=SCALE of what people rate; empty: what the page
    asks for, as far as it was rated. weights: NAME=NUMBER of heads in the reward. reward: KEY=VALUE of
    `penstock reward train --set`. train: SECTION.KEY=VALUE of `penstock train --set`.

    Raises ConfigurationError that names a number which does not fit.
    """

    labels: int = 200
    share: float = 0.5
    patience: int = 2000
    least_auc: float = 0.55
    heads: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    reward: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    rules: RatingRules = field(default_factory=RatingRules)

    def __post_init__(self) -> None:
        for name in ("labels", "patience"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"--{name} {getattr(self, name)}: must be at least 1")
        if not 0 < self.share <= 0.8:
            raise ConfigurationError(
                f"--share {self.share:g}: must be above 0 and at most 0.8: a canary is judged beside others"
            )
        if not 0 <= self.least_auc <= 1:
            raise ConfigurationError(f"--least-auc {self.least_auc:g}: must lie between 0 and 1")
        heads = parse_heads(self.heads or [f"{name}={scale}" for name, scale in KNOWN.items()])
        known = [*(one.name for one in heads), PREFERRED]
        weights = parse_weights(self.weights)
        for name in weights:
            if name not in known:
                raise ConfigurationError(f"--weight {name}: there is no such head; use {', '.join(known)}")
        reward_weights(heads, weights)
        try:
            training_settings(self.reward)
        except ConfigurationError as error:
            raise ConfigurationError(f"--reward {error}") from error
        try:
            load([_ROUND, *map(parse_assignment, self.train)])
        except ConfigurationError as error:
            raise ConfigurationError(f"--train {error}") from error
        for key in (one.partition("=")[0] for one in self.train):
            if any(f"{key}.".startswith(f"{own}.") or own.startswith(f"{key}.") for own in _OWN):
                raise ConfigurationError(f"--train {key}: the loop sets it in every round; leave it out")

    def reward_words(self, heads: Sequence[str], changed: Mapping[str, float]) -> list[str]:
        """Return the options of `penstock reward train` for a model that has these heads, NAME=SCALE.

        changed: weights by head that people have changed since, which count above those of the order.
        """
        members = member_heads(heads)
        weights = (*self.weights_of(heads, changed), *member_weights(members))
        return [
            *(f"--head={one}" for one in (*heads, *members)),
            *(f"--weight={one}" for one in weights),
            *(f"--set={one}" for one in self.reward),
        ]

    def weights_of(self, heads: Sequence[str], changed: Mapping[str, float] = NOTHING) -> list[str]:
        """Return the weights for a model that has these heads, NAME=SCALE: of others there is none yet.

        changed: as for `reward_words`.
        """
        there = {one.partition("=")[0] for one in heads} | {PREFERRED}
        said = (*self.weights, *(f"{name}={one!r}" for name, one in changed.items()))
        return [one for one in said if one.partition("=")[0] in there]

    def shown(self) -> dict[str, Any]:
        """Return it as JSON values."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found
