"""Every metric of the system, declared once: prefix `penstock_`, unit in the name, help text.

Labels come from small enumerations only (role, reason, phase, method, cause): never an actor's
name or a session. Each process imports this module and serves the series that it set.
"""

import os
from collections.abc import Iterator
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    Summary,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

REGISTRY: Final = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)

_LATENCY: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_COUNTS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
_LENGTHS: Final = (10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 50_000)


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(f"penstock_{name}", text, labels, registry=REGISTRY)


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    return Gauge(f"penstock_{name}", text, labels, registry=REGISTRY)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
    return Histogram(f"penstock_{name}", text, labels, buckets=buckets, registry=REGISTRY)


class _CpuSeconds(Collector):
    """CPU time of this process and the children it has waited for, by role."""

    role = "unknown"

    def collect(self) -> Iterator[Metric]:
        """One series."""
        times = os.times()
        total = times.user + times.system + times.children_user + times.children_system
        family = CounterMetricFamily(
            "penstock_cpu_seconds", "CPU time used by this process, in seconds", labels=["role"]
        )
        family.add_metric([self.role], total)
        yield family


_cpu = _CpuSeconds()
REGISTRY.register(_cpu)


def set_role(role: str) -> None:
    """Name the role of this process in `penstock_cpu_seconds_total`."""
    _cpu.role = role


# Actor
ENV_STEPS = _counter("environment_steps", "Environment steps that are experience")
FRAGMENTS_BUILT = _counter("fragments_built", "Fragments cut from unrolls")
FRAGMENTS_ACKED = _counter("fragments_acked", "Fragments acknowledged to this actor")
FRAGMENT_BYTES_SENT = _counter("fragment_sent_bytes", "Payload bytes of fragments sent, in bytes")
FRAGMENTS_RESENT = _counter("fragments_resent", "Fragments sent again because no reply came")
FRAGMENTS_ABANDONED = _counter("fragments_abandoned", "Fragments dropped before they had an ack", "reason")
ACK_LATENCY_SECONDS = _histogram("ack_latency_seconds", "From fragment built to acknowledged", _LATENCY)
OUTBOX_FRAGMENTS = _gauge("outbox_fragments", "Fragments that wait for their ack")
ACTOR_WAIT_SECONDS = _counter("actor_wait_seconds", "Time without stepping, in seconds, by cause", "cause")
SESSIONS_OPENED = _counter("sessions_opened", "Sessions this actor opened")
RECONNECTS = _counter("reconnects", "Calls to the broker that failed and were retried")
EPISODES = _counter("episodes", "Episodes finished", "evaluation")
EPISODE_RETURN = Summary(
    "penstock_episode_return", "Undiscounted return of finished episodes", registry=REGISTRY
)
EPISODE_LENGTH_STEPS = _histogram("episode_length_steps", "Length of finished episodes", _LENGTHS)
WEIGHT_VERSION_APPLIED = _gauge("weight_version_applied", "Weight version the actor acts with")
WEIGHT_APPLY_SECONDS = _histogram(
    "weight_apply_seconds", "From learning of weights to acting with them", _LATENCY
)

