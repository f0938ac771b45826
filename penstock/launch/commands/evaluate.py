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

from penstock.actor.evaluation.evaluator import EvaluationRunner
from penstock.actor.specification.run import evaluation_section
from penstock.config.service_settings import local_settings
from penstock.config.settings import ConfigurationError, Settings
from penstock.config.workload import find, load
from penstock.launch.inspection.curve import shown
from penstock.learner.publish.final_policy import FinalPolicy, read_final
from penstock.runtime.exit import EXIT_OK

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


def main(
    run: Path,
    *,
    episodes: int | None,
    seed: int | None,
    deterministic: bool,
    assignments: tuple[str, ...],
    trust: bool,
    as_json: bool,
) -> int:
    """Evaluate and print.

    trust: the run's folder although it was not made here. Raises ConfigurationError when it holds no final
    policy.
    """
    try:
        final = read_final(run)
    except ValueError as error:
        raise ConfigurationError(f"{run}: {error}") from error
    local = local_settings(run, assignments, trust=trust)
    result = evaluate(final, local, episodes=episodes, seed=seed, deterministic=deterministic)
    how = "deterministic" if deterministic else "sampled"
    text = (
        f"{shown(result.mean)} ± {shown(result.std, result.mean)} over {result.episodes} {how} episodes of "
        f"version {result.version}, seeds from {result.seed}"
    )
    sys.stdout.write((json.dumps(asdict(result)) if as_json else text) + "\n")
    return EXIT_OK


def evaluate(
    final: FinalPolicy, local: Settings, *, episodes: int | None, seed: int | None, deterministic: bool
) -> Evaluation:
    """Play `episodes` (the run's setting when None) from `seed` (likewise)."""
    count = episodes or evaluation_section(final.specification).episodes
    if not count:
        raise ConfigurationError("evaluation.episodes=0: the run is not evaluated; say --episodes N")
    make_runner = load(find(final.specification.workload).runner)
    runner: EvaluationRunner = make_runner(final.specification, local, count)
    first = runner.evaluation.seed if seed is None else seed
    runner.local.policy.load(final.blob)
    try:
        played = runner.play(episodes=count, seed=first, deterministic=deterministic, stop=_NEVER)
    finally:
        runner.close()
    returns = np.array([episode.episode_return for episode in played or ()])
    return Evaluation(
        mean=float(returns.mean()),
        std=float(returns.std()),
        episodes=len(returns),
        version=final.version,
        seed=first,
        deterministic=deterministic,
    )
