"""What a run of language models generates with: prompts, a backend and a judge, to train or to measure.

One fragment is one batch of responses under one version of the weights. Of a batch that a drain ends early
only what came to its end is experience.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from penstock.config.credentials import credentials, http_headers
from penstock.config.settings import ConfigurationError, Settings
from penstock.protocol.fragment import Fragment
from penstock.protocol.messages import Episode
from penstock.protocol.specification import RunSpecification
from penstock.runtime.exit import Fatal
from penstock.runtime.health import Health
from penstock.workloads.language.generation.cached_generation import Backend, Generated, make_backend
from penstock.workloads.language.generation.prompt_set import (
    Asked,
    Prompts,
    Scored,
    TokenFragments,
    in_random_order,
    read_prompts,
)
from penstock.workloads.language.generation.reward_scorer import Response, RewardScorer
from penstock.workloads.language.quiet import quieten
from penstock.workloads.language.reward.opening import open_source
from penstock.workloads.language.reward.reward_source import ScoredBy
from penstock.workloads.language.tokenizer import Encoder, Tokenizer, load_tokenizer
from penstock.workloads.plugin import acting
from penstock.workloads.plugin.acting import GENERATING, LocalPolicy, Played, Playing, Run
from penstock.workloads.plugin.fragments import HeaderFields, learner_reward
from penstock.workloads.rlhf.environment import Language, language


@dataclass(frozen=True, slots=True, kw_only=True)
class Equipment:
    """What a generator of responses needs, to train or to measure."""

    section: Language
    tokenizer: Tokenizer
    prompts: Prompts
    local: LocalPolicy
    backend: Backend


def equip(of: Run) -> Equipment:
    """For a run, from the places of this machine; raises ConfigurationError."""
    quieten()
    torch.set_num_threads(of.actor.threads)
    section = language(of.environment)
    room = of.specification.unroll_length + 1 - section.response_tokens
    if room < 1:
        raise ConfigurationError(
            f"environment.kwargs.response_tokens={section.response_tokens}: actor.unroll_length="
            f"{of.specification.unroll_length} leaves no room for a prompt; raise it by the tokens of the "
            "longest prompt"
        )
    tokenizer = load_tokenizer(section.model)
    encoder = Encoder(tokenizer, room)
    prompts = read_prompts(section.prompts, encoder, held_out=section.held_out, seed=of.specification.seed)
    local = of.make_policy(of.specification.seed)
    backend = make_backend(local.policy, tokenizer, section.device)
    return Equipment(section=section, tokenizer=tokenizer, prompts=prompts, local=local, backend=backend)


def open_scorer(text: str, equipment: Equipment, settings: Settings, *, standardise: bool) -> RewardScorer:
    """Rewards of the source that a text of this machine's configuration names."""
    section = equipment.section
    source = open_source(
        text,
        is_local=True,
        credentials=credentials(settings.security),
        headers=http_headers(settings.security),
        deadline_s=section.reward_timeout_s,
    )
    return RewardScorer(
        source, equipment.tokenizer, reads_tokens=section.reward_reads == "tokens", standardise=standardise
    )


def make_generator(
    specification: RunSpecification, settings: Settings, health: Health
) -> "LanguageGenerator":
    return LanguageGenerator(acting.read(specification, settings.actor), settings, health)


