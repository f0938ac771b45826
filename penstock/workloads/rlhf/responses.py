"""Generation in a run of language models: prompts, responses, rewards and fragments.

The seed and a prompt's text alone determine whether it is held out, as for feedback. A fragment is a batch of
responses under one version of the weights. When a drain ends a batch early, only complete responses are
experience. A source of rewards that does not answer is called again until the actor drains; meanwhile the
responses wait, and health turns red after too long. A permanent error of the source ends the actor.
"""

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from penstock.config.credentials import credentials, http_headers
from penstock.config.settings import ConfigurationError, Settings
from penstock.protocol.limits import MAX_ATTRIBUTES_BYTES
from penstock.protocol.messages import Publication
from penstock.protocol.specification import RunSpecification
from penstock.runtime.compute_threads import ComputePool
from penstock.runtime.exit import Fatal
from penstock.runtime.health import Health
from penstock.workloads.language.cached_generation import Generated, make_backend
from penstock.workloads.language.conversation import Column, ColumnGenerator, SampledTurn
from penstock.workloads.language.feedback import BadRows, made_of, place_of, present, rows_of
from penstock.workloads.language.prompt import Prompt, identity, parse_prompt
from penstock.workloads.language.reward.reward_model import open_source
from penstock.workloads.language.reward.reward_source import (
    BadReward,
    BadSample,
    Rewards,
    RewardSource,
    Sample,
    ScoredBy,
    Unavailable,
)
from penstock.workloads.language.settings import quieten
from penstock.workloads.language.tokenizer import (
    Encoder,
    Tokenizer,
    end_ids,
    load_tokenizer,
    without_end,
)
from penstock.workloads.plugin import acting
from penstock.workloads.plugin.acting import GENERATING, Played, Playing, Run
from penstock.workloads.rlhf.environment import language

if TYPE_CHECKING:
    from penstock.workloads.language.serving.text_server import TextServer
    from penstock.workloads.plugin.serving import RunFollower, Source

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt and its token ids. index: its place among all distinct prompts of both sides."""

    index: int
    prompt: Prompt
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Distinct prompts in the order of the source."""

    train: tuple[PromptTokens, ...]
    held_out: tuple[PromptTokens, ...]
    bad: BadRows


def read_prompts(place: str, encoder: Encoder, *, held_out: float, seed: int) -> Prompts:
    """Return the distinct prompts of a place.

    encoder: its `max_tokens` is the limit of a prompt. held_out: share of the prompts.

    Raises ConfigurationError for a place that cannot be read, or where a side is left without a prompt.
    """

    def make(_where: str, row: Any) -> tuple[Prompt, tuple[int, ...]]:
        prompt = parse_prompt(present(row, "prompt"))
        ids = tuple(encoder.prompt_ids(prompt))
        if not 1 <= len(ids) <= encoder.max_tokens:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, 1 to {encoder.max_tokens} are allowed: "
                "actor.unroll_length + 1 holds the prompt and the response"
            )
        return prompt, ids

    bad, found = BadRows(), dict[str, PromptTokens]()
    for prompt, ids in made_of(rows_of(place), bad, make):
        found.setdefault(identity(prompt), PromptTokens(len(found), prompt, ids))
    for line in bad.lines():
        log.warning("bad row: %s", line)
    order = sorted(found, key=lambda name: place_of(name, seed))
    held = set(order[: max(1, round(held_out * len(order)))] if held_out else ())
    train, asked_later = (
        tuple(one for name, one in found.items() if (name in held) is side) for side in (False, True)
    )
    if not train:
        lines = "\n".join(bad.lines())
        raise ConfigurationError(
            f"environment.kwargs.prompts={place}: {len(found)} prompts can be used and "
            f"{len(asked_later)} of them are held out: none is left to train on\n{lines}".rstrip()
        )
    return Prompts(train, asked_later, bad)


def in_random_order(prompts: Sequence[PromptTokens], seed: int) -> Iterator[PromptTokens]:
    """Yield all prompts in a random order, again and again in new orders; equal for equal seeds."""
    random = np.random.default_rng(seed)
    while True:
        for index in random.permutation(len(prompts)):
            yield prompts[index]


