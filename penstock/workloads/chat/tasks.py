"""The registered environments, and `Candidates-v0`: a choice of one of eight responses."""

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.chat.people import (
    CHANGED,
    USUAL,
    Taste,
    draw_prompt,
    draw_response,
    population,
    read_profile,
)

gymnasium.register("Chat-v0", "penstock.workloads.chat.chat_environment:ChatEnvironment")
gymnasium.register("Candidates-v0", f"{__name__}:CandidateTask")

TASTES: Final[dict[str, Taste]] = {"usual": USUAL, "changed": CHANGED}
"""Tastes by the names of the argument `taste`."""
REWARDS: Final = ("chance", "thumb")
PEOPLE: Final = 60

Observation = NDArray[np.float32]


def taste_of(name: str) -> Taste:
    if name not in TASTES:
        raise ConfigurationError(f"environment.kwargs.taste={name!r}: must be one of {', '.join(TASTES)}")
    return TASTES[name]


# ---- Prompts with eight candidate responses each.

Array = NDArray[np.float64]

CANDIDATES: Final = 8
PROMPTS: Final = 16
_SEED: Final = 28


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and its candidates. features: their attributes, float64 [8, 6]."""

    prompt: str
    candidates: tuple[str, ...]
    features: Array


@cache
def questions() -> tuple[Question, ...]:
    """Return the prompts with candidates of the reference policy, the same in every process."""
    rng = np.random.default_rng(_SEED)
    return tuple(_question(rng) for _ in range(PROMPTS))


def liked(taste: Taste) -> Array:
    """Return the chance that a random person likes each candidate, float64 [PROMPTS, CANDIDATES]."""
    return np.array([taste.thumb_chance(one.features) for one in questions()])


def _question(rng: np.random.Generator) -> Question:
    prompt = draw_prompt(rng)
    candidates: list[str] = []
    while len(candidates) < CANDIDATES:
        response = draw_response(rng, prompt)
        if response not in candidates:
            candidates.append(response)
    features = np.array([read_profile(prompt, one) for one in candidates], np.float64)
    return Question(prompt, tuple(candidates), features)


class CandidateTask(gymnasium.Env[Observation, np.int64]):
    """An episode is one prompt, and its one action chooses a response.

    Observation: the six attributes of each candidate, float32 [48]. `info` has the `prompt`, and after the
    step the `response`.

    Args:
        taste: of the people, `usual` or `changed`.
        changes_after: episodes of this environment after which people have the other taste; 0: never.
        reward: `chance`: the chance that a random person likes the response; or `thumb`: whether a person,
            drawn in each step, likes it, 1 or 0.

    Raises:
        ConfigurationError: an invalid argument, which it names.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(self, taste: str = "usual", reward: str = "chance", changes_after: int = 0) -> None:
        if reward not in REWARDS:
            raise ConfigurationError(
                f"environment.kwargs.reward={reward!r}: must be one of {', '.join(REWARDS)}"
            )
        if changes_after < 0:
            raise ConfigurationError(f"environment.kwargs.changes_after={changes_after}: must be at least 0")
        self._taste, self._changes_after, self._episodes = taste, changes_after, 0
        self._draws = reward == "thumb"
        self._like(taste_of(taste))
        self._seen = np.array([one.features.reshape(-1) for one in questions()], np.float32)
        self.observation_space = spaces.Box(0.0, 1.0, self._seen.shape[1:], np.float32)
        self.action_space = spaces.Discrete(CANDIDATES)
        self._index = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self._episodes += 1
        if self._changes_after and self._episodes == self._changes_after + 1:
            self._like(next(one for name, one in TASTES.items() if name != self._taste))
        self._index = int(self.np_random.integers(PROMPTS))
        return self._seen[self._index].copy(), {"prompt": questions()[self._index].prompt}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        question, chosen = questions()[self._index], int(action)
        response = question.candidates[chosen]
        reward = float(self._liked[self._index, chosen])
        if self._draws:
            somebody = self._people.somebody(self.np_random)
            reward = float(self._people.thumb(self.np_random, somebody, question.prompt, response))
        info = {"prompt": question.prompt, "response": response}
        return self._seen[self._index].copy(), reward, True, False, info

    def _like(self, taste: Taste) -> None:
        self._liked, self._people = liked(taste), population(PEOPLE, seed=0, taste=taste)
