"""Rewards from elsewhere: a function, an HTTP endpoint, or the reward service.

The source scores texts, as it scores responses of a language model: it is shown the prompt that the episode
began with and the text as it is now. A step earns the difference of two scores, less the price of tokens.
"""

from collections import OrderedDict
from threading import Lock
from typing import Final

from penstock.config.configuration_error import ConfigurationError
from penstock.config.extras import how_to_install
from penstock.workloads.language.reward.callable_rewards import CallableRewards
from penstock.workloads.language.reward.reward_client import RewardClient
from penstock.workloads.language.reward.reward_source import BadReward, RewardSource, Sample
from penstock.workloads.prompts.features import token_count
from penstock.workloads.prompts.prompt_reward import TOKEN_PRICE

_REMEMBERED: Final = 1024
"""Scores that are kept: the text before a step is the one after the step before."""


class SourceReward:
    """A `PromptReward` of scores that a source gives; used by any number of threads, which take turns."""

    def __init__(self, source: RewardSource, *, token_price: float = TOKEN_PRICE) -> None:
        """token_price: reward that a token takes away."""
        self._source, self._token_price = source, token_price
        self._scores: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._turn = Lock()

    def of(self, start: str, before: str, after: str) -> float:
        """Return the reward of a step; 0 where the text stays, without asking.

        Raises RewardError where the source gives no score.
        """
        if before == after:
            return 0.0
        with self._turn:
            scored = self._score(start, before, after)
        return scored[1] - scored[0] - self._token_price * (token_count(after) - token_count(before))

    def _score(self, start: str, *texts: str) -> list[float]:
        missing = [text for text in texts if (start, text) not in self._scores]
        if missing:
            rewards = self._source.score([Sample(prompt=start, response=text) for text in missing])
            for text, value in zip(missing, rewards.values, strict=True):
                if value is None:
                    raise BadReward(f"{rewards.by.name}: gave no score for a text; a step needs one for each")
                self._scores[start, text] = value
        scored = [self._scores[start, text] for text in texts]
        while len(self._scores) > _REMEMBERED:
            self._scores.popitem(last=False)
        return scored

    def close(self) -> None:
        """Let go of the source's connections."""
        self._source.close()


def source_reward(place: str) -> SourceReward:
    """Return the reward of a place.

    place: `module:function`, `http(s)://…`, `grpc://HOST:PORT` or `unix:/path`, of this machine's own
    configuration: a function is imported. Raises ConfigurationError for one that names no source.
    """
    return SourceReward(_open(place))


def _open(place: str) -> RewardSource:
    if place.startswith(("http://", "https://")):
        try:
            from penstock.workloads.language.reward.http_rewards import HttpRewards  # noqa: PLC0415 - of an extra
        except ImportError as error:
            raise ConfigurationError(
                f"environment.kwargs.reward_source={place!r}: needs httpx2; {how_to_install('rlhf')}"
            ) from error
        return HttpRewards(place)
    if place.startswith(("grpc://", "unix:")):
        try:
            return RewardClient(place.removeprefix("grpc://"))
        except ValueError as error:
            raise ConfigurationError(f"environment.kwargs.reward_source={place!r}: {error}") from error
    if ":" in place and "/" not in place:
        return CallableRewards(place)
    raise ConfigurationError(
        f"environment.kwargs.reward_source={place!r}: name module:function, http(s)://…, grpc://HOST:PORT or "
        "unix:/path"
    )
