"""Versions that are kept, and the policy server."""

from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from penstock.config.sections.section import NonNegative, Positive, PositiveReal, Section


class ServingSection(Section):
    """Versions that are kept, and the policy server."""

    listen: str = ""
    """Where the policy server that the launcher starts listens, HOST:PORT or unix:/path; empty: it starts none."""
    registry: str = ""
    """URL of the registry of versions: sqlite:///FILE or postgresql://USER@HOST/DATABASE, the password in `serving.registry_password_file`, PGPASSWORD or a passfile; empty: `registry.sqlite` in the run's folder."""
    registry_password_file: Path | None = None
    """File with the password of the registry's user; none: libpq looks for it."""
    policy: str = "default"
    """Name of the policy, under which its versions are registered and served; runs that share a registry need one each."""
    activate_first: bool = True
    """The first best or last version becomes active where none is, and the best one when the run ends, unless an operator has decided by then; false: an operator promotes, and clients follow the learner until then. `penstock train --serve` means false unless it is said."""
    refresh_s: PositiveReal = 1.0
    """Versions and traffic are read again after this long, in seconds."""
    max_request_rows: Positive = 1024
    """Most observations in one request."""
    max_batch_rows: Positive = 256
    """Observations of several requests that share one forward pass, at most; one larger request passes alone."""
    max_wait_ms: NonNegative = 1.0
    """Longest that a request waits for others to share its forward pass, in milliseconds; a lonely client waits for nobody."""
    max_delay_ms: PositiveReal = 100.0
    """Requests that would wait longer than this for their turn are refused at once, in milliseconds."""
    max_calls_per_s: PositiveReal = 100_000.0
    """Requests that one named client, or one connection of others, may make in a second; far more than is answered, so that load is shed by `max_delay_ms` first."""
    max_episodes: Annotated[int, Field(gt=0, le=100_000)] = 10_000
    """Most episodes open at once."""
    episode_timeout_s: PositiveReal = 60.0
    """An episode that is not heard of for this long is given up, in seconds."""
    reward_window_s: NonNegative = 0.0
    """Rewards may come this long after their step, in seconds; the experience is held back so long."""
    max_fragment_age_s: PositiveReal = 10.0
    """An episode that is slow takes newer weights after this long, in seconds."""
    declared_steps_per_s: PositiveReal | None = None
    """Steps that all clients make in a second, for the check that rewards that come late do not make experience stale; none: no check."""
    max_buffered_bytes: Positive = 256 * 1024 * 1024
    """Observations of open episodes held for the learner; beyond it episodes are answered and not learned from."""
    outbox_fragments: Positive = 1024
    """Fragments kept until acknowledged; beyond it experience is counted and dropped."""
    shadow_record: Path | None = None
    """File of JSON lines for what the shadow would have answered; none: `shadow.jsonl` in the run's folder, if one is served."""
    fallback: Literal["previous", "fixed", "uniform", "none"] = "previous"
    """Who answers when no version can: the one that answered before (then a uniform draw), `fallback_action`, a uniform draw, or nobody."""
    canary_horizon: Positive = 200
    """Episodes of the canary within which it is judged."""
    canary_false_alarm: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    """Chance that a canary no worse than the active version is withdrawn."""
    canary_slow_ms: PositiveReal = 50.0
    """An answer that takes longer in the server is slow, in milliseconds."""
    canary_return_range: tuple[float, float] | None = None
    """Lowest and highest return of an episode; none: from the active version's evaluation."""
    fallback_action: Any = None
    """The action of fallback=fixed, as the environment takes it: a number, or lists and tables as the space has parts."""

    @field_validator("registry")
    @classmethod
    def _holds_no_password(cls, url: str) -> str:
        """Files show the URL as it is."""
        if "://" in url and urlsplit(url).password is not None:
            raise ValueError(
                "leave the password out of the URL; give it in PGPASSWORD, a passfile or serving.registry_password_file"
            )
        return url
