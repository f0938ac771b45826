"""The one configuration model: TOML, then environment, then `--set`; unknown keys are errors.

Every knob has a line of help and, where it has one, a unit. Environment variables are
`PENSTOCK_SECTION__KEY`. Values that are None are chosen by the workload's defaults or the machine.
"""

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from penstock.runtime.redis_url import split_password
from penstock.wire.limits import MAX_EPISODES_PER_REPORT, MAX_SLOTS, MAX_STEPS

ENVIRONMENT_PREFIX = "PENSTOCK_"
_SECRETS = ("security.redis_password", "serving.registry", "tracing.endpoint")

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveReal = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]


class ConfigurationError(ValueError):
    """A configuration that cannot be used; the message names key, value and remedy."""


class Section(BaseModel):
    """A part of the configuration: frozen, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def canonical_json(self) -> str:
        """Keys sorted, no spaces: equal sections have equal text."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


class EnvironmentSection(Section):
    """What the actors step."""

    id: str = "CartPole-v1"
    """Any Gymnasium id; `module:Id` imports the module first."""
    kwargs: dict[str, Any] = {}
    """Arguments of the environment's constructor."""
    count: Annotated[int, Field(gt=0, le=MAX_SLOTS)] = 8
    """Environments per actor (N)."""
    vectorise: Literal["auto", "sync", "vector", "async"] = "auto"
    """sync: one loop in the actor; vector: the environment's own vector entry point; async: one process each; auto: vector where the environment has one, else sync."""
    max_episode_steps: Positive | None = None
    """Overrides the time limit of the registered environment, in steps."""


class PolicySection(Section):
    """The network that acts and is trained."""

    hidden_sizes: tuple[Positive, ...] = (64, 64)
    """Widths of the hidden layers of the MLP."""
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"
    """Non-linearity between layers."""
    shared_trunk: bool = False
    """True: actor and critic share all but their last layer."""
    normalise_observations: bool = False
    """Keep a running mean and variance of the observations as part of the weights."""
    observation_clip: NonNegative = 10.0
    """Normalised observations are clipped to ± this many standard deviations."""
    continuous: Literal["clipped", "squashed"] = "clipped"
    """clipped: diagonal Gaussian, actions clipped to the bounds by the environment side; squashed: tanh of a Gaussian."""
    initial_log_std: float = 0.0
    """Initial log standard deviation of Gaussian actions."""


class AlgorithmSection(Section):
    """How the learner learns."""

    name: Literal["ppo"] = "ppo"
    """Which algorithm."""
    batch_steps: Positive = 2048
    """Steps of one update (B)."""
    staleness: Annotated[int, Field(ge=0)] = 1
    """Updates that experience may lag behind when it is begun (S); 0: lock-step."""
    stale_after: Positive | None = None
    """Fragments older than this many updates at their turn are dropped as stale (H); default 4(S+1)."""
    epochs: Positive = 4
    """Passes over each batch."""
    minibatches: Positive = 4
    """Gradient steps per epoch."""
    discount: Fraction = 0.99
    """γ, per step."""
    gae_lambda: Fraction = 0.95
    """λ of GAE and V-trace."""
    advantage: Literal["gae", "vtrace"] = "gae"
    """How advantages and value targets are estimated, once per batch with the current critic."""
    objective: Literal["decoupled", "coupled"] = "decoupled"
    """decoupled: clip around the policy at batch start (Hilton et al. 2021); coupled: around the behaviour policy."""
    rho_clip: NonNegative = 1.0
    """ρ̄ of V-trace."""
    c_clip: NonNegative = 1.0
    """c̄ of V-trace."""
    behaviour_weight_cap: NonNegative = 5.0
    """Largest π_prox/μ of the decoupled objective."""
    clip_range: NonNegative = 0.2
    """ε of the surrogate."""
    clip_schedule: Literal["constant", "linear"] = "constant"
    """linear: ε falls to 0 over `learner.total_steps`."""
    value_clip: NonNegative | None = None
    """Largest change of a value in one update; none: off."""
    value_coefficient: NonNegative = 0.5
    """Weight of the value loss."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    normalise_advantages: bool = True
    """Standardise the advantages of each batch over its valid steps."""
    scale_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return (stays in the learner)."""
    learning_rate: NonNegative = 3e-4
    """Step size of Adam."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate over `learner.total_steps`."""
    warmup_updates: Annotated[int, Field(ge=0)] = 0
    """Updates over which the learning rate rises from 0."""
    adam_epsilon: NonNegative = 1e-5
    """ε of Adam."""
    max_gradient_norm: NonNegative = 0.5
    """Gradients are scaled down to this norm; 0: off."""
    target_kl: NonNegative | None = None
    """Stop the epochs of an update when KL(π_prox‖π_θ) exceeds 1.5 times this; none: off."""


