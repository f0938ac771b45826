"""The training of a round, as a recipe for `penstock train`.

It has the network and the algorithm of the run that answers people, and beside them what the round has made
(`round_files`). Its versions are registered where the run's are, in a range of numbers of their own, with the
folder in which their weights lie: so the servers of the run can answer with them.
"""

from pathlib import Path
from typing import Any, Final

from penstock.config import toml_text
from penstock.config.settings import (
    ActorSection,
    LearnerSection,
    RegistrySection,
    ServingSection,
    Settings,
)
from penstock.registry.weight_files import registry_url
from penstock.workloads.chat.loop.round_files import BEGIN, JUDGE, PROMPTS
from penstock.workloads.chat.loop.served_run import ServedRun

TOKENS: Final = 20_000
"""Tokens of answers that a round trains on, where the order does not say."""
_RESPONSES: Final = 16
_BATCH_TOKENS: Final = 1024
_KEPT: Final = ("model", "response_tokens", "held_out", "device", "true_reward")


def run_name(run: ServedRun, number: int) -> str:
    """Return the name of a round's training, which gets a suffix of its own when it begins."""
    return f"{run.settings.run}-round-{number}"


def recipe_of(run: ServedRun, folder: Path, number: int) -> str:
    """Return the recipe of a round, as TOML. folder: of the round, absolute. number: of the round."""
    given = run.settings
    kwargs: dict[str, Any] = {
        name: given.environment.kwargs[name] for name in _KEPT if name in given.environment.kwargs
    }
    kwargs |= {"prompts": str(folder / PROMPTS), "reward": str(folder / JUDGE)}
    policy = {**given.policy.kwargs, "begin_with": str(folder / BEGIN)}
    registry = RegistrySection(
        url=registry_url(run.folder, given.registry.url),
        password_file=given.registry.password_file,
        activate_first=False,
    )
    settings = Settings(
        workload=given.workload,
        run=run_name(run, number),
        seed=given.seed + number,
        environment=given.environment.model_copy(update={"count": _RESPONSES, "kwargs": kwargs}),
        policy=given.policy.model_copy(update={"kwargs": policy}),
        algorithm=given.algorithm.model_copy(update={"batch_steps": _batch_tokens(given)}),
        actor=ActorSection(count=1, unroll_length=given.actor.unroll_length),
        learner=LearnerSection(
            total_steps=TOKENS,
            stop_at_target=False,
            device=given.learner.device,
            precision=given.learner.precision,
            threads=given.learner.threads,
        ),
        evaluation=given.evaluation,
        registry=registry,
        serving=ServingSection(policy=run.policy),
    )
    return toml_text.dump(settings)


def _batch_tokens(given: Settings) -> int:
    """Return the tokens of an update, so many that what may be outstanding holds a whole fragment."""
    charge = given.actor.unroll_length * _RESPONSES
    return max(_BATCH_TOKENS, given.algorithm.update_steps, -(-charge // 2))
