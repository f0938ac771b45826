"""`penstock evaluate RUN` and `penstock record RUN`: play the final policy of a run, without a broker.

Only the run's `policies/` is read. Episode i of an evaluation is seeded with the first seed + i. Fragments of
a recording are cut as by a rollout worker and belong to no batch: a learner of the recording makes its own
batches. Whole fragments are written until there are at least as many steps as requested.
"""

import json
import statistics
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer

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
from penstock.config.settings import ConfigurationError, LearnerSection, parse_assignment
from penstock.config.settings import load as layered
from penstock.config.workload import find, load
from penstock.launch.commands.request import Play
from penstock.launch.inspection.curve import shown
from penstock.learner.feed.recording import RecordingWriter
from penstock.learner.publish.kept_versions import FinalPolicy, read_final
from penstock.policy.acting.array_policy import sha256
from penstock.protocol.limits import MAX_NUMBER
from penstock.protocol.messages import Publication
from penstock.protocol.specification import RunSpecification
from penstock.runtime.exit import EXIT_OK
from penstock.runtime.foreground import AsJson, Trust

_PLAYED: Final = ("environment", "evaluation", "actor", "security")
"""Sections that say how a final policy is played."""
_RECORDER = "recorder"
"""Stands for an actor's name in the seeds."""


def _final(run: Path) -> FinalPolicy:
    try:
        return read_final(run)
    except ValueError as error:
        raise ConfigurationError(f"{run}: {error}") from error


def _print(account: dict[str, Any], text: str, *, as_json: bool) -> int:
    sys.stdout.write((json.dumps(account) if as_json else text) + "\n")
    return EXIT_OK


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")], play: Play, as_json: AsJson = False
) -> int:
    """Play the final policy of a run on separate environments.

    Mean and standard deviation are those of the undiscounted returns of whole episodes.
    """
    final = _final(run)
    local = local_settings(run, play.assignments, trust=play.trust)
    specification = _with_own(final.specification, play.assignments)
    count = play.episodes or evaluation_section(specification).episodes
    if not count:
        raise ConfigurationError("evaluation.episodes=0: the run is not evaluated; say --episodes N")
    runner: Runner = load(find(specification.workload).runner)(specification, local, count)
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
    return _print(account, text, as_json=as_json)


def _with_own(specification: RunSpecification, assignments: tuple[str, ...]) -> RunSpecification:
    """Lay assignments over the run's sections `environment` and `evaluation`; refuse what changes nothing."""
    own = [parse_assignment(one) for one in assignments]
    for text, layer in zip(assignments, own, strict=True):
        if text.startswith("evaluation.deterministic"):
            raise ConfigurationError(f"{text}: say --sampled to draw actions")
        if not layer.keys() <= set(_PLAYED) and not text.startswith("policy.kwargs."):
            raise ConfigurationError(
                f"{text}: the final policy is played as it was trained; set keys of {', '.join(_PLAYED)}"
            )
    sections = {
        "environment": json.loads(specification.environment_json),
        "evaluation": json.loads(specification.evaluation_json),
    }
    laid = layered([sections, *({k: v for k, v in one.items() if k in sections} for one in own)])
    return replace(
        specification,
        environment_json=laid.environment.canonical_json(),
        evaluation_json=laid.evaluation.canonical_json(),
    )


def record_final(
    run: Annotated[Path, typer.Argument(help="Folder of a run that has ended.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the recording, a new one.")],
    steps: Annotated[int, typer.Option(min=1, help="Environment steps to record, or little more.")] = 20_000,
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_NUMBER, help="Of the environments and of drawn actions.")
    ] = 0,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Take the most likely action; default: draw actions.")
    ] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> int:
    """Record the final policy of a run at play, for `penstock train --from`.

    For what a learner consumes: learner.record.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigurationError(f"--out {out}: holds something already; name a new folder")
    final = _final(run)
    made = actor_run.read(final.specification, local_settings(run, trust=trust).actor)
    account = record(made, final, out, steps=steps, seed=seed, deterministic=deterministic)
    text = (
        f"{out}: {account['steps']} steps of version {account['version']} in {account['fragments']} "
        f"fragments; {account['episodes']} episodes, mean return {account['mean_return']}"
    )
    return _print(account, text, as_json=as_json)


def record(
    run: Run, final: FinalPolicy, out: Path, *, steps: int, seed: int, deterministic: bool
) -> dict[str, Any]:
    """Record the play of a policy in the folder `out`, and return the account as JSON values.

    steps: environment steps, at least. seed: of the environments and of drawn actions. deterministic: take
    the most likely action instead of drawing one.
    """
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
