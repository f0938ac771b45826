"""The sections of the configuration, except those of algorithms."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from penstock.protocol.limits import MAX_EPISODES_PER_REPORT, MAX_SLOTS, MAX_STEPS

# ---- The base of all sections, and kinds of numbers.

MOST: Final = 2**53
"""Bound of every whole number: JSON loses digits beyond it."""
MOST_REAL: Final = 1e9
"""Default bound of real numbers: as seconds 31 years, which clocks and waits accept."""

Positive = Annotated[int, Field(gt=0, le=MOST)]
Threads = Annotated[int, Field(gt=0, le=1024)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Width = Annotated[int, Field(gt=0, le=2**16)]
"""Of a layer: the square of a larger one, its weights, would fill 64 GiB."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveReal = Annotated[float, Field(gt=0.0, le=MOST_REAL)]
NonNegative = Annotated[float, Field(ge=0.0, le=MOST_REAL)]


@dataclass(frozen=True, slots=True)
class Advanced:
    """Marks a field that few runs set: `--print-config` shows it on request, or where it is set."""


ADVANCED: Final = Advanced()


class Section(BaseModel):
    """A part of the configuration: frozen; unknown keys, infinity and NaN are errors.

    So are true and false in the place of a number, which pydantic would read as 1 and 0.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_as_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None, "it is a field that is looked at"
        kind = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and not any(
            one in (bool, Any, True, False) for one in (kind, *get_args(kind))
        ):
            raise ValueError("is no number; write one")
        return value

    @classmethod
    def is_advanced(cls, field: str) -> bool:
        return ADVANCED in cls.model_fields[field].metadata

    def canonical_json(self, exclude: set[str] | None = None) -> str:
        return json.dumps(
            self.model_dump(mode="json", exclude=exclude), sort_keys=True, separators=(",", ":")
        )


class ActorSection(Section):
    """The generation of experience.

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


class BrokerSection(Section):
    """The broker, and its Redis."""

    redis: str = ""
    """URL of Redis: redis://, rediss:// or unix://, its password kept aside; empty: that of the launcher."""
    durability: Literal["memory", "fsync_1s", "fsync"] = "fsync_1s"
    """What an acknowledgement must survive; a Redis that gives less is refused."""
    declared_durability: Annotated[Literal["memory", "fsync_1s", "fsync"] | None, ADVANCED] = None
    """Durability of a Redis server that does not allow CONFIG GET."""
    redis_wait_s: Annotated[Positive, ADVANCED] = 60
    """Broker, learner and launcher end when Redis does not answer for this long, in seconds."""
    drain_delay_s: Annotated[NonNegative, ADVANCED] = 0.0
    """Time for which an ending broker still serves while it is not ready, in seconds; 5 in Kubernetes."""
    session_timeout_s: Annotated[PositiveReal, ADVANCED] = 30.0
    """A session that is silent for this long is closed, in seconds of Redis time."""
    max_reward: PositiveReal = 1e6
    """Fragments with a |reward| of a step above this are refused, in units of the reward."""
    max_log_prob: Annotated[PositiveReal, ADVANCED] = 1e4
    """Fragments with a |log-probability| of a step above this are refused, in nats."""
    max_log_bytes: Positive = 512 * 1024 * 1024
    """Ceiling of the bytes that the log's entries take in Redis, headers and overhead included."""
    max_log_entries: Positive = 1_000_000
    """Ceiling of the entries in the log."""
    max_memory_bytes: Positive = 2 * 1024 * 1024 * 1024
    """`maxmemory` of the embedded Redis server."""
    max_staged_bytes: Annotated[Positive, ADVANCED] = 256 * 1024 * 1024
    """Most payload bytes that one broker has staged and not yet appended."""
    stall_timeout_s: Annotated[Positive, ADVANCED] = 30
    """Health turns red when the event loop or the embedded Redis hangs for this long, in seconds."""
    patched_redis: Annotated[str, ADVANCED] = ""
    """A version such as 7.0.15 that the vendor has fixed under its old number; it may be used over TCP."""
    max_calls_per_s: Annotated[PositiveReal, ADVANCED] = 2000.0
    """Calls that one named caller, or one connection of others, may make in a second."""
    max_bytes_per_s: Annotated[float, Field(gt=0.0, le=MOST), ADVANCED] = 1024.0 * 1024 * 1024
    """Bytes that such a caller may send and fetch in a second."""
    max_concurrent_calls: Annotated[Positive, ADVANCED] = 8192
    """Concurrent calls, long polls included, of which every actor has one."""
    max_connections: Annotated[Positive, ADVANCED] = 4096
    """Connections at once; more are closed."""
    max_connection_age_s: Annotated[PositiveReal, ADVANCED] = 900.0
    """A connection is asked to reconnect after this long, in seconds, ± 10 %."""