class LanguageGenerator(acting.Generator):
    """Generates a batch of responses at a time with a local policy."""

    def __init__(self, of: Run, settings: Settings, health: Health) -> None:
        self._equipment = equipment = equip(of)
        super().__init__(of, health)  # watches steps, of which loading a model is none
        self.local, self._section = equipment.local, equipment.section
        if self.slots % self._section.group:
            raise ConfigurationError(
                f"environment.kwargs.group={self._section.group}: environment.count={self.slots} is no "
                "multiple of it"
            )
        self._scorer = open_scorer(
            self._section.reward, equipment, settings, standardise=self._section.standardise
        )
        self._fragments = TokenFragments(
            of.specification.schema,
            self.slots,
            equipment.tokenizer.pad_token_id,
            learner_reward(of.environment),
        )
        self._order: Iterator[Asked] = iter(())
        self._scored: Scored | None = None

    def restart(self, seed: int, seeds: list[int]) -> None:
        self._equipment.backend.seed(seed)
        self._order = in_random_order(self._equipment.prompts.train, seeds[0])
        self._fragments.restart(self.slots)

    def unroll(self, is_over: Callable[[], bool]) -> None:
        prompts = [next(self._order) for _ in range(self.slots // self._section.group)]
        asked = [prompt for prompt in prompts for _ in range(self._section.group)]
        generated = self._equipment.backend.generate(
            [one.ids for one in asked],
            self._section.response_tokens,
            is_over=is_over,
            on_token=partial(self.health.progress, GENERATING),
        )
        rewards, by = self._rewards(asked, generated, is_over)
        self.health.progress(GENERATING)
        self._scored = Scored(asked, generated, rewards, by)

    def _rewards(
        self, asked: list[Asked], generated: Generated, is_over: Callable[[], bool]
    ) -> tuple[list[float | None], ScoredBy | None]:
        """A reward for each response that came to its end, None for the others."""
        given: list[float | None] = [None] * len(asked)
        rows = generated.whole.nonzero()[0].tolist()
        if not rows:
            return given, None
        responses = [Response(asked[row].prompt, asked[row].ids, generated.response(row)) for row in rows]
        rewards = self._scorer.score(responses, is_over)
        if rewards is None:
            return given, None
        for row, value in zip(rows, rewards.values, strict=True):
            given[row] = value
        return given, rewards.by

    def cut_with(self, fields: HeaderFields) -> tuple[Fragment, list[Episode]]:
        assert self._scored is not None, "unroll comes before cut"
        return self._fragments.cut(self._scored, fields)

    def close(self) -> None:
        self._scorer.close()


BATCH: Final = 64
"""Responses at once."""


def make_runner(
    specification: RunSpecification, settings: Settings, episodes: int | None = None
) -> "LanguageRunner":
    del episodes  # no more is made for many than for few
    return LanguageRunner(acting.read(specification, settings.actor), settings)


class LanguageRunner(acting.Runner):
    """Asks held-out prompts for a response an episode; behind the last prompt it begins again."""

    def __init__(self, of: Run, settings: Settings) -> None:
        self._equipment = equipment = equip(of)
        super().__init__(of, equipment.local)
        section = equipment.section
        if not equipment.prompts.held_out:
            raise ConfigurationError(
                "environment.kwargs.held_out=0: no prompt is left to evaluate on; hold a share of them out"
            )
        self._scorer = open_scorer(
            section.true_reward or section.reward,
            equipment,
            settings,
            standardise=section.standardise and not section.true_reward,
        )
        self._order: Iterator[Asked] = iter(())

    def begin(self, episodes: int, seed: int) -> None:
        del episodes
        self._order = in_random_order(self._equipment.prompts.held_out, seed)
        self._equipment.backend.seed(seed)

    def wave(self, first: int, most: int, how: Playing) -> list[Played] | None:
        del first
        asked = [next(self._order) for _ in range(min(BATCH, most))]
        generated = self._equipment.backend.generate(
            [one.ids for one in asked],
            self._equipment.section.response_tokens,
            deterministic=how.deterministic,
            is_over=how.stop.is_set,
            on_token=how.on_step,
        )
        return None if how.stop.is_set() else self._judged(asked, generated, how.stop)

    def _judged(self, asked: list[Asked], generated: Generated, stop: threading.Event) -> list[Played] | None:
        responses = [Response(one.prompt, one.ids, generated.response(row)) for row, one in enumerate(asked)]
        rewards = self._scorer.score(responses, stop.is_set)
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