# ---- A batch of responses as one fragment: each response is an episode and a column of tokens.


def columns_of(
    asked: Sequence[PromptTokens],
    generated: Generated,
    rewards: Sequence[float | None],
    by: ScoredBy | None,
    weights: Publication,
) -> tuple[list[Column], bytes]:
    """Return a column for each response, and the attributes of their fragment.

    asked: the prompt of each response. rewards: of each; None where it has none. by: the model that gave
    them; None where there are none. weights: that generated the responses.
    """
    columns = [
        _column(one.ids, generated, row, reward, weights)
        for row, (one, reward) in enumerate(zip(asked, rewards, strict=True))
    ]
    return columns, _attributes(asked, generated, rewards, by)


def _column(
    prompt: tuple[int, ...], generated: Generated, row: int, reward: float | None, weights: Publication
) -> Column:
    """Return a prompt with its response; without a reward no token of it counts as sampled."""
    ids = (*prompt, *generated.response(row))
    if reward is None or len(ids) == len(prompt):
        return Column(ids=ids)
    turn = SampledTurn(
        start=len(prompt),
        log_prob=tuple(generated.log_prob[row, : generated.lengths[row]].tolist()),
        version=weights.version,
        update=weights.update,
        reward=reward,
    )
    return Column(ids=ids, turns=(turn,), terminated=bool(generated.ended[row]))


def _attributes(
    asked: Sequence[PromptTokens], generated: Generated, rewards: Sequence[float | None], by: ScoredBy | None
) -> bytes:
    """Return JSON: how the responses ended, the reward model, and the prompts' indices where they fit."""
    ways = Counter(
        "stopped" if not whole else "eos" if ended else "length"
        for whole, ended in zip(generated.whole.tolist(), generated.ended.tolist(), strict=True)
    )
    said: dict[str, Any] = {"finish": dict(ways), "unrewarded": sum(one is None for one in rewards)}
    if by is not None:
        said["reward"] = {"name": by.name[-200:], "sha256": by.sha256}
    full = {**said, "prompts": [one.index for one in asked]}
    encoded = json.dumps(full, separators=(",", ":")).encode()
    return encoded if len(encoded) <= MAX_ATTRIBUTES_BYTES else json.dumps(said).encode()


# ---- Rewards for responses, from the source in this machine's configuration.


_TELL_S: Final = 0.1
CLIP: Final = 5.0
"""Most standard deviations of a standardised reward."""


class RewardScorer:
    """Scores responses; used by one thread."""

    def __init__(
        self, source: RewardSource, tokenizer: Tokenizer, *, reads_tokens: bool, standardise: bool
    ) -> None:
        """reads_tokens: the source uses this tokenizer. standardise: see `Language.standardise`."""
        self._source, self._tokenizer, self._ends = source, tokenizer, end_ids(tokenizer)
        self._caller = ComputePool(1, "rewards")
        self._reads_tokens, self._standardise = reads_tokens, standardise

    def score(
        self, asked: Sequence[PromptTokens], responses: Sequence[tuple[int, ...]], is_over: Callable[[], bool]
    ) -> Rewards | None:
        """Return the rewards of complete responses; None where `is_over` before an answer. Raises Fatal.

        responses: token ids, with the end token where a response ended with one.
        """
        samples = [self._sample(one, ids) for one, ids in zip(asked, responses, strict=True)]
        while True:
            call = self._caller.submit(self._source.score, samples)
            # `is_over` has to be polled.
            while not wait([call], _TELL_S).done:
                if is_over():
                    return None
            try:
                rewards = call.result()
            except Unavailable as error:
                if is_over():
                    return None
                log.warning("no rewards yet", extra={"why": str(error)})
            except (BadReward, BadSample) as error:
                raise Fatal(f"environment.kwargs.reward: {error}") from error
            else:
                return _standardised(rewards) if self._standardise else rewards

    def close(self) -> None:
        self._source.close()
        self._caller.shutdown()

    def _sample(self, asked: PromptTokens, ids: tuple[int, ...]) -> Sample:
        said = without_end(ids, self._ends)
        # A reward model has learned from rows that end with `<eos>`.
        row = ids if len(said) == len(ids) else (*said, self._tokenizer.eos_token_id)
        return Sample(
            prompt=asked.prompt,
            response=self._tokenizer.decode(said, skip_special_tokens=True),
            prompt_ids=asked.ids if self._reads_tokens else (),
            response_ids=row if self._reads_tokens else (),
            cut_short=row is ids,
        )