class CanarySection(Section):
    """The comparison of a canary with the active version, by policy servers."""

    horizon: Positive = 200
    """Clients of the canary after which it is undecided without a verdict; the trial continues."""
    false_alarm: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    """Probability that a canary which equals the active version is ever withdrawn, or called better."""
    settle_s: Annotated[PositiveReal, ADVANCED] = 15.0
    """A client's return is compared this long after its begin, and 8 and 64 times as long, in seconds."""
    return_range: tuple[float, float] | None = None
    """Lowest and highest return of a client that is accepted; none: any."""
    slow_ms: Annotated[PositiveReal, ADVANCED] = 50.0
    """An answer that takes longer in the server is slow, in milliseconds."""


class RewardWrapper(Section):
    """One change to the learner's rewards: exactly one of `clip`, `scale` and `shape`."""

    clip: tuple[float, float] | None = None
    """Lowest and highest reward of a step."""
    scale: float | None = None
    """Factor of every reward."""
    shape: str | None = None
    """`module:function`, a potential Φ of observations: γΦ(s') − Φ(s) is added (Ng et al. 1999)."""
    discount: Fraction | None = None
    """γ of `shape`; none: `algorithm.discount`, with which shaping changes no optimal policy."""

    @model_validator(mode="after")
    def _is_one_change(self) -> Self:
        if sum(value is not None for value in (self.clip, self.scale, self.shape)) != 1:
            raise ValueError("give one of clip = [LOW, HIGH], scale = FACTOR, shape = 'module:function'")
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ValueError("clip: the first number must be below the second")
        if self.shape is not None and not all(self.shape.partition(":")):
            raise ValueError("shape: write module:function")
        if self.discount is not None and self.shape is None:
            raise ValueError("discount: only shape has one")
        return self


class AtariSection(Section):
    """Preprocessing of Atari games, ids `ALE/…`, after Mnih et al. 2015.

    An observation is the maximum of the last two frames of a step, grey, 84 by 84.
    """

    frame_skip: Annotated[int, Field(gt=0, le=64)] = 4
    """Frames of the console in a step, with the same action."""
    noop_max: Annotated[int, Field(gt=0, le=1000)] = 30
    """Most frames without an action at the begin of a game; their number, at least 1, is drawn."""
    episodic_life: bool = True
    """Whether a lost life ends an episode of training; evaluations always play whole games."""
    sticky_actions: Fraction = 0.0
    """Probability that a frame repeats the action before it; Machado et al. 2018 propose 0.25."""


class EnvironmentSection(Section):
    """The environments that actors step."""

    id: str = "CartPole-v1"
    """Any Gymnasium id; `module:Id` imports the module first."""
    kwargs: dict[str, Any] = {}
    """Arguments of the environment's constructor."""
    count: Annotated[int, Field(gt=0, le=MAX_SLOTS)] = 8
    """Environments per actor (N)."""
    vectorise: Literal["auto", "sync", "vector", "async", "envpool"] = "auto"
    """sync: one loop; async: processes; envpool: threads; vector: its own entry; auto: vector, else sync."""
    max_episode_steps: Positive | None = None
    """Overrides the time limit of the registered environment, in steps."""
    reward: tuple[RewardWrapper, ...] = ()
    """Changes to the learner's rewards, first to last, such as `[{clip = [-1, 1]}, {scale = 0.1}]`."""
    mask_key: str = ""
    """Key of the Dict observation, or else of `info`, that holds the allowed actions; empty: all are."""
    atari: Annotated[AtariSection | None, ADVANCED] = None
    """How an Atari game (`ALE/…`) is shown and played, such as `{frame_skip = 4, episodic_life = true}`."""

    def for_evaluation(self) -> Self:
        """Return the section for evaluations: one seed for each episode where possible, and whole games."""
        changes: dict[str, Any] = {}
        if self.vectorise in ("auto", "async"):
            changes["vectorise"] = "sync"
        if self.atari is not None:
            changes["atari"] = self.atari.model_copy(update={"episodic_life": False})
        return self.model_copy(update=changes)


