"""What a rollout worker of a language model generates with.

It has prompts, a backend, a judge, and the fragments they make.

    unroll   G responses to each of N / G prompts, then their rewards
    cut      all of it as one fragment

One fragment is one batch of responses under one version of the weights. A batch that a drain ends early is
handed over with what came to its end; what did not is no experience.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from penstock.config.credentials import credentials, http_headers
from penstock.config.sections import EvaluationSection
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
from penstock.workloads.plugin.acting import (
    GENERATING,
    LocalPolicy,
    Played,
    Run,
    Session,
    action_seed,
    environment_seeds,
    note_lag,
    place_of,
    watch,
)
from penstock.workloads.plugin.fragments import HeaderFields, learner_reward
from penstock.workloads.rlhf.language_section import Language, language


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
    """The generator of a run; settings: of this process.

    Raises what `acting.read` does, and ConfigurationError.
    """
    return LanguageGenerator(acting.read(specification, settings.actor), settings, health)


class LanguageGenerator:
    """Generates with a local policy (see `acting.FragmentGenerator`)."""

    def __init__(self, of: Run, settings: Settings, health: Health) -> None:
        self._equipment = equipment = equip(of)
        self._section, self._slots = equipment.section, of.environment.count
        if self._slots % self._section.group:
            raise ConfigurationError(
                f"environment.kwargs.group={self._section.group}: environment.count={self._slots} is no "
                "multiple of it"
            )
        watch(health, of.actor.stall_timeout_s)
        self._health, self._actors = health, of.actor.count
        self.specification = of.specification
        self.outbox_fragments = of.actor.outbox_fragments
        self._scorer = open_scorer(
            self._section.reward, equipment, settings, standardise=self._section.standardise
        )
        self._fragments = TokenFragments(
            of.specification.schema,
            self._slots,
            equipment.tokenizer.pad_token_id,
            learner_reward(of.environment),
        )
        self._order: Iterator[Asked] = iter(())
        self._scored: Scored | None = None

    def begin(self, actor_id: str, session: Session) -> None:
        """Other prompts and other draws in every session."""
        seed, salt, local = self.specification.seed, session.seed_salt, self._equipment.local
        self._equipment.backend.seed(action_seed(seed, actor_id, salt))
        (order_seed,) = environment_seeds(seed, actor_id, salt, 1)
        self._order = in_random_order(self._equipment.prompts.train, order_seed)
        local.place = place_of(actor_id, self._actors, self._slots)
        self._fragments.restart(self._slots)
        session.follow_lag(partial(note_lag, self._health))
        if local.publication.version:
            local.answer_probe(session)

    def follow(self, session: Session) -> None:
        """Apply newer weights and answer the probe with them."""
        self._equipment.local.follow(session)

    def unroll(self, is_over: Callable[[], bool]) -> None:
        """One batch of responses and their rewards."""
        prompts = [next(self._order) for _ in range(self._slots // self._section.group)]
        asked = [prompt for prompt in prompts for _ in range(self._section.group)]
        generated = self._equipment.backend.generate(
            [one.ids for one in asked],
            self._section.response_tokens,
            is_over=is_over,
            on_token=partial(self._health.progress, GENERATING),
        )
        rewards, by = self._rewards(asked, generated, is_over)
        self._health.progress(GENERATING)
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

    @property
    def collected(self) -> int:
        """Nothing: the rewards of a batch come last."""
        return 0

    def cut(self, session: int, sequence: int, round_: int) -> tuple[Fragment, list[Episode]]:
        """The batch collected."""
        assert self._scored is not None, "unroll comes before cut"
        fields = HeaderFields(
            run=self.specification.run,
            session=session,
            sequence=sequence,
            weights=self._equipment.local.publication,
            round=round_,
        )
        return self._fragments.cut(self._scored, fields)

    def close(self) -> None:
        """Let go of the source of rewards."""
        self._scorer.close()


# ---- What an evaluation measures a language model by: rewards of its responses to prompts that were held
# out.

BATCH: Final = 64
"""Responses at once."""


def make_runner(
    specification: RunSpecification, settings: Settings, episodes: int | None = None
) -> "LanguageRunner":
    """The evaluation runner of a run; settings: of this process.

    Raises what `acting.read` does, and ConfigurationError.
    """
    del episodes  # no more is made for many than for few
    return LanguageRunner(acting.read(specification, settings.actor), settings)


class LanguageRunner:
    """Asks the held-out prompts (see `acting.EvaluationRunner`)."""

    def __init__(self, of: Run, settings: Settings) -> None:
        self._equipment: Equipment = equip(of)
        section = self._equipment.section
        if not self._equipment.prompts.held_out:
            raise ConfigurationError(
                "environment.kwargs.held_out=0: no prompt is left to evaluate on; hold a share of them out"
            )
        self._scorer = (
            open_scorer(section.true_reward, self._equipment, settings, standardise=False)
            if section.true_reward
            else open_scorer(section.reward, self._equipment, settings, standardise=section.standardise)
        )
        self.evaluation: EvaluationSection = of.evaluation
        self.stall_timeout_s = float(of.actor.stall_timeout_s)
        self.local: LocalPolicy = self._equipment.local

    def play(
        self,
        *,
        episodes: int,
        seed: int,
        deterministic: bool,
        stop: threading.Event,
        on_step: Callable[[], None] = lambda: None,
    ) -> list[Played] | None:
        """One response an episode, to prompts in an order that the seed decides.

        After the last prompt it starts again with the first.
        """
        order = in_random_order(self._equipment.prompts.held_out, seed)
        self._equipment.backend.seed(seed)
        played: list[Played] = []
        while len(played) < episodes:
            asked = [next(order) for _ in range(min(BATCH, episodes - len(played)))]
            generated = self._equipment.backend.generate(
                [one.ids for one in asked],
                self._equipment.section.response_tokens,
                deterministic=deterministic,
                is_over=stop.is_set,
                on_token=on_step,
            )
            batch = None if stop.is_set() else self._judged(asked, generated, stop)
            if batch is None:
                return None
            played += batch
        return played

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
        """Let go of the source of rewards."""
        self._scorer.close()