def _standardised(rewards: Rewards) -> Rewards:
    by = rewards.by
    if by.mean is None or not by.std:
        raise Fatal(
            f"environment.kwargs.standardise=true: {by.name} does not say the mean and std of its scores; "
            "use a reward model that `penstock rlhf reward train` saved, or false"
        )
    mean, std = by.mean, by.std
    values = [None if one is None else max(-CLIP, min(CLIP, (one - mean) / std)) for one in rewards.values]
    return Rewards(tuple(values), by)


# ---- Generators for training and for evaluation.


class Equipment:
    """Tokenizer, prompts, policy and backend of a generator; raises ConfigurationError."""

    def __init__(self, of: Run) -> None:
        quieten()
        torch.set_num_threads(of.actor.threads)
        self.section = section = language(of.environment)
        room = of.specification.unroll_length + 1 - section.response_tokens
        if room < 1:
            raise ConfigurationError(
                f"environment.kwargs.response_tokens={section.response_tokens}: actor.unroll_length="
                f"{of.specification.unroll_length} leaves no room for a prompt; raise it by the tokens of "
                "the longest prompt"
            )
        self.tokenizer, seed = load_tokenizer(section.model), of.specification.seed
        encoder = Encoder(self.tokenizer, room)
        self.prompts = read_prompts(section.prompts, encoder, held_out=section.held_out, seed=seed)
        self.local = of.make_policy(seed)
        self.backend = make_backend(self.local.policy, self.tokenizer, section.device)

    def scorer(self, text: str, settings: Settings, *, standardise: bool) -> RewardScorer:
        """Return a scorer by a source. text: the place of the source in this machine's configuration."""
        source = open_source(
            text,
            credentials=credentials(settings.security),
            headers=http_headers(settings.security),
            deadline_s=self.section.reward_timeout_s,
        )
        reads_tokens = self.section.reward_reads == "tokens"
        return RewardScorer(source, self.tokenizer, reads_tokens=reads_tokens, standardise=standardise)


def make_generator(
    specification: RunSpecification, settings: Settings, health: Health
) -> "LanguageGenerator":
    return LanguageGenerator(acting.read(specification, settings.actor), settings, health)