class LearnerSection(Section):
    """The process that learns."""

    total_steps: Positive | None = None
    """The run ends after this many environment steps; none: the workload's default."""
    total_episodes: Annotated[Positive | None, ADVANCED] = None
    """The run ends once this many training episodes have ended, of all actors; none: any number.

    More of them end, since environments are stepped together and in whole batches; the summary has how many.
    """
    total_updates: Annotated[Positive | None, ADVANCED] = None
    """The run ends after this many updates, where nothing ends it before; none: any number."""
    total_seconds: Annotated[PositiveReal | None, ADVANCED] = None
    """The run ends after the update in which training has taken this many seconds; none: any number."""
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
    """Most bytes of a recording: it ends there, and learning continues."""
    feed_from: Annotated[Path | None, ADVANCED] = None
    """Learn from the recording in this folder and not from actors; `penstock train --from` sets it."""
    probe_tolerance: Annotated[NonNegative, ADVANCED] = 1e-3
    """Most that an actor's answer to the probe may differ from the learner's answer r, times 1 + |r|."""


class EvaluationSection(Section):
    """Evaluations, in separate environments."""

    episodes: Annotated[int, Field(ge=0, le=MAX_EPISODES_PER_REPORT)] = 100
    """Episodes of one evaluation; the i-th is seeded with `seed` + i. 0: the run is not evaluated."""
    seed: Annotated[int, Field(ge=0)] = 1_000_000
    """First seed."""
    environments: Annotated[int | None, Field(gt=0, le=MAX_SLOTS)] = None
    """Environments that the evaluator steps at once, in one process.

    None: `environment.count`, or one for each episode, 100 at most, where they step as one vector.
    """
    max_episode_steps: Positive = 27_000
    """Steps after which an episode is cut, for environments without a limit of their own."""
    deterministic: bool = True
    """Play the most likely action; false: draw actions as in training. Only this way of playing counts."""
    both: bool = False
    """Also play the other way, on the same seeds, and report both; takes twice as long."""
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


class MetricsSection(Section):
    """Prometheus, health and trackers."""

    host: str = "127.0.0.1"
    """Address of the HTTP port with /metrics, /healthz and /readyz."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Its port; 0: any free one. Under `penstock train` it is the port of the launcher."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Trackers that also get `metrics.jsonl`: tensorboard, wandb; each needs the extra of its name."""
    wandb_project: str = "penstock"
    """Project of the tracker wandb."""
    wandb_mode: Literal["online", "offline"] = "online"
    """offline: into the run's folder, for `wandb sync`."""


class LogsSection(Section):
    """Log lines of every process, on stderr."""

    format: Literal["text", "json"] = "text"
    """text: `time level role message key=value …`; json: an object a line, with role, run and all fields."""


class PolicySection(Section):
    """The network of the policy."""

    network: str = ""
    """Network between observations and heads, `module:Class` (docs/policies.md); empty: trunks and an MLP."""
    network_arguments: dict[str, Any] = {}
    """Arguments of that class."""
    kwargs: Annotated[dict[str, Any], ADVANCED] = {}
    """Arguments of a workload's own kind of policy, such as the language model to train."""
    hidden_sizes: tuple[Width, ...] = (64, 64)
    """Widths of the hidden layers of the MLP."""
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"
    """Non-linearity between layers."""
    hidden_norm: Literal["none", "layer", "batch"] = "none"
    """Normalisation between hidden layer and non-linearity; batch: its statistics are part of the weights."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of hidden features dropped where the learner differentiates; actors act with all of them."""
    initialisation: Annotated[Literal["orthogonal", "xavier"], ADVANCED] = "orthogonal"
    """First weights, biases are 0; orthogonal: small before the actions; xavier: uniform (Glorot 2010)."""
    image_trunk: Literal["auto", "nature", "small", "impala"] = "auto"
    """Convolutions of images: Nature, two of 3x3, or IMPALA's; auto: Nature from 36 pixels on, else small."""
    image_axes: Annotated[Literal["auto", "channels_first", "channels_last"], ADVANCED] = "auto"
    """Which axis of an image of three is that of its channels; auto: height and width are the most alike."""
    shared_trunk: bool = False
    """True: actor and critic share all but their last layer."""
    normalise_observations: bool = False
    """Keep a running mean and variance of the observations as part of the weights."""
    observation_clip: Annotated[NonNegative, ADVANCED] = 10.0
    """Normalised observations are clipped to ± this many standard deviations."""
    continuous: Literal["clipped", "squashed"] = "clipped"
    """clipped: diagonal Gaussian, of which −1..1 is stretched to the bounds; squashed: tanh of one."""
    initial_log_std: Annotated[float, Field(ge=-20.0, le=20.0), ADVANCED] = 0.0
    """Initial log standard deviation of Gaussian actions."""
    state_dependent_std: Annotated[bool, ADVANCED] = False
    """The network outputs the deviations of squashed Gaussians, as in SAC; false: they are parameters."""
    discrete: Annotated[Literal["categorical", "epsilon_greedy"], ADVANCED] = "categorical"
    """Outputs of a choice. categorical: logits; epsilon_greedy: action values, the best but for a share ε."""
    dueling: Annotated[bool, ADVANCED] = False
    """Action values are the critic's value plus advantages (Wang et al. 2016); `shared_trunk`: one trunk."""
    recurrent: Literal["none", "lstm", "gru"] = "none"
    """A recurrent core between the hidden layers and what comes out; with separate trunks one for each."""
    recurrent_size: Width = 64
    """Width of the core's state."""
    burn_in: Count = 0
    """First steps of each fragment that only refresh the state; fewer than `actor.unroll_length`."""
    frame_stack: Annotated[int, Field(gt=0, le=MAX_STEPS)] = 1
    """Observations of an episode that the policy sees at once, the newest ones; each is sent once."""


