"""The policy server: what it answers, and what of it is learned from."""

from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from penstock.config.sections.section import ADVANCED, NonNegative, Positive, PositiveReal, Section

_LEAST_TEMPERATURE: Final = 1e-6


def _off_or_enough(temperature: float) -> float:
    if 0 < temperature < _LEAST_TEMPERATURE:
        raise ValueError(f"use 0 for none, or at least {_LEAST_TEMPERATURE:g}")
    return temperature


class ServingSection(Section):
    """The policy server: what it answers, and what of it is learned from."""

    listen: str = ""
    """Address of the launcher's policy server, HOST:PORT or unix:/path; empty: it starts none."""
    policy: str = "default"
    """Name under which versions are registered and served; runs that share a registry need one each."""
    max_request_rows: Annotated[Positive, ADVANCED] = 1024
    """Most observations in one request."""
    max_batch_rows: Positive = 256
    """Most observations of several requests in one forward pass; a larger request passes alone."""
    max_wait_ms: Annotated[NonNegative, ADVANCED] = 1.0
    """Longest that a request waits for others to share its pass, in milliseconds; a single client: 0."""
    max_delay_ms: PositiveReal = 100.0
    """Requests that would wait longer than this for their turn are refused at once, in milliseconds."""
    max_calls_per_s: Annotated[PositiveReal, ADVANCED] = 100_000.0
    """Requests of one named client, or of one connection of others, per second; far more than is answered."""
    max_episodes: Annotated[int, Field(gt=0, le=100_000)] = 10_000
    """Most episodes open at once."""
    softmax_temperature: Annotated[NonNegative, ADVANCED, AfterValidator(_off_or_enough)] = 0.0
    """Above 0: actions of a policy of values (DQN) are drawn from the softmax of values / temperature."""
    episode_timeout_s: Annotated[PositiveReal, ADVANCED] = 60.0
    """An episode that is not heard of for this long is given up, in seconds."""
    reward_window_s: NonNegative = 0.0
    """Rewards may come this long after their step, in seconds; the experience is held back so long."""
    max_fragment_age_s: Annotated[PositiveReal, ADVANCED] = 10.0
    """An episode that is slow takes newer weights after this long, in seconds."""
    declared_steps_per_s: Annotated[PositiveReal | None, ADVANCED] = None
    """Steps of all clients per second, to check that late rewards leave no experience stale; none: off."""
    max_buffered_bytes: Annotated[Positive, ADVANCED] = 256 * 1024 * 1024
    """Memory for steps of open episodes, held for the learner; beyond it episodes are not learned from."""
    arms_without_thought: Annotated[
        tuple[Literal["latest", "active", "canary", "pinned"], ...], ADVANCED
    ] = ()
    """Arms on which a model that thinks answers without a thought; a canary tells what thoughts are worth."""
    outbox_fragments: Annotated[Positive, ADVANCED] = 1024
    """Fragments kept until acknowledged; beyond it experience is counted and dropped."""
    shadow_record: Path | None = None
    """File of JSON lines for the shadow's answers; none: `shadow.jsonl` of the run, if a shadow is served."""
    fallback: Literal["previous", "fixed", "uniform", "none"] = "previous"
    """What answers when no version can: the previous one, `fallback_action`, a uniform draw, or nothing."""
    fallback_action: Any = None
    """The action of fallback=fixed, as the environment takes it: a number, or lists and tables by part."""
