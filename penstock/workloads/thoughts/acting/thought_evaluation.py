"""What an evaluation measures thoughts by: held-out questions of the hardest level that are answered right.

An episode is a question; its return is 1 where the likeliest answer behind the thought is true, else 0.
"""

import threading
from collections.abc import Callable
from typing import Final

from penstock.config.sections.learner import EvaluationSection
from penstock.config.settings import Settings
from penstock.protocol.specification import RunSpecification
from penstock.workloads.plugin import acting
from penstock.workloads.plugin.acting import LocalPolicy, Played, Run
from penstock.workloads.thoughts.acting.thought_equipment import ThoughtEquipment, equip_thoughts
from penstock.workloads.thoughts.tasks.example import draw_tests

_BATCH: Final = 256
"""Questions at once."""


def make_runner(
    specification: RunSpecification, settings: Settings, episodes: int | None = None
) -> "ThoughtRunner":
    """Return the evaluation runner of a run. settings: of this process.

    Raises what `acting.read` does, and ConfigurationError.
    """
    del episodes  # no more is made for many than for few
    return ThoughtRunner(acting.read(specification, settings.actor))


class ThoughtRunner:
    """Asks held-out questions (see `acting.EvaluationRunner`)."""

    def __init__(self, of: Run) -> None:
        self._equipment: ThoughtEquipment = equip_thoughts(of)
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
        """Answer a question an episode; equal for equal seeds and weights.

        deterministic: behind the likeliest thoughts.
        """
        equipment = self._equipment
        model = equipment.model
        examples = draw_tests(equipment.task, seed, episodes)
        model.seed(seed)
        played: list[Played] = []
        for start in range(0, episodes, _BATCH):
            part = examples[start : start + _BATCH]
            questions = model.questions(part)
            thoughts = model.think(
                questions,
                equipment.section.thought_tokens,
                deterministic=deterministic,
                is_over=stop.is_set,
                on_token=on_step,
            )
            if thoughts is None or stop.is_set():
                return None
            answered = model.answered(questions, thoughts, model.answers(part))
            played += [
                Played(episode_return=float(right), length=len(thought), terminated=True)
                for right, thought in zip(answered.is_right.tolist(), thoughts, strict=True)
            ]
        return played

    def close(self) -> None:
        """Do nothing: nothing is held."""
