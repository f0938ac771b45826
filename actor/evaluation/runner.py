"""What an evaluation plays with: whole episodes of a run, deterministic or sampled, from seeds of its own."""

import threading
from collections.abc import Callable
from typing import Protocol

from penstock.actor.acting.local_policy import LocalPolicy
from penstock.actor.evaluation.play import Played, play
from penstock.actor.specification import run
from penstock.actor.specification.run import Run
from penstock.config.sections.learner import EvaluationSection
from penstock.config.settings import Settings
from penstock.protocol.specification import RunSpecification

MAX_ENVIRONMENTS = 100


class EvaluationRunner(Protocol):
    """Made once for a run; plays with the weights that `local` holds."""

    @property
    def local(self) -> LocalPolicy:
        """Return the policy that weights are applied to and that answers the probe."""

    @property
    def evaluation(self) -> EvaluationSection:
        """The run's own."""

    @property
    def stall_timeout_s(self) -> float:
        """Return how long a step may take, in seconds."""

    def play(
        self,
        *,
        episodes: int,
        seed: int,
        deterministic: bool,
        stop: threading.Event,
        on_step: Callable[[], None] = lambda: None,
    ) -> list[Played] | None:
        """Play so many episodes, equal for equal seeds and weights; None when `stop` was set first.

        deterministic: take the most likely action in place of a drawn one. on_step: called after each step of
        all environments, to show that the evaluation goes on.
        """

    def close(self) -> None:
        """Let go of everything."""


def make_runner(
    specification: RunSpecification, settings: Settings, episodes: int | None = None
) -> "EnvironmentRunner":
    """Return what plays the run's environments. settings: of this process. episodes: None: as the run says.

    Raises what `run.read` and the environment raise.
    """
    return EnvironmentRunner(run.read(specification, settings.actor), episodes)


class EnvironmentRunner:
    """Plays in environments of its own (see `EvaluationRunner`)."""

    def __init__(self, of: Run, episodes: int | None = None) -> None:
        self.evaluation, self.stall_timeout_s = of.evaluation, float(of.actor.stall_timeout_s)
        count = min(episodes or of.evaluation.episodes, MAX_ENVIRONMENTS)
        self._stepper = of.make_environment(of.environment.for_evaluation(), count, of.evaluation.seed)
        self.local = of.make_policy(of.specification.seed)
        self.local.policy.use_threads(of.actor.threads)

    def play(
        self,
        *,
        episodes: int,
        seed: int,
        deterministic: bool,
        stop: threading.Event,
        on_step: Callable[[], None] = lambda: None,
    ) -> list[Played] | None:
        """Every time from the same seeds, those of drawn actions too."""
        self.local.policy.seed_actions(seed)
        return play(
            self._stepper,
            self.local.policy,
            episodes=episodes,
            seed=seed,
            deterministic=deterministic,
            stop=stop,
            on_step=on_step,
        )

    def close(self) -> None:
        """End the environments."""
        self._stepper.close()
