"""What a task embeds and rewards with, as its settings say; the API over HTTP reads them alike."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.prompts.checked_reward import CheckedReward
from penstock.workloads.prompts.embeddings import Embedder, HashingEmbedder
from penstock.workloads.prompts.http_embeddings import HttpEmbedder
from penstock.workloads.prompts.prompt_reward import PromptReward, QualityReward
from penstock.workloads.prompts.prompt_sources import PromptSource
from penstock.workloads.prompts.source_reward import source_reward

RATINGS: Final = "ratings"
"""The reward that people give, over HTTP alone."""
_EMBEDDINGS: Final = ("hashing", "http")
_REWARDS: Final = ("quality", RATINGS)
_MOST_EVERY: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskParts:
    """Parts of a task. reward: None where people's ratings are the reward. source: of its prompts."""

    source: PromptSource
    embedder: Embedder
    reward: PromptReward | None

    @property
    def needs_people(self) -> bool:
        """Return whether somebody has to be there who rates or checks."""
        return self.reward is None or isinstance(self.reward, CheckedReward)

    def close(self) -> None:
        """Let go of a source of rewards."""
        close = getattr(self.reward, "close", None)
        if close is not None:
            close()


def parts_of(task: Mapping[str, Any]) -> TaskParts:
    """Return the parts of `environment.kwargs`; raises ConfigurationError that names the argument."""
    source = PromptSource(task.get("prompts", "builtin"), task.get("split", "train"))
    return TaskParts(source=source, embedder=_embedder(task), reward=_reward(task))


def _embedder(task: Mapping[str, Any]) -> Embedder:
    name = task.get("embedding", "hashing")
    if name not in _EMBEDDINGS:
        raise ConfigurationError(
            f"environment.kwargs.embedding={name!r}: must be one of {', '.join(_EMBEDDINGS)}"
        )
    if name == "hashing":
        return HashingEmbedder()
    return HttpEmbedder(
        task.get("embedding_url", ""),
        model=task.get("embedding_model", ""),
        key_file=task.get("embedding_key_file", ""),
    )


def make_reward(name: str) -> PromptReward | None:
    """Return the reward of a name, None for people's ratings; raises ConfigurationError for another one."""
    if name not in _REWARDS:
        raise ConfigurationError(f"environment.kwargs.reward={name!r}: must be one of {', '.join(_REWARDS)}")
    return None if name == RATINGS else QualityReward()


def _reward(task: Mapping[str, Any]) -> PromptReward | None:
    place, every = task.get("reward_source", ""), task.get("human_check_every", 0)
    if not isinstance(every, int) or isinstance(every, bool) or not 0 <= every <= _MOST_EVERY:
        raise ConfigurationError(
            f"environment.kwargs.human_check_every={every!r}: must be a number from 0 to {_MOST_EVERY}"
        )
    name = task.get("reward", "quality")
    if not place:
        if every:
            raise ConfigurationError(
                "environment.kwargs.human_check_every: people check a reward_source; name one"
            )
        return make_reward(name)
    if name == RATINGS:
        raise ConfigurationError("environment.kwargs.reward='ratings': leave out reward_source, or this")
    found = source_reward(place)
    return CheckedReward(found, every=every) if every else found
