"""How experience is generated."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from penstock.config.sections.section import ADVANCED, Positive, Section, Threads
from penstock.protocol.limits import MAX_STEPS


class ActorSection(Section):
    """How experience is generated.

    The learner's values hold for every actor of the run; an actor elsewhere sets only `threads`,
    `outbox_fragments`, `stall_timeout_s`, `allow_modules`, `places` and `ack_journal` for itself.
    """

    count: Annotated[int, Field(ge=0, le=4096)] = 2
    """Rollout workers that the launcher starts, and that open round 0 in lock-step; 0: only clients act."""
    unroll_length: Annotated[int, Field(gt=0, le=MAX_STEPS)] = 32
    """Steps per slot of a fragment (T); the run's, not an actor's."""
    outbox_fragments: Annotated[Positive, ADVANCED] = 8
    """Fragments kept until acknowledged; when full the environment waits. An actor may set its own."""
    compress: Literal["off", "lz4"] = "off"
    """Compression of observation tensors; the run's, not an actor's."""
    threads: Threads = 1
    """Threads of the policy's forward pass; an actor may set its own."""
    allow_modules: tuple[str, ...] = ()
    """Modules that a run specification may make this actor import besides known ones; an actor's own."""
    places: dict[str, str] = {}
    """Where this machine has what kwargs name, such as `{model = "/models/small"}`; an actor's own."""
    stall_timeout_s: Annotated[Positive, ADVANCED] = 120
    """Health turns red without an environment step for this long, in seconds; an actor may set its own."""
    ack_journal: Path | None = None
    """Folder for the actor's record of acknowledgements (`penstock audit`); none: off. An actor's own."""