# Broker
FRAGMENTS_APPENDED = _counter("fragments_appended", "Fragments appended to the log")
FRAGMENT_BYTES_APPENDED = _counter("fragment_appended_bytes", "Payload bytes appended to the log, in bytes")
FRAGMENTS_REPEATED = _counter("fragments_repeated", "Fragments acknowledged again, already in the log")
REFUSALS = _counter("refusals", "Requests refused, by reason", "reason")
APPEND_SECONDS = _histogram("append_seconds", "Append call in the broker", _LATENCY)
RPC_SECONDS = _histogram("rpc_seconds", "Calls served, without the time they were held", _LATENCY, "method")
RPC_ERRORS = _counter("rpc_errors", "Calls ended by a status code other than OK", "method")
STAGED_BYTES = _gauge("staged_bytes", "Payload bytes staged and not yet appended, in bytes")
OUTSTANDING_STEPS = _gauge("outstanding_steps", "Steps behind the settled position or with leave")
BUDGET_STEPS = _gauge("budget_steps", "Ceiling of the outstanding steps")
SETTLED_STEPS = _gauge("settled_steps", "Steps up to the settled position")
LOG_ENTRIES = _gauge("log_entries", "Entries in the log")
LOG_BYTES = _gauge("log_bytes", "Payload bytes in the log, in bytes")
LOG_CLOSED = _gauge("log_closed", "1 while the log waits for the learner to re-open it")
SESSIONS_OPEN = _gauge("sessions_open", "Open sessions", "role")
WEIGHT_VERSION_SERVED = _gauge("weight_version_served", "Newest weight version handed out")
WATCHERS = _gauge("watchers", "WatchLatest calls being held")
REDIS_UP = _gauge("redis_up", "1 while Redis answers")

# Learner
UPDATES = _counter("updates", "Updates made")
UPDATES_SKIPPED = _counter("updates_skipped", "Batches that changed nothing, by reason", "reason")
TRAINED_STEPS = _counter("trained_steps", "Valid environment steps trained on")
UPDATE_SECONDS = _histogram("update_seconds", "Parts of an update", _LATENCY, "phase")
STALENESS_UPDATES = _histogram(
    "staleness_updates", "Learner's update minus the fragment's, at its turn", _COUNTS
)
GENERATIONS = _histogram("generations", "Publications between acting and training", _COUNTS)
POLICY_LOSS = _gauge("policy_loss", "Surrogate loss of the last update")
VALUE_LOSS = _gauge("value_loss", "Value loss of the last update")
ENTROPY_NATS = _gauge("entropy_nats", "Entropy of the policy, in nats")
KL_BEHAVIOUR_NATS = _gauge("kl_behaviour_nats", "KL(μ‖π) of the last update, in nats")
CLIP_FRACTION = _gauge("clip_ratio", "Share of clipped ratios in the last update")
EFFECTIVE_SAMPLE_SIZE = _gauge("effective_sample_ratio", "Effective sample size by batch size")
EXPLAINED_VARIANCE = _gauge("explained_variance_ratio", "Variance of the targets explained by the critic")
GRADIENT_NORM = _gauge("gradient_norm", "Norm of the gradients before clipping")
LEARNING_RATE = _gauge("learning_rate", "Step size of the last update")
MEAN_RETURN = _gauge("mean_return", "Mean return of the last 100 training episodes")
EVALUATION_RETURN = _gauge("evaluation_return", "Mean return of the last evaluation")
WEIGHT_VERSION_PUBLISHED = _gauge("weight_version_published", "Newest weight version published")
LEDGER_ACKED = _gauge("ledger_acked_fragments", "Fragments acknowledged, counted by the append script")
LEDGER_TRAINED = _gauge("ledger_trained_fragments", "Fragments trained on, counted by the learner")
LEDGER_DROPPED = _gauge("ledger_dropped_fragments", "Fragments dropped, counted by the learner", "reason")
LEDGER_RESIDENT = _gauge("ledger_resident_fragments", "Fragments not settled, counted in the log")
CHECKPOINTS = _counter("checkpoints", "Checkpoints committed")
CHECKPOINT_SECONDS = _histogram("checkpoint_seconds", "Writing and committing a checkpoint", _LATENCY)
CHECKPOINTS_REFUSED = _counter("checkpoints_refused", "Checkpoints found damaged or unknown on resume")
PROBE_MISMATCHES = _counter(
    "probe_mismatches", "Actors whose probe answers differ from the weights they name"
)
LEASE_EPOCH = _gauge("lease_epoch", "Epoch of this learner's lease")

# Launcher
RESTARTS = _counter("restarts", "Services started again after they died", "role")