class RegistrySection(Section):
    """The registry of policy versions."""

    url: str = ""
    """sqlite:///FILE or postgresql://USER@HOST/DATABASE, the password in `registry.password_file`, PGPASSWORD
    or a passfile; empty: `registry.sqlite` in the run's folder."""
    password_file: Path | None = None
    """File with the password of the registry's user; none: libpq looks for it."""
    activate_first: bool = True
    """The first best or last version becomes active where none is, and the best one when the run ends, unless
    an operator has decided by then; false: an operator promotes, and clients follow the learner until then.
    `penstock train --serve` means false unless it is set."""
    refresh_s: Annotated[PositiveReal, ADVANCED] = 1.0
    """A policy server reads versions and traffic again after this long, in seconds."""


class SecuritySection(Section):
    """Certificates, tokens and passwords."""

    insecure: bool = False
    """Allow plaintext beyond loopback and unix sockets."""
    tls_certificate: Path | None = None
    """PEM file of this process's certificate chain."""
    tls_key: Path | None = None
    """PEM file of its key."""
    tls_authority: Path | None = None
    """PEM file of the authority that signs the peers."""
    token_file: Path | None = None
    """File with the token that this process sends over TLS to a server that requires tokens."""
    accepted_tokens: Path | None = None
    """File of digests of accepted tokens, from `penstock certificates`, in place of client certificates."""
    redis_password: SecretStr | None = None
    """Password of the Redis user, from the environment; a command line that names it is refused."""
    redis_password_file: Path | None = None
    """File with that password, where it is not set otherwise."""
    http_headers_file: Path | None = None
    """File of headers, one NAME: VALUE a line, for HTTP endpoints of rewards."""


_LEAST_TEMPERATURE: Final = 1e-6


def _off_or_enough(temperature: float) -> float:
    if 0 < temperature < _LEAST_TEMPERATURE:
        raise ValueError(f"use 0 for none, or at least {_LEAST_TEMPERATURE:g}")
    return temperature


class ServingSection(Section):
    """The policy server: its answers, and the experience from them."""

    listen: str = ""
    """Address of the launcher's policy server, HOST:PORT or unix:/path; empty: it starts none."""
    http_listen: Annotated[str, ADVANCED] = ""
    """A server of text answers OpenAI's API over HTTP here, HOST:PORT of this machine; empty: nowhere."""
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
    """An episode without a call for this long is abandoned, in seconds."""
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
    """Arms on which a thinking model answers without a thought; a canary shows the value of thoughts."""
    outbox_fragments: Annotated[Positive, ADVANCED] = 1024
    """Fragments kept until acknowledged; beyond it experience is counted and dropped."""
    shadow_record: Path | None = None
    """File of JSON lines for the shadow's answers; none: `shadow.jsonl` of the run, if a shadow is served."""
    fallback: Literal["previous", "fixed", "uniform", "none"] = "previous"
    """What answers when no version can: the previous one, `fallback_action`, a uniform draw, or nothing."""
    fallback_action: Any = None
    """The action of fallback=fixed, as the environment takes it: a number, or lists and tables by part."""
