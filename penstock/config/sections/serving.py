"""The policy server: what it answers, and what of it is learned from."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.config.sections.section import ADVANCED, NonNegative, Positive, PositiveReal, Section


class ServingSection(Section):
    """The policy server: what it answers, and what of it is learned from."""

    listen: str = ""
    """Where the policy server that the launcher starts listens, HOST:PORT or unix:/path.

    Empty: it starts none.
    """
    policy: str = "default"
    """Name of the policy, under which its versions are registered and served.

    Runs that share a registry need one each.
    """
    max_request_rows: Annotated[Positive, ADVANCED] = 1024
    """Most observations in one request."""
    max_batch_rows: Positive = 256
    """Observations of several requests that share one forward pass, at most.

    One larger request passes alone.
    """
    max_wait_ms: Annotated[NonNegative, ADVANCED] = 1.0
    """Longest that a request waits for others to share its forward pass, in milliseconds.

    A lonely client waits for nobody.
    """
    max_delay_ms: PositiveReal = 100.0
    """Requests that would wait longer than this for their turn are refused at once, in milliseconds."""
    max_calls_per_s: Annotated[PositiveReal, ADVANCED] = 100_000.0
    """Requests that one named client, or one connection of others, may make in a second.

    Far more than is answered, so that load is shed by `max_delay_ms` first.
    """
    max_episodes: Annotated[int, Field(gt=0, le=100_000)] = 10_000
    """Most episodes open at once."""
    episode_timeout_s: Annotated[PositiveReal, ADVANCED] = 60.0
    """An episode that is not heard of for this long is given up, in seconds."""
    reward_window_s: NonNegative = 0.0
    """Rewards may come this long after their step, in seconds; the experience is held back so long."""
    max_fragment_age_s: Annotated[PositiveReal, ADVANCED] = 10.0
    """An episode that is slow takes newer weights after this long, in seconds."""
    declared_steps_per_s: Annotated[PositiveReal | None, ADVANCED] = None
    """Steps that all clients make in a second, for the check that rewards that come late do not make experience stale; none: no check."""
    max_buffered_bytes: Annotated[Positive, ADVANCED] = 256 * 1024 * 1024
    """Observations of open episodes held for the learner.

    Beyond it episodes are answered and not learned from.
    """
    outbox_fragments: Annotated[Positive, ADVANCED] = 1024
    """Fragments kept until acknowledged; beyond it experience is counted and dropped."""
    shadow_record: Path | None = None
    """File of JSON lines for what the shadow would have answered.

    None: `shadow.jsonl` in the run's folder, if one is served.
    """
    fallback: Literal["previous", "fixed", "uniform", "none"] = "previous"
    """Who answers when no version can.

    The one that answered before (then a uniform draw), `fallback_action`, a uniform draw, or nobody.
    """
    fallback_action: Any = None
    """The action of fallback=fixed, as the environment takes it.

    A number, or lists and tables as the space has parts.
    """
