"""`penstock evaluate RUN` and `penstock record RUN`: the run's final policy at play, without a broker.

Uses only what the run left in `policies/`. Of an evaluation episode i is seeded with the first seed + i. In a
recording fragments are cut as a rollout worker cuts them and belong to no batch: a learner of the recording
makes its own. Whole fragments are written until there are as many steps as were asked for.
"""

import json
import statistics
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from penstock.actor import specification as actor_run
from penstock.actor.acting.masks import learner_reward
from penstock.actor.evaluator import Runner
from penstock.actor.rollout.generator import (
    FragmentBuilder,
    HeaderFields,
    ObservationBounds,
    action_seed,
    environment_seeds,
)
from penstock.actor.specification import Run, evaluation_section
from penstock.config.service_settings import local_settings
from penstock.config.settings import ConfigurationError, LearnerSection
from penstock.config.workload import find, load
from penstock.launch.commands.request import Play
from penstock.launch.inspection.curve import shown
from penstock.learner.feed.recording import RecordingWriter
from penstock.learner.publish.kept_versions import FinalPolicy, read_final
from penstock.policy.acting.array_policy import sha256
from penstock.protocol.messages import Publication
from penstock.runtime.exit import EXIT_OK

_RECORDER = "recorder"
"""In place of an actor's name, in the seeds."""


def _final(run: Path) -> FinalPolicy:
    try:
        return read_final(run)
    except ValueError as error:
        raise ConfigurationError(f"{run}: {error}") from error


def _tell(account: dict[str, Any], text: str, *, as_json: bool) -> int:
    sys.stdout.write((json.dumps(account) if as_json else text) + "\n")
    return EXIT_OK


def evaluate(run: Path, play: Play, *, as_json: bool) -> int:
    """Evaluate and print. Raises ConfigurationError for a folder without a final policy.

    What is printed are undiscounted returns of whole episodes; `std` over episodes.
    """
    final = _final(run)
    local = local_settings(run, play.assignments, trust=play.trust)
    count = play.episodes or evaluation_section(final.specification).episodes
    if not count:
        raise ConfigurationError("evaluation.episodes=0: the run is not evaluated; say --episodes N")
    runner: Runner = load(find(final.specification.workload).runner)(final.specification, local, count)
    seed = runner.evaluation.seed if play.seed is None else play.seed
    runner.local.policy.load(final.blob)
    try:
        played = runner.play(
            episodes=count, seed=seed, deterministic=not play.sampled, stop=threading.Event()
        )
    finally:
        runner.close()
    returns = np.array([episode.episode_return for episode in played or ()])
    mean, std = float(returns.mean()), float(returns.std())
    account = {
        "mean": mean,
        "std": std,
        "episodes": len(returns),
        "version": final.version,
        "seed": seed,
        "deterministic": not play.sampled,
    }
    how = "sampled" if play.sampled else "deterministic"
    text = (
        f"{shown(mean)} ± {shown(std, mean)} over {len(returns)} {how} episodes of version {final.version}, "
        f"seeds from {seed}"
    )
    return _tell(account, text, as_json=as_json)


def record_final(
    run: Path, out: Path, *, steps: int, seed: int, deterministic: bool, trust: bool, as_json: bool
) -> int:
    """Record the final policy. Raises ConfigurationError for a run that goes on, or a taken folder."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigurationError(f"--out {out}: holds something already; name a new folder")
    final = _final(run)
    made = actor_run.read(final.specification, local_settings(run, trust=trust).actor)
    account = record(made, final, out, steps=steps, seed=seed, deterministic=deterministic)
    text = (
        f"{out}: {account['steps']} steps of version {account['version']} in {account['fragments']} "
        f"fragments; {account['episodes']} episodes, mean return {account['mean_return']}"
    )
    return _tell(account, text, as_json=as_json)


def record(
    run: Run, final: FinalPolicy, out: Path, *, steps: int, seed: int, deterministic: bool
) -> dict[str, Any]:
    """Play with those weights; the account as JSON values."""
    specification, section = final.specification, run.environment
    stepper = run.make_environment(section, section.count, seed)
    builder = FragmentBuilder(
        specification.schema,
        specification.unroll_length,
        section.count,
        run.actor.compress == "lz4",
        learner_reward(section),
        final_masks=specification.final_masks,
        bounds=ObservationBounds(specification.observation_space),
    )
    policy = run.make_policy(specification.seed).policy
    policy.load(final.blob)
    policy.seed_actions(action_seed(seed, _RECORDER, 0))
    weights = Publication(final.version, final.update, sha256(final.blob), len(final.blob))
    writer = RecordingWriter.begin(out, specification, "policy", LearnerSection().record_max_bytes)
    returns: list[float] = []
    recorded = sequence = 0
    try:
        first = stepper.reset(environment_seeds(seed, _RECORDER, 0, stepper.slots))
        builder.start(first | policy.initial_state(stepper.slots))
        while recorded < steps:
            while not builder.is_full:
                acted = policy.act(builder.observation(), deterministic=deterministic)
                stepped = stepper.step(policy.environment_action(acted.action))
                builder.record(acted.action, acted.log_prob, stepped, acted.state)
            sequence += 1
            fields = HeaderFields(
                run=specification.run, session=1, sequence=sequence, weights=weights, round=0
            )
            fragment, episodes = builder.cut(fields)
            if not writer.fragment(fragment):
                break
            recorded += int(fragment.arrays()["valid"].sum())
            returns += [episode.episode_return for episode in episodes]
    finally:
        stepper.close()
        writer.close()
    return {
        "folder": str(out),
        "version": final.version,
        "fragments": sequence,
        "steps": recorded,
        "episodes": len(returns),
        "mean_return": statistics.fmean(returns) if returns else None,
    }
