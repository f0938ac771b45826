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

from penstock.actor.evaluation.evaluator import Runner
from penstock.actor.specification.run import evaluation_section
from penstock.config.service_settings import local_settings
from penstock.config.settings import ConfigurationError, Settings
from penstock.config.workload import find, load
from penstock.launch.commands.request import Play
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


def main(run: Path, play: Play, *, as_json: bool) -> int:
    """Evaluate and print. Raises ConfigurationError for a folder without a final policy."""
    try:
        final = read_final(run)
    except ValueError as error:
        raise ConfigurationError(f"{run}: {error}") from error
    result = evaluate(final, local_settings(run, play.assignments, trust=play.trust), play)
    how = "deterministic" if result.deterministic else "sampled"
    text = (
        f"{shown(result.mean)} ± {shown(result.std, result.mean)} over {result.episodes} {how} episodes of "
        f"version {result.version}, seeds from {result.seed}"
    )
    sys.stdout.write((json.dumps(asdict(result)) if as_json else text) + "\n")
    return EXIT_OK


def evaluate(final: FinalPolicy, local: Settings, play: Play) -> Evaluation:
    count = play.episodes or evaluation_section(final.specification).episodes
    if not count:
        raise ConfigurationError("evaluation.episodes=0: the run is not evaluated; say --episodes N")
    make_runner = load(find(final.specification.workload).runner)
    runner: Runner = make_runner(final.specification, local, count)
    first = runner.evaluation.seed if play.seed is None else play.seed
    runner.local.policy.load(final.blob)
    try:
        played = runner.play(episodes=count, seed=first, deterministic=not play.sampled, stop=_NEVER)
    finally:
        runner.close()
    returns = np.array([episode.episode_return for episode in played or ()])
    return Evaluation(
        mean=float(returns.mean()),
        std=float(returns.std()),
        episodes=len(returns),
        version=final.version,
        seed=first,
        deterministic=not play.sampled,
    )