class ActorSection(Section):
    """How experience is generated. The learner's values hold for every actor of the run; an actor elsewhere sets only `threads`, `outbox_fragments`, `stall_timeout_s`, `allow_modules` and `ack_journal` for itself."""

    count: Annotated[int, Field(ge=0)] = 2
    """Rollout workers that the launcher starts, and that open round 0 in lock-step; 0: only clients act, see `serving.listen`."""
    unroll_length: Annotated[int, Field(gt=0, le=MAX_STEPS)] = 32
    """Steps per slot of a fragment (T); the run's, not an actor's."""
    outbox_fragments: Positive = 8
    """Fragments kept until acknowledged; when full the environment waits. An actor may set its own."""
    compress: Literal["off", "lz4"] = "off"
    """Compression of observation tensors; the run's, not an actor's."""
    threads: Positive = 1
    """Threads of the policy's forward pass; an actor may set its own."""
    allow_modules: tuple[str, ...] = ()
    """Modules that a run specification may make this actor import, beside Gymnasium's and installed workloads; an actor's own."""
    stall_timeout_s: Positive = 120
    """Health turns red when the environment makes no step for this long, in seconds; an actor may set its own."""
    ack_journal: Path | None = None
    """Folder in which each actor records what was acknowledged to it, for `penstock audit`; none: no record. An actor's own."""


class BrokerSection(Section):
    """The front of the buffer."""

    redis: str = ""
    """URL of the Redis server: redis://, rediss:// or unix://; empty: the launcher starts one. A password in it is kept as `security.redis_password`."""
    durability: Literal["memory", "fsync_1s", "fsync"] = "fsync_1s"
    """What an acknowledgement must survive; a Redis that gives less is refused."""
    declared_durability: Literal["memory", "fsync_1s", "fsync"] | None = None
    """What the Redis server gives, where it does not let CONFIG GET be asked."""
    redis_wait_s: Positive = 60
    """Give up when Redis does not answer for this long, in seconds."""
    drain_delay_s: NonNegative = 0.0
    """A broker that is asked to end serves on for this long while it is not ready, in seconds: balancers take it out first. 5 in Kubernetes."""
    session_timeout_s: PositiveReal = 30.0
    """A session that says nothing for this long is closed, in seconds of Redis time."""
    max_log_bytes: Positive = 512 * 1024 * 1024
    """Ceiling of the payload bytes in the log."""
    max_log_entries: Positive = 1_000_000
    """Ceiling of the entries in the log."""
    max_memory_bytes: Positive = 2 * 1024 * 1024 * 1024
    """`maxmemory` of the embedded Redis server."""
    max_staged_bytes: Positive = 256 * 1024 * 1024
    """Most payload bytes that one broker has staged and not yet appended."""
    stall_timeout_s: Positive = 30
    """Health of a broker turns red when its event loop does not come round for this long, that of the embedded Redis when it does not answer, in seconds."""
    patched_redis: str = ""
    """A version such as 7.0.15 whose vendor has fixed the known remote code executions without a new number: it is then used over TCP too."""
    max_calls_per_s: PositiveReal = 2000.0
    """Calls that one named caller, or one connection of others, may make in a second."""
    max_bytes_per_s: PositiveReal = 1024.0 * 1024 * 1024
    """Bytes that it may send and fetch in a second."""
    max_concurrent_calls: Positive = 8192
    """Calls in hand at once, held ones included; every actor holds one."""
    max_connections: Positive = 4096
    """Connections at once; more are closed."""
    max_connection_age_s: PositiveReal = 900.0
    """A connection is asked to come again after this long, in seconds, give or take a tenth."""


