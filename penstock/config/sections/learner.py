"""The process that learns, and what measures its policy."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from penstock.config.sections.section import (
    ADVANCED,
    Count,
    NonNegative,
    Positive,
    PositiveReal,
    Section,
    Threads,
)
from penstock.protocol.limits import MAX_EPISODES_PER_REPORT


class LearnerSection(Section):
    """The process that learns."""

    total_steps: Positive | None = None
    """The run ends after this many environment steps; none: the workload's default."""
    total_episodes: Annotated[Positive | None, ADVANCED] = None
    """The run ends after this many training episodes, where nothing ends it before; none: any number."""
    total_updates: Annotated[Positive | None, ADVANCED] = None
    """The run ends after this many updates, where nothing ends it before; none: any number."""
    total_seconds: Annotated[PositiveReal | None, ADVANCED] = None
    """The run ends behind the update in which so many seconds of training are over; none: any number."""
    target_return: float | None = None
    """The run ends when the evaluated mean return reaches this; none: the environment's own threshold."""
    stop_at_target: bool = True
    """Evaluate when the last 20 training episodes reach the target, and stop when the evaluation does."""
    checkpoint_interval_s: NonNegative = 30.0
    """Seconds between checkpoints."""
    keep_checkpoints: Annotated[int, Field(ge=2)] = 3
    """Committed checkpoints kept on disk."""
    checkpoint_compression: Annotated[Literal["none", "lz4"], ADVANCED] = "none"
    """How tensors of checkpoints are stored; lz4 makes those of replay and of first updates smaller."""
    keep_best: bool = False
    """Keep the checkpoint of the best evaluation, for `penstock train --resume RUN --best`."""
    prefetch_batches: Annotated[Positive, ADVANCED] = 2
    """Batches read ahead of the update."""
    publish_interval_ms: Annotated[NonNegative, ADVANCED] = 0.0
    """Least milliseconds between two publications of weights; credit waits as long. Lock-step has none."""
    publish_interval_steps: Annotated[Count, ADVANCED] = 0
    """Least number of environment steps trained between them; keep it well below what may become stale."""
    publish_fetch_wait_s: Annotated[NonNegative, ADVANCED] = 1.0
    """Longest that weights of more than 1 MiB wait, in seconds, for actors that fetch earlier ones."""
    lease_ttl_s: Annotated[PositiveReal, ADVANCED] = 15.0
    """Another learner may take over this long after the last renewal, in seconds of Redis time."""
    threads: Threads = 1
    """Threads of the update."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: updates run in mixed precision; weights, losses and moments stay float32."""
    compile: bool = False
    """Compile the networks of an update with torch.compile: the first updates take minutes."""
    ranks: Positive = 1
    """Processes of this machine that share each update; under torchrun, which then says how many, 1."""
    rank_timeout_s: Annotated[PositiveReal, ADVANCED] = 120.0
    """The learner ends when ranks do not meet, or one does not answer, for this long, in seconds."""
    plaintext_ranks: Annotated[bool, ADVANCED] = False
    """Allow ranks on several machines, which exchange gradients and weights unencrypted."""
    stall_timeout_s: Annotated[Positive, ADVANCED] = 300
    """Longest time without an update while not paused, in seconds; then health is red and the run fails."""
    episode_log: Annotated[bool, ADVANCED] = False
    """Write a line for each training episode into `episodes.jsonl` of the run's folder."""
    keep_every_updates: Positive | None = None
    """Register the version that a run begins with and the one after every so many updates.

    None: only the best and the last.
    """
    record: Path | None = None
    """Folder for a record of what the learner consumes, for `penstock train --from`; none: no record."""
    record_max_bytes: Annotated[Positive, ADVANCED] = 8 * 1024**3
    """Most bytes of a recording: it ends there, and learning goes on."""
    feed_from: Annotated[Path | None, ADVANCED] = None
    """Learn from the recording in this folder and not from actors; `penstock train --from` sets it."""
    probe_tolerance: Annotated[NonNegative, ADVANCED] = 1e-3
    """Most that an actor's answer to the probe may differ from the learner's answer r, times 1 + |r|."""


class EvaluationSection(Section):
    """Separate environments that only measure."""

    episodes: Annotated[int, Field(ge=0, le=MAX_EPISODES_PER_REPORT)] = 100
    """Episodes of one evaluation; the i-th is seeded with `seed` + i. 0: the run is not evaluated."""
    seed: Annotated[int, Field(ge=0)] = 1_000_000
    """First seed."""
    deterministic: bool = True
    """Play the most likely action; false: draw actions as in training. Only this way of playing counts."""
    both: bool = False
    """Play the other way as well, on the same seeds, and report it beside; takes twice as long."""
    base: Annotated[bool, ADVANCED] = False
    """Play the policy as it is before any training, too, once, on the same seeds.

    Each evaluation is then compared with it, episode by episode. Only for policies that act before they have
    weights of a run, such as a language model, which is its reference then.
    """
    interval_steps: Positive | None = None
    """Evaluate every so many environment steps.

    None: with the target in reach, where training episodes no longer end, and at the end.
    """
    patience: Positive | None = None
    """End with the best version after this many evaluations without a better one; needs `interval_steps`."""
    min_improvement: NonNegative = 0.0
    """Least by which a mean return must exceed the best one to be an improvement, in units of return."""
    timeout_s: Annotated[Positive, ADVANCED] = 600
    """Give up waiting for an evaluation after this long, in seconds."""
