"""`Chat-v0`: a conversation, token by token, as an environment of Gymnasium."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.chat.people import WORDS, draw_next_prompt, draw_prompt, population, read_profile
from penstock.workloads.chat.tasks import PEOPLE, REWARDS, taste_of
from penstock.workloads.language.conversation import ChatEncoder
from penstock.workloads.language.pretraining import tiny_models
from penstock.workloads.language.prompt import Message
from penstock.workloads.language.reward.reward_model import open_source
from penstock.workloads.language.reward.reward_source import Sample
from penstock.workloads.language.tokenizer import Tokenizer, end_ids, load_tokenizer

Observation = NDArray[np.int64]


class ChatEnvironment(gymnasium.Env[Observation, np.int64]):
    """An episode is a conversation with a simulated person; an action is one token of the answer.

    An answer ends at the end token or after `turn_tokens` tokens. Its last step has the reward, and the next
    observation holds the person's next message; other steps have reward 0. After `turns` answers the episode
    terminates; it is truncated where the next message does not fit.

    Observation: the token ids of the conversation so far, int64 [max_length], with the pad token behind them.
    `info` has the `messages`, and after an answer its text as `response`.

    Args:
        model: folder or hub name of a model, whose tokenizer is used; None: one of the people's words.
        tokenizer: of transformers, with a chat template, an end and a pad token; instead of the model's.
        max_length: most tokens of a conversation.
        turns: answers of an episode.
        turn_tokens: most tokens of an answer.
        taste: of the people, `usual` or `changed`.
        reward: `chance`: the chance that a random person likes the answer; `thumb`: whether this person likes
            it; or a source of rewards: a reward model's folder, `grpc://HOST:PORT`, `http(s)://…`,
            `module:function`.
        render_mode: `ansi`: `render` returns the conversation as text.

    Raises:
        ConfigurationError: an invalid argument, which it names.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(
        self,
        model: str | None = None,
        tokenizer: Tokenizer = None,
        max_length: int = 512,
        *,
        turns: int = 3,
        turn_tokens: int = 12,
        taste: str = "usual",
        reward: str = "chance",
        render_mode: str | None = None,
    ) -> None:
        for name, value in (("max_length", max_length), ("turns", turns), ("turn_tokens", turn_tokens)):
            if value < 1:
                raise ConfigurationError(f"environment.kwargs.{name}={value}: must be at least 1")
        self._tokenizer = tokenizer or (people_tokenizer() if model is None else load_tokenizer(model))
        try:
            self._encoder = ChatEncoder(self._tokenizer)
        except ValueError as error:
            raise ConfigurationError(f"environment.kwargs.tokenizer: {error}") from error
        self._ends = end_ids(self._tokenizer)
        self._max_length, self._turns, self._turn_tokens = max_length, turns, turn_tokens
        self._taste = taste_of(taste)
        self._people = population(PEOPLE, seed=0, taste=self._taste)
        self._reward = reward
        self._source = None if reward in REWARDS else open_source(reward)
        self.render_mode = render_mode
        self.observation_space = spaces.Box(0, len(self._tokenizer) - 1, (max_length,), np.int64)
        self.action_space = spaces.Discrete(len(self._tokenizer))
        self._messages: list[Message] = []
        self._ids: list[int] = []
        self._answer: list[int] = []
        self._person = self._people.people[0]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self._person = self._people.somebody(self.np_random)
        self._messages = [Message("user", draw_prompt(self.np_random))]
        self._ids, self._answer = self._encoder.begin(self._messages), []
        if len(self._ids) >= self._max_length:
            raise ConfigurationError(
                f"environment.kwargs.max_length={self._max_length}: the first message has {len(self._ids)} "
                "tokens, and an answer needs one more"
            )
        return self._observe(), self._info()

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """action: the next token of the answer."""
        token = int(action)
        self._ids.append(token)
        self._answer.append(token)
        is_end = token in self._ends
        is_full = len(self._ids) == self._max_length
        if not (is_end or is_full or len(self._answer) == self._turn_tokens):
            return self._observe(), 0.0, False, False, self._info()
        before = tuple(self._messages)
        words = self._answer[:-1] if is_end else self._answer
        response = self._tokenizer.decode(words, skip_special_tokens=True).strip()
        self._messages.append(Message("assistant", response))
        self._answer = []
        reward = self._value(before, response)
        terminated = sum(one.role == "assistant" for one in self._messages) == self._turns
        truncated = not terminated and (is_full or not self._ask(before, token))
        return self._observe(), reward, terminated, truncated, {**self._info(), "response": response}

    def render(self) -> str | None:
        if self.render_mode != "ansi":
            return None
        lines = [f"{one.role}: {one.content}" for one in self._messages]
        if self._answer:
            lines.append(f"assistant: {self._tokenizer.decode(self._answer, skip_special_tokens=True)} …")
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        if self._source is not None:
            self._source.close()

    def _ask(self, before: tuple[Message, ...], last: int) -> bool:
        """Append the person's next message; False where it does not fit."""
        new = Message("user", draw_next_prompt(self.np_random, before[-1].content))
        follow = self._encoder.follow(before, last, [new], said=self._messages[-1].content)
        if len(self._ids) + len(follow) >= self._max_length:
            return False
        self._ids += follow
        self._messages.append(new)
        return True

    def _value(self, before: tuple[Message, ...], response: str) -> float:
        if self._source is not None:
            prompt = before if len(before) > 1 else before[0].content
            [value] = self._source.score([Sample(prompt=prompt, response=response)]).values
            return 0.0 if value is None else value
        message = before[-1].content
        if self._reward == "thumb":
            return float(self._people.thumb(self.np_random, self._person, message, response))
        features = np.array([read_profile(message, response)], np.float64)
        return float(self._taste.thumb_chance(features)[0])

    def _observe(self) -> Observation:
        observation = np.full(self._max_length, self._tokenizer.pad_token_id, np.int64)
        observation[: len(self._ids)] = self._ids
        return observation

    def _info(self) -> dict[str, Any]:
        return {"messages": [{"role": one.role, "content": one.content} for one in self._messages]}


def people_tokenizer() -> Tokenizer:
    tokenizer = tiny_models.build_tokenizer(WORDS)
    tokenizer.chat_template = tiny_models.CHAT_TEMPLATE
    return tokenizer