class LearnerSection(Section):
    """The process that learns."""

    total_steps: Positive | None = None
    """The run ends after this many environment steps; none: the workload's default."""
    target_return: float | None = None
    """The run ends when the evaluated mean return reaches this; none: the environment's own threshold."""
    stop_at_target: bool = True
    """Evaluate when the last 20 training episodes reach the target, and stop when the evaluation does."""
    checkpoint_interval_s: NonNegative = 30.0
    """Seconds between checkpoints."""
    keep_checkpoints: Annotated[int, Field(ge=2)] = 3
    """Committed checkpoints kept on disk."""
    prefetch_batches: Positive = 2
    """Batches read ahead of the update."""
    lease_ttl_s: PositiveReal = 15.0
    """Another learner may take over this long after the last renewal, in seconds of Redis time."""
    threads: Positive = 1
    """Threads of the update."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one."""
    stall_timeout_s: Positive = 300
    """Longest time without an update while not paused, in seconds: health turns red, and the run ends as failed."""
    keep_every_updates: Positive | None = None
    """Register the version that follows every so many updates, beside the best and the last; none: only those two."""
    probe_tolerance: NonNegative = 1e-3
    """Most that an actor's answer to the probe may differ from the learner's answer r, times 1 + |r|."""


class EvaluationSection(Section):
    """Separate environments that only measure."""

    episodes: Annotated[int, Field(gt=0, le=MAX_EPISODES_PER_REPORT)] = 100
    """Episodes of one evaluation; the i-th is seeded with `seed` + i."""
    seed: Annotated[int, Field(ge=0)] = 1_000_000
    """First seed."""
    deterministic: bool = True
    """Play the most likely action; false: draw actions as in training."""
    interval_steps: Positive | None = None
    """Evaluate the newest version every so many environment steps; none: only when the target is in reach and at the end."""
    timeout_s: Positive = 600
    """Give up waiting for an evaluation after this long, in seconds."""


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
    """The first best or last version becomes active where none is; false: an operator promotes, and clients follow the learner until then. `penstock train --serve` means false unless it is said."""
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


class SecuritySection(Section):
    """Who may talk to whom."""

    insecure: bool = False
    """Allow plaintext beyond loopback and unix sockets."""
    tls_certificate: Path | None = None
    """PEM file of this process's certificate chain."""
    tls_key: Path | None = None
    """PEM file of its key."""
    tls_authority: Path | None = None
    """PEM file of the authority that signs the peers."""
    token_file: Path | None = None
    """File with the token that this process shows over TLS, where the server asks for tokens."""
    accepted_tokens: Path | None = None
    """File with the digests of the tokens that this server accepts, in place of client certificates; `penstock certificates` writes it."""
    redis_password: SecretStr | None = None
    """Password of the Redis user; one in the URL goes before it. Never written to a file."""
    redis_password_file: Path | None = None
    """File with that password, where it is not set otherwise."""


class MetricsSection(Section):
    """Prometheus, health and trackers."""

    host: str = "127.0.0.1"
    """Address of the HTTP port with /metrics, /healthz and /readyz."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Its port; 0: any free one. Under `penstock train` both are the launcher's; services take free ports of loopback."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where the learner also writes the figures of `metrics.jsonl`: tensorboard, event files in the run's folder; wandb, Weights & Biases. Each needs the extra of its name."""
    wandb_project: str = "penstock"
    """Project of the tracker wandb."""
    wandb_mode: Literal["online", "offline"] = "online"
    """offline: into the run's folder, for `wandb sync`."""


class LogsSection(Section):
    """What every process writes to stderr."""

    format: Literal["text", "json"] = "text"
    """text: `time level role message key=value …`; json: an object per line, with role, run and all fields."""