class LanguageGenerator(ColumnGenerator):
    """Generates batches of responses with a local policy."""

    def __init__(self, of: Run, settings: Settings, health: Health) -> None:
        self._equipment = equipment = Equipment(of)
        super().__init__(of, equipment.local, equipment.tokenizer.pad_token_id, health)
        self._section = section = equipment.section
        if self.slots % section.group:
            raise ConfigurationError(
                f"environment.kwargs.group={section.group}: environment.count={self.slots} is no "
                "multiple of it"
            )
        self._scorer = equipment.scorer(section.reward, settings, standardise=section.standardise)
        self._order: Iterator[PromptTokens] = iter(())

    def draw_from(self, seed: int, asked: int) -> None:
        self._equipment.backend.seed(seed)
        self._order = in_random_order(self._equipment.prompts.train, asked)

    def columns(self, is_over: Callable[[], bool]) -> tuple[list[Column], bytes]:
        prompts = islice(self._order, self.slots // self._section.group)
        asked = [prompt for prompt in prompts for _ in range(self._section.group)]
        generated = self._equipment.backend.generate(
            [one.ids for one in asked],
            self._section.response_tokens,
            is_over=is_over,
            on_token=partial(self.health.progress, GENERATING),
        )
        rewards, by = self._rewards(asked, generated, is_over)
        return columns_of(asked, generated, rewards, by, self.local.publication)

    def _rewards(
        self, asked: list[PromptTokens], generated: Generated, is_over: Callable[[], bool]
    ) -> tuple[list[float | None], ScoredBy | None]:
        """Return the rewards of complete responses, None for the others, and the model that gave them."""
        given: list[float | None] = [None] * len(asked)
        rows = generated.whole.nonzero()[0].tolist()
        if not rows:
            return given, None
        responses = [generated.response(row) for row in rows]
        rewards = self._scorer.score([asked[row] for row in rows], responses, is_over)
        if rewards is None:
            return given, None
        for row, value in zip(rows, rewards.values, strict=True):
            given[row] = value
        return given, rewards.by

    def close(self) -> None:
        self._scorer.close()


BATCH: Final = 64
"""Responses at once."""


def make_runner(
    specification: RunSpecification, settings: Settings, episodes: int | None = None
) -> "LanguageRunner":
    del episodes
    return LanguageRunner(acting.read(specification, settings.actor), settings)


class LanguageRunner(acting.Runner):
    """Generates a response to a held-out prompt as an episode; after the last prompt it begins again."""

    def __init__(self, of: Run, settings: Settings) -> None:
        self._equipment = equipment = Equipment(of)
        super().__init__(of, equipment.local)
        section = equipment.section
        if not equipment.prompts.held_out:
            raise ConfigurationError(
                "environment.kwargs.held_out=0: no prompt is left to evaluate on; hold a share of them out"
            )
        standardise = section.standardise and not section.true_reward
        text = section.true_reward or section.reward
        self._scorer = equipment.scorer(text, settings, standardise=standardise)

    def waves(self, episodes: int, seed: int, how: Playing) -> Iterator[list[Played] | None]:
        order = in_random_order(self._equipment.prompts.held_out, seed)
        self._equipment.backend.seed(seed)
        for first in range(0, episodes, BATCH):
            asked = list(islice(order, min(BATCH, episodes - first)))
            generated = self._equipment.backend.generate(
                [one.ids for one in asked],
                self._equipment.section.response_tokens,
                deterministic=how.deterministic,
                is_over=how.stop.is_set,
                on_token=how.on_step,
            )
            yield None if how.stop.is_set() else self._judged(asked, generated, how.stop)

    def _judged(
        self, asked: list[PromptTokens], generated: Generated, stop: threading.Event
    ) -> list[Played] | None:
        responses = [generated.response(row) for row in range(len(asked))]
        rewards = self._scorer.score(asked, responses, stop.is_set)
        if rewards is None:
            return None
        if None in rewards.values:
            raise Fatal(f"{rewards.by.name}: gave no reward for a response that is evaluated")
        rows = zip(asked, rewards.values, generated.lengths.tolist(), generated.ended.tolist(), strict=True)
        return [
            Played(episode_return=float(reward or 0.0), length=length, terminated=ended, start=one.index)
            for one, reward, length, ended in rows
        ]

    def close(self) -> None:
        self._scorer.close()


# ---- The text server of `penstock serve`, with the model that the run trains.


def make_server(
    settings: Settings,
    source: "Source",
    specification: RunSpecification,
    run_follower: "RunFollower | None",
) -> "TextServer":
    """Return the server; settings: of this process. Raises ConfigurationError, and as `acting.read`."""
    from penstock.workloads.language.serving.text_answerer import open_guard  # noqa: PLC0415 - no actor's
    from penstock.workloads.language.serving.text_server import TextServer  # noqa: PLC0415

    of = acting.read(specification, settings.actor)
    section = language(of.environment)
    return TextServer(
        settings,
        source,
        of,
        run_follower,
        tokenizer=load_tokenizer(section.model),
        answer_tokens=section.response_tokens,
        device=section.device,
        engine_name=section.engine,
        guard=open_guard(section, section.guard_penalty),
    )
