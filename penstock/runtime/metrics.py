"""Every metric of the core, declared once: prefix `penstock_`, unit in the name, help text.

Labels have few values: never the name of an actor or a session. Each process serves the families of its role;
the service of a workload declares its families with `declare`.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    Summary,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.protocol.refusal import Reason

# ---- Metrics of the process itself.


class _CpuSeconds(Collector):
    """Collects CPU time of this process and the children it has waited for, by role."""

    role = "unknown"

    def collect(self) -> Iterator[Metric]:
        times = os.times()
        total = times.user + times.system + times.children_user + times.children_system
        family = CounterMetricFamily(
            "penstock_cpu_seconds", "CPU time used by this process, in seconds", labels=["role"]
        )
        family.add_metric([self.role], total)
        yield family


class _CertificateExpiry(Collector):
    """Collects the time at which the certificate of this process expires; no series without one.

    The file is read at every scrape, because certificates are rotated.
    """

    path: Path | None = None

    def collect(self) -> Iterator[Metric]:
        """Yield one series; its value is 0, long ago, when the file cannot be read."""
        if self.path is None:
            return
        family = GaugeMetricFamily(
            "penstock_certificate_expiry_timestamp_seconds",
            "When the certificate of this process runs out, in seconds since 1970; 0: it cannot be read",
        )
        # Only processes with TLS need to load it.
        from cryptography import x509  # noqa: PLC0415

        try:
            chain = x509.load_pem_x509_certificates(self.path.read_bytes())
            expiry_s = min(one.not_valid_after_utc.timestamp() for one in chain)
        except (OSError, ValueError):
            expiry_s = 0.0
        family.add_metric([], expiry_s)
        yield family


PROCESS: Final = CollectorRegistry()
ProcessCollector(registry=PROCESS)
PlatformCollector(registry=PROCESS)
_cpu = _CpuSeconds()
PROCESS.register(_cpu)
_certificate = _CertificateExpiry()
PROCESS.register(_certificate)


def set_role(name: str) -> None:
    _cpu.role = name


def watch_certificate(path: Path | None) -> None:
    """Export when the certificate in this PEM file expires; None: this process has no certificate."""
    _certificate.path = path


LATENCY_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
"""Buckets of a latency, in seconds."""
_COUNTS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
_AGES: Final = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 300, 1_000)
_THOUGHTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024, 4_096)
_LENGTHS: Final = (10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 50_000)


_ALL: Final[list["Families"]] = []


class Families:
    """Declares the metric families of one group; `penstock_` is put before their names.

    name: with its unit, without `penstock_`. text: help. labels: names of labels, each with few values.
    """

    def __init__(self) -> None:
        self.group = CollectorRegistry()
        _ALL.append(self)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"penstock_{name}", text, labels, registry=self.group)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"penstock_{name}", text, labels, registry=self.group)

    def summary(self, name: str, text: str, *labels: str) -> Summary:
        return Summary(f"penstock_{name}", text, labels, registry=self.group)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"penstock_{name}", text, labels, buckets=buckets, registry=self.group)


def declare(role: str) -> Families:
    """Return an object that declares the metrics of a workload's service.

    A process of this role serves them with those of its gRPC server: refusals, and the lag of its event loop.
    Raises ValueError for a role that has metrics already.
    """
    if role in _GROUPS:
        raise ValueError(
            f"role={role!r}: has its metrics already; declare them once, in a module of their own"
        )
    families = Families()
    _GROUPS[role] = (_calls, _loop, families)
    return families


def exposition(role: str | None = None) -> bytes:
    groups = _GROUPS.get(role or _cpu.role, _ALL)
    return b"".join(map(generate_latest, (PROCESS, *(one.group for one in groups))))


# An actor that collects experience
_rollout = Families()
WEIGHT_VERSION_APPLIED = _rollout.gauge("weight_version_applied", "Weight version the worker acts with")
ENV_STEPS = _rollout.counter("environment_steps", "Environment steps that are experience")
ENV_FAILURES = _rollout.counter(
    "environment_failures", "Environment steps that failed; each drops an episode"
)
FRAGMENTS_BUILT = _rollout.counter("fragments_built", "Fragments cut from unrolls")
FRAGMENTS_ACKED = _rollout.counter("fragments_acked", "Fragments acknowledged to this actor")
FRAGMENT_BYTES_SENT = _rollout.counter("fragment_sent_bytes", "Payload bytes of fragments sent, in bytes")
FRAGMENTS_RESENT = _rollout.counter("fragments_resent", "Fragments sent again because no reply came")
FRAGMENTS_ABANDONED = _rollout.counter(
    "fragments_abandoned", "Fragments dropped before they had an ack", "reason"
)
for _reason in ("drain", "expired", "gap", "invalid"):
    FRAGMENTS_ABANDONED.labels(_reason)
ACK_LATENCY_SECONDS = _rollout.histogram(
    "ack_latency_seconds", "From fragment built to acknowledged", LATENCY_S
)
OUTBOX_FRAGMENTS = _rollout.gauge("outbox_fragments", "Fragments that wait for their ack")
ACTOR_WAIT_SECONDS = _rollout.counter(
    "actor_wait_seconds", "Time without stepping, in seconds, by cause", "cause"
)
for _cause in ("leave", "outbox", "pause"):
    ACTOR_WAIT_SECONDS.labels(_cause)
EPISODE_RETURN = _rollout.summary("episode_return", "Undiscounted return of finished episodes")
EPISODE_LENGTH_STEPS = _rollout.histogram("episode_length_steps", "Length of finished episodes", _LENGTHS)

# Every actor, and the evaluator
_actor = Families()
SESSIONS_OPENED = _actor.counter("sessions_opened", "Sessions this actor opened")
RECONNECTS = _actor.counter("reconnects", "Calls to the broker that failed and were retried")
EPISODES = _actor.counter("episodes", "Episodes finished", "evaluation")
WEIGHT_APPLY_SECONDS = _actor.histogram(
    "weight_apply_seconds", "From learning of weights to acting with them", LATENCY_S
)

# Of calls between processes, counted on each side
_calls = Families()
REFUSALS = _calls.counter("refusals", "Requests refused, by reason", "reason")
for _reason in (*(reason.label for reason in Reason), "malformed", "unauthenticated", "denied", "budget"):
    REFUSALS.labels(_reason)

# The log, of broker and learner
_log = Families()
OUTSTANDING_STEPS = _log.gauge("outstanding_steps", "Steps behind the settled position or with credit")
SETTLED_STEPS = _log.gauge("settled_steps", "Steps up to the settled position")
LOG_ENTRIES = _log.gauge("log_entries", "Entries in the log")
LOG_BYTES = _log.gauge("log_bytes", "Payload bytes in the log, in bytes")

# Broker
_broker = Families()
FRAGMENTS_APPENDED = _broker.counter("fragments_appended", "Fragments appended to the log")
FRAGMENT_BYTES_APPENDED = _broker.counter(
    "fragment_appended_bytes", "Payload bytes appended to the log, in bytes"
)
FRAGMENTS_REPEATED = _broker.counter("fragments_repeated", "Fragments acknowledged again, already in the log")
APPEND_SECONDS = _broker.histogram("append_seconds", "Append call in the broker", LATENCY_S)
STAGED_BYTES = _broker.gauge("staged_bytes", "Payload bytes staged and not yet appended, in bytes")
SESSIONS_OPEN = _broker.gauge("sessions_open", "Open sessions", "role")
WEIGHT_VERSION_SERVED = _broker.gauge("weight_version_served", "Newest weight version handed out")
WATCHERS = _broker.gauge("watchers", "WatchLatest calls being held")
BUDGET_STEPS = _broker.gauge("budget_steps", "Ceiling of the outstanding steps")
LOG_CEILING_BYTES = _broker.gauge("log_ceiling_bytes", "Most payload bytes that the log takes, in bytes")
LOG_CEILING_ENTRIES = _broker.gauge("log_ceiling_entries", "Most entries that the log takes")
LOG_CLOSED = _broker.gauge("log_closed", "1 while the log waits for the learner to re-open it")
REDIS_UP = _broker.gauge("redis_up", "1 while Redis answers and takes writes")
REDIS_MEMORY_BYTES = _broker.gauge("redis_memory_bytes", "Memory that Redis uses, in bytes")
REDIS_MEMORY_LIMIT_BYTES = _broker.gauge(
    "redis_memory_limit_bytes", "`maxmemory` of Redis, in bytes; 0: no limit"
)
REDIS_CLIENTS = _broker.gauge("redis_clients", "Connections to Redis")
REDIS_OPERATIONS = _broker.gauge("redis_operations_per_second", "Commands that Redis runs in a second")
REDIS_WRITE_FAILING = _broker.gauge(
    "redis_write_failing", "1 while Redis cannot write its append-only file and so refuses writes"
)
REDIS_REWRITE_FAILING = _broker.gauge(
    "redis_rewrite_failing", "1 while the last rewrite of Redis's append-only file failed: the file grows"
)

# A process that serves from an event loop
_loop = Families()
LOOP_LAG_SECONDS = _loop.histogram("loop_lag_seconds", "Delay of a round of the event loop", LATENCY_S)
LOOP_LAG_WORST_SECONDS = _loop.gauge(
    "loop_lag_worst_seconds", "Largest delay of a round of the event loop in the last 10 to 20 seconds"
)

# Policy server
_server = Families()
POLICY_CALLS = _server.counter("policy_calls", "Calls of clients, by RPC", "call")
ANSWERS = _server.counter(
    "policy_answers", "Actions answered, by the client's arm and by fallback", "arm", "fallback"
)
ANSWER_SECONDS = _server.histogram("policy_answer_seconds", "From request to answer in the server", LATENCY_S)
SERVING_BATCH_ROWS = _server.histogram(
    "policy_batch_rows", "Observations that shared a forward pass", (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
)
SERVING_QUEUE_SECONDS = _server.histogram(
    "policy_queue_seconds", "Waiting time of the first request of a forward pass", LATENCY_S
)
SERVING_VERSION = _server.gauge("policy_version", "Version that an arm answers with; 0: none", "arm")
ARM_RETURN = _server.summary("policy_episode_return", "Undiscounted return of clients' episodes", "arm")
EPISODES_OPEN = _server.gauge("policy_episodes_open", "Episodes of clients that are open")
NOT_LEARNED_STEPS = _server.counter(
    "not_learned_steps", "Steps that were answered and do not go to the learner", "reason"
)
FEEDBACK = _server.counter("feedback", "Rewards that came too late to be learned from and were kept")
CANARIES_WITHDRAWN = _server.counter(
    "canaries_withdrawn", "Canaries that this server found worse than the active version"
)
CANARY_UNGUARDED = _server.gauge(
    "canary_unguarded", "1 while a canary is not judged in full, by reason", "reason"
)
CANARY_UNDECIDED = _server.gauge(
    "canary_undecided", "1 while canary.horizon clients of the canary have given no verdict"
)
CANARY_EVIDENCE = _server.gauge(
    "canary_evidence", "Evidence as a share of what a verdict needs, by cause; 1: a verdict", "cause"
)
SHADOW_AGREEMENT = _server.summary(
    "policy_shadow_agreement", "Probability that the shadow gives the action that was answered"
)
SHADOW_SECONDS = _server.counter(
    "policy_shadow_seconds", "Processor time that the shadow has cost the server, in seconds"
)
TEXT_BLOCKED = _server.counter(
    "text_blocked", "Messages and answers that the guard of text blocked", "arm", "direction", "by"
)
THOUGHT_TOKENS = _server.histogram(
    "text_thought_tokens", "Tokens of thoughts before answers, their end among them", _THOUGHTS, "arm"
)
THOUGHT_SECONDS = _server.histogram(
    "text_thought_seconds", "From the beginning of a thought to its end", LATENCY_S, "arm"
)
SHADOW_SHED = _server.counter(
    "policy_shadow_shed", "Answers that the shadow did not compute, for lack of time"
)
ENGINE_PROBE_DIFFERENCE = _server.gauge(
    "engine_probe_difference_ratio",
    "Largest |given − r| / (1 + |r|) of the engine's answers to the probe, measured when it started",
)
SHADOW_UNRECORDED = _server.counter(
    "policy_shadow_unrecorded",
    "Answers of the shadow that were not recorded, for lack of time or space",
)

# Learner
_learner = Families()
UPDATES = _learner.counter("updates", "Updates made")
RUN_FINISHED = _learner.gauge(
    "run_finished", "1 once the run has ended in success and its learner only waits"
)
UPDATES_SKIPPED = _learner.counter("updates_skipped", "Batches that changed nothing, by reason", "reason")
for _reason in ("nan", "empty", "implausible", "error"):
    UPDATES_SKIPPED.labels(_reason)
TRAINED_STEPS = _learner.counter("trained_steps", "Valid environment steps trained on")
LEARNER_WAIT_SECONDS = _learner.counter(
    "learner_wait_seconds", "Time without a batch to learn from, in seconds"
)
UPDATE_SECONDS = _learner.histogram("update_seconds", "Parts of an update", LATENCY_S, "phase")
STALENESS_UPDATES = _learner.histogram(
    "staleness_updates", "Learner's update minus the fragment's, at its turn", _COUNTS
)
STALENESS_SETTING = _learner.gauge(
    "staleness_setting_updates", "Updates that experience may lag behind when it is begun (S)"
)
BATCH_AGE_SECONDS = _learner.histogram(
    "batch_age_seconds", "From cutting a batch's oldest fragment to the beginning of its update", _AGES
)
GENERATIONS = _learner.histogram("generations", "Publications between acting and training", _COUNTS)
POLICY_LOSS = _learner.gauge("policy_loss", "Surrogate loss of the last update")
VALUE_LOSS = _learner.gauge("value_loss", "Value loss of the last update")
ENTROPY_NATS = _learner.gauge("entropy_nats", "Entropy of the policy, in nats")
KL_BEHAVIOUR_NATS = _learner.gauge("kl_behaviour_nats", "KL(μ‖π) of the last update, in nats")
ENGINE_DIFFERENCE_NATS = _learner.gauge(
    "engine_difference_nats",
    "Mean |log π − log μ| of the last update's tokens that the learner's own weights sampled, in nats",
)
KL_PROXIMAL_NATS = _learner.gauge("kl_proximal_nats", "KL(π at its start‖π) of the last update, in nats")
CLIP_FRACTION = _learner.gauge("clip_ratio", "Share of clipped ratios in the last update")
EFFECTIVE_SAMPLE_SIZE = _learner.gauge("effective_sample_ratio", "Effective sample size by batch size")
EXPLAINED_VARIANCE = _learner.gauge(
    "explained_variance_ratio", "Variance of the targets explained by the critic"
)
GRADIENT_NORM = _learner.gauge("gradient_norm", "Norm of the gradients before clipping")
LEARNING_RATE = _learner.gauge("learning_rate", "Step size of the last update")
CLIP_RANGE = _learner.gauge("clip_range", "Clip range of the last update")
ENTROPY_COEFFICIENT = _learner.gauge("entropy_coefficient", "Weight of the entropy bonus in the last update")
SAMPLE_REUSE = _learner.gauge("sample_reuse", "Passes over a step in the last update, on average")
MASKED_FRACTION = _learner.gauge("masked_ratio", "Share of steps left out of the last update as too old")
MEAN_RETURN = _learner.gauge("mean_return", "Mean return of the last 100 training episodes")
EVALUATION_RETURN = _learner.gauge(
    "evaluation_return", "Mean return of the last evaluation, by how actions were chosen", "actions"
)
EVALUATION_BEST_RETURN = _learner.gauge("evaluation_best_return", "Mean return of the best evaluation")
EVALUATIONS_WITHOUT_IMPROVEMENT = _learner.gauge(
    "evaluations_without_improvement", "Evaluations since the last improvement, which patience counts"
)
WEIGHT_VERSION_PUBLISHED = _learner.gauge("weight_version_published", "Newest weight version published")
LEDGER_ACKED = _learner.gauge(
    "ledger_acked_fragments", "Fragments acknowledged, counted by the append script"
)
LEDGER_TRAINED = _learner.gauge("ledger_trained_fragments", "Fragments trained on, counted by the learner")
LEDGER_DROPPED = _learner.gauge(
    "ledger_dropped_fragments", "Fragments dropped, counted by the learner", "reason"
)
LEDGER_LOST = _learner.gauge(
    "ledger_lost_fragments", "Acknowledged fragments that Redis lost, counted by its scripts"
)
LEDGER_RESIDENT = _learner.gauge(
    "ledger_resident_fragments", "Fragments in the log that the learner has not booked yet"
)
CHECKPOINTS = _learner.counter("checkpoints", "Checkpoints committed")
CHECKPOINT_SECONDS = _learner.histogram(
    "checkpoint_seconds", "Writing and committing a checkpoint", LATENCY_S
)
CHECKPOINTS_REFUSED = _learner.counter(
    "checkpoints_refused", "Checkpoints found damaged or unknown on resume"
)
PROBE_MISMATCHES = _learner.counter(
    "probe_mismatches", "Actors whose probe answers differ from the weights they name"
)
SESSIONS_QUARANTINED = _learner.counter(
    "sessions_quarantined", "Sessions that sent experience which cannot be learned from"
)
TERMINAL_OBSERVATIONS_REPLACED = _learner.counter(
    "terminal_observations_replaced", "Last observations of terminated episodes that lay outside their space"
)
REPLAY_EVICTED = _learner.counter(
    "replay_evicted", "Fragments taken out of replay because updates fail with them"
)
VERSIONS_KEPT = _learner.gauge("versions_kept", "Versions of this run that the registry keeps")
REGISTRY_FAILURES = _learner.counter("registry_failures", "Failed calls to the registry of versions")
TRACKER_FAILURES = _learner.counter("tracker_failures", "Lines of figures that a tracker refused", "tracker")
RECORDED_FRAGMENTS = _learner.counter("recorded_fragments", "Fragments written to the run's recording")
RECORDED_BYTES = _learner.counter("recorded_bytes", "Bytes written to the run's recording, in bytes")
MEAN_REWARD = _learner.gauge("mean_reward", "Mean reward of the last batch, as the learner is given it")
IMITATION_NLL_NATS = _learner.gauge(
    "imitation_nll_nats", "Mean −log π of recorded actions, in nats, by split", "split"
)
IMITATION_ACCURACY = _learner.gauge(
    "imitation_accuracy_ratio", "Share of recorded actions that are the most likely one, by split", "split"
)
LEASE_EPOCH = _learner.gauge("lease_epoch", "Epoch of this learner's lease")

# Every rank of a learner; those beyond rank 0 have no other metrics
_rank = Families()
RANKS = _rank.gauge("ranks", "Number of ranks of this learner")
RANK = _rank.gauge("rank", "Rank of this process")
RANK_UPDATES = _rank.counter("rank_updates", "Updates to which this rank beyond 0 has contributed")
RANK_WAIT_SECONDS = _rank.counter(
    "rank_wait_seconds", "Time that a rank beyond 0 waited for the next update to begin, in seconds"
)
RANK_EXCHANGE_SECONDS = _rank.summary(
    "rank_exchange_seconds",
    "Exchanges with the other ranks, in seconds; between GPUs only their start",
)

# Launcher
_launcher = Families()
RESTARTS = _launcher.counter("restarts", "Services started again after they died", "role")

_GROUPS: Final[dict[str, tuple[Families, ...]]] = {
    "actor": (_actor, _rollout, _calls),
    "evaluator": (_actor, _calls),
    "broker": (_calls, _log, _broker, _loop),
    "server": (_actor, _rollout, _calls, _loop, _server),
    "learner": (_log, _learner, _rank),
    "rank": (_rank,),
    "launcher": (_launcher,),
    "redis": (),
}


# ---- Measures the lag of this process's event loop: everything else in the loop is late by as much.

EVENT_LOOP: Final = "event loop"
"""Name of its watch in `Health`."""
PERIOD_S: Final = 0.05
WINDOW_S: Final = 10.0
"""Seconds of a window; the gauge shows the worst lag of this window or the one before."""


async def watch_loop(on_round: Callable[[], None]) -> None:
    """Measure the lag until cancelled; calls `on_round` after every round."""
    loop = asyncio.get_running_loop()
    worst = before = 0.0
    turn_s = loop.time() + WINDOW_S
    while True:
        due_s = loop.time() + PERIOD_S
        await asyncio.sleep(PERIOD_S)
        now_s = loop.time()
        late_s = max(0.0, now_s - due_s)
        if now_s >= turn_s:
            worst, before, turn_s = 0.0, worst, now_s + WINDOW_S
        worst = max(worst, late_s)
        LOOP_LAG_SECONDS.observe(late_s)
        LOOP_LAG_WORST_SECONDS.set(max(worst, before))
        on_round()