class TracingSection(Section):
    """Where OpenTelemetry traces of fragments go; needs the extra `tracing`."""

    exporter: Literal["none", "otlp", "file"] = "none"
    """none: no traces; otlp: to a collector, OTLP over HTTP; file: a file for each process, a span per line as JSON."""
    endpoint: str = "http://127.0.0.1:4318/v1/traces"
    """URL of the collector for exporter=otlp. Headers that it asks for: OTEL_EXPORTER_OTLP_HEADERS in the environment."""
    folder: Path | None = None
    """Folder of the files of exporter=file; none: `traces` in the run's folder under `penstock train`."""
    sample_ratio: Fraction = 0.1
    """Share of the fragments that are traced; the same for every process of a run."""

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, url: str) -> str:
        """Files show it as it is."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ValueError(
                "write http://HOST:PORT/v1/traces or https://…, without a name or password; "
                "give those as OTEL_EXPORTER_OTLP_HEADERS"
            )
        return url


class Settings(Section):
    """The whole configuration of a run."""

    run: str = ""
    """Name of the run; empty: `penstock train` makes one from the environment and a random suffix. A learner on its own must be given one."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the run."""
    workload: str = "control"
    """Installed workload."""
    environment: EnvironmentSection = EnvironmentSection()
    policy: PolicySection = PolicySection()
    algorithm: AlgorithmSection = AlgorithmSection()
    actor: ActorSection = ActorSection()
    broker: BrokerSection = BrokerSection()
    learner: LearnerSection = LearnerSection()
    evaluation: EvaluationSection = EvaluationSection()
    serving: ServingSection = ServingSection()
    security: SecuritySection = SecuritySection()
    metrics: MetricsSection = MetricsSection()
    logs: LogsSection = LogsSection()
    tracing: TracingSection = TracingSection()


def parse_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file; raises ConfigurationError that names file and line."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; give a TOML file that can be read") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path}: not TOML: {error}") from error


def parse_assignment(text: str) -> dict[str, Any]:
    """`section.key=value` as nested dictionaries; the value is TOML where it parses, else a string.

    A secret is a string, whatever it looks like.
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigurationError(f"--set {text!r}: write section.key=value")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    if key in _SECRETS and not isinstance(parsed, str):
        parsed = value
    for part in reversed(key.split(".")):
        parsed = {part: parsed}
    return dict(parsed)


def from_environment(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Every `PENSTOCK_SECTION__KEY=value` as nested dictionaries."""
    merged: dict[str, Any] = {}
    for name, value in environ.items():
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            merged = merge(merged, parse_assignment(f"{key}={value}"))
    return merged


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, section by section."""
    result = dict(base)
    for key, value in over.items():
        inner = result.get(key)
        if isinstance(inner, Mapping) and isinstance(value, Mapping) and key != "kwargs":
            result[key] = merge(inner, value)
        else:
            result[key] = value
    return result


def load(layers: Iterable[Mapping[str, Any]]) -> Settings:
    """Validate the layers laid on one another, first to last.

    A password in `broker.redis` becomes `security.redis_password`: the URL may be shown, the secret may not.
    Raises ConfigurationError with a line per mistake: key, value and what is allowed.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = merge(merged, layer)
    merged = merge(merged, _without_url_password(merged))
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        raise ConfigurationError("\n".join(_explain(dict(e)) for e in error.errors())) from error


def redis_layer(url: str) -> tuple[str, dict[str, Any]]:
    """A URL without its password, and the password as a layer for `load` (empty when there is none)."""
    shown, password = split_password(url)
    return shown, {} if password is None else {"security": {"redis_password": password}}


def _without_url_password(merged: Mapping[str, Any]) -> dict[str, Any]:
    section = merged.get("broker")
    url = section.get("redis") if isinstance(section, Mapping) else None
    if not isinstance(url, str):
        return {}
    shown, secret = redis_layer(url)
    return {"broker": {"redis": shown}} | secret if secret else {}


def _explain(error: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{key}: unknown key; `penstock train --print-config` lists the known ones"
    shown = "**********" if key in _SECRETS else repr(error["input"])
    return f"{key}={shown}: {error['msg']}"
