"""What an evaluation measures a language model by: rewards of its responses to prompts that were held out.

The return of an episode is the reward model's, or that of `true_reward`, which knows what the reward model
only guesses.
"""

import threading
from collections.abc import Callable
from typing import Final

from penstock.config.sections.learner import EvaluationSection
from penstock.config.settings import ConfigurationError, Settings
from penstock.protocol.specification import RunSpecification
from penstock.runtime.exit import Fatal
from penstock.workloads.language.generation.backend import Generated
from penstock.workloads.language.generation.prompt_set import Asked, in_random_order
from penstock.workloads.language.generation.reward_scorer import Response
from penstock.workloads.plugin import acting
from penstock.workloads.plugin.acting import LocalPolicy, Played, Run
from penstock.workloads.rlhf.response_generator import Equipment, equip, open_scorer

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
