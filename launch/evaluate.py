"""`penstock evaluate RUN`: plays the run's final policy on separate environments, without a broker.

Uses only what the run left in `policies/`; episode i is seeded with the first seed + i.
"""

import json
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from actor import run as actor_run
from actor.evaluation import play
from actor.evaluator import MAX_ENVIRONMENTS
from launch.plan import local_actor_section
from learner.final_policy import FinalPolicy, read_final
from penstock.policy.weights import load_into
from penstock.runtime.exit import EXIT_OK
from penstock.runtime.settings import ActorSection, ConfigurationError

_NEVER: Final = threading.Event()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Undiscounted returns of whole episodes; `std` over episodes."""

    mean: float
    std: float
    episodes: int
    version: int
    seed: int
    deterministic: bool


def main(run: Path, *, episodes: int | None, seed: int | None, deterministic: bool, as_json: bool) -> int:
    """Evaluate and print; raises ConfigurationError when the folder holds no final policy."""
    try:
        final = read_final(run)
    except ValueError as error:
        raise ConfigurationError(f"{run}: {error}") from error
    result = evaluate(
        final, local_actor_section(run), episodes=episodes, seed=seed, deterministic=deterministic
    )
    how = "deterministic" if deterministic else "sampled"
    text = (
        f"{result.mean:.1f} ± {result.std:.1f} over {result.episodes} {how} episodes of version "
        f"{result.version}, seeds from {result.seed}"
    )
    sys.stdout.write((json.dumps(asdict(result)) if as_json else text) + "\n")
    return EXIT_OK


def evaluate(
    final: FinalPolicy, local: ActorSection, *, episodes: int | None, seed: int | None, deterministic: bool
) -> Evaluation:
    """Play `episodes` (the run's setting when None) from `seed` (likewise)."""
    of = actor_run.read(final.specification, local)
    count = episodes or of.evaluation.episodes
    first = of.evaluation.seed if seed is None else seed
    section = of.environment
    if section.vectorise != "vector":
        # One seed per episode: a vector entry point takes one for all.
        section = section.model_copy(update={"vectorise": "sync"})
    stepper = of.make_environment(section, min(count, MAX_ENVIRONMENTS), first)
    policy = of.make_policy(final.specification.seed).policy
    load_into(policy, final.blob)
    policy.seed_actions(first)
    try:
        played = play(stepper, policy, episodes=count, seed=first, deterministic=deterministic, stop=_NEVER)
    finally:
        stepper.close()
    returns = np.array([episode.episode_return for episode in played or ()])
    return Evaluation(
        mean=float(returns.mean()),
        std=float(returns.std()),
        episodes=len(returns),
        version=final.version,
        seed=first,
        deterministic=deterministic,
    )
