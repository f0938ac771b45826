"""Rewards of an external source, and a sample of them that people check.

every n-th score             ─► waits for a person: which of the two texts is better?
too many checks wait         ─► no further scores until a person answers some
too few answers agree        ─► no further scores: training on this source stops
"""

import secrets
from collections import OrderedDict, deque
from dataclasses import dataclass
from threading import Lock
from typing import Final, Literal

from penstock.config.configuration_error import ConfigurationError, how_to_install
from penstock.workloads.language.reward.reward_source import BadReward, CallableRewards, RewardSource, Sample
from penstock.workloads.prompts.categories import token_cost

# ---- Rewards from elsewhere: a function, an HTTP endpoint, or the reward service.

_REMEMBERED: Final = 1024
"""Scores that are stored: a step begins with the text that the previous one ended with."""


class SourceReward:
    """A `PromptReward`: the difference of a source's scores; threads take turns."""

    def __init__(self, source: RewardSource) -> None:
        self._source = source
        self._scores: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._turn = Lock()

    def of(self, start: str, before: str, after: str) -> float:
        """Return the reward of a step; raises RewardError without a score."""
        if before == after:
            return 0.0
        with self._turn:
            scored = self._score(start, before, after)
        return scored[1] - scored[0] - token_cost(before, after)

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
        self._source.close()


def source_reward(place: str) -> SourceReward:
    """Return the reward by a source.

    place: `module:function`, `http(s)://…`, `grpc://HOST:PORT` or `unix:/path`, of this machine's own
    configuration, since a function is imported. Raises ConfigurationError for any other place.
    """
    if not place.startswith(("http://", "https://", "grpc://", "unix:")):
        if ":" in place and "/" not in place:
            return SourceReward(CallableRewards(place))
        raise ConfigurationError(
            f"environment.kwargs.reward_source={place!r}: name module:function, http(s)://…, "
            "grpc://HOST:PORT or unix:/path"
        )
    try:
        from penstock.workloads.language.reward import reward_client  # noqa: PLC0415 - of an extra

        if place.startswith("http"):
            return SourceReward(reward_client.HttpRewards(place))
        return SourceReward(reward_client.RewardClient(place.removeprefix("grpc://")))
    except ImportError as error:
        raise ConfigurationError(
            f"environment.kwargs.reward_source={place!r}: needs httpx2; {how_to_install('rlhf')}"
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"environment.kwargs.reward_source={place!r}: {error}") from error


MOST_WAITING: Final = 8
"""Waiting checks from which on no score is given."""
JUDGED_BY: Final = 10
"""Newest checks over which the agreeing share is taken; with fewer there is no limit."""
LEAST_AGREEING: Final = 0.5

Better = Literal["before", "after"]


class NeedsPerson(Exception):
    """Reports that a person has to check scores first; the message says how."""


class NoSuchCheck(Exception):
    """Reports a check that does not wait for an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A step that a person checks. reward: by the source."""

    id: str
    start: str
    before: str
    after: str
    reward: float

    def agrees(self, better: Better) -> bool:
        return (self.reward > 0) == (better == "after")


class CheckedReward:
    """A `PromptReward`, safe for threads, whose every n-th score is checked by a person."""

    def __init__(self, source: SourceReward, *, every: int) -> None:
        self._source, self.every = source, every
        self._scores = self._count = self._agreed = 0
        self._last: deque[bool] = deque(maxlen=JUDGED_BY)
        self._waiting: OrderedDict[str, Check] = OrderedDict()
        self._turn = Lock()

    def of(self, start: str, before: str, after: str) -> float:
        """Return the reward of a step; raises NeedsPerson where a person has to check scores first."""
        if before == after:
            return 0.0
        with self._turn:
            self._check_people()
        reward = self._source.of(start, before, after)
        with self._turn:
            self._scores += 1
            if self._scores % self.every == 0:
                made = Check(id=secrets.token_hex(8), start=start, before=before, after=after, reward=reward)
                self._waiting[made.id] = made
        return reward

    def waiting(self) -> tuple[Check, ...]:
        with self._turn:
            return tuple(self._waiting.values())

    def find(self, id_: str) -> Check:
        found = self._waiting.get(id_)
        if found is None:
            raise NoSuchCheck("this check does not wait for an answer: GET /checks lists those that do")
        return found

    def answer(self, id_: str, better: Better) -> None:
        with self._turn:
            agrees = self.find(id_).agrees(better)
            del self._waiting[id_]
            self._count, self._agreed = self._count + 1, self._agreed + agrees
            self._last.append(agrees)

    def checked(self) -> tuple[int, int]:
        """Return the number of answered checks, and of those that agreed with the source."""
        with self._turn:
            return self._count, self._agreed

    def close(self) -> None:
        self._source.close()

    def _check_people(self) -> None:
        if len(self._waiting) >= MOST_WAITING:
            raise NeedsPerson(
                f"{len(self._waiting)} of the source's scores wait for a person: check them on the page "
                "/prompts, or over POST /checks"
            )
        if len(self._last) == JUDGED_BY and sum(self._last) < LEAST_AGREEING * JUDGED_BY:
            raise NeedsPerson(
                f"people agree with {sum(self._last)} of the last {JUDGED_BY} scores that they checked: take "
                "another reward_source, and start again"
            )
