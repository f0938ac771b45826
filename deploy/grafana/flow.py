"""The dashboard of a fragment's way, hop by hop: it shows where fragments wait."""

from collections.abc import Sequence
from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana.panels import Panel, Query, above, below, dashboard, heat, lines
from deploy.grafana.promql import mean, quantile, rate

BOARD: Final = "flow"


def _flow(counter: str, legend: str) -> Query:
    return rate(counter), f"{legend} {{{{run}}}}"


def _time(histogram: str, legend: str, matcher: str = "") -> Query:
    return mean(histogram, matcher=matcher), f"{legend} {{{{run}}}}"


def _quantiles(title: str, text: str, name: str, warning: float, wrong: float) -> Panel:
    queries = (quantile(0.5, name), "p50 {{run}}"), (quantile(0.99, name), "p99 {{run}}")
    return lines(title, text, "s", above(warning, wrong), *queries)


_HOPS: Final[Sequence[Panel]] = [
    lines("Fragments at every hop",
          "Cut by actors, appended by brokers, acknowledged to actors, at their turn in the learner. "
          "Curves that lie on one another: nothing piles up.", "suffix: fragments/s", below(0.001),
          _flow("penstock_fragments_built_total", "1 cut"),
          _flow("penstock_fragments_appended_total", "2 appended"),
          _flow("penstock_fragments_acked_total", "3 acknowledged"),
          _flow("penstock_staleness_updates_count", "4 learned from"), wide=2),
    lines("Steps", "Environment steps that actors make and that the learner trains on.", "suffix: steps/s",
          below(1),
          _flow("penstock_environment_steps_total", "made"),
          _flow("penstock_trained_steps_total", "trained on")),
    lines("How long each hop takes",
          "Means along the way: from cutting a fragment to its acknowledgement (the append in the broker is "
          "part of it), from cutting to its update, the update, publishing, and from learning of "
          "weights to acting with them.", "s", above(10, 60),
          _time("penstock_append_seconds", "1 append"),
          _time("penstock_ack_latency_seconds", "2 acknowledged"),
          _time("penstock_batch_age_seconds", "3 its turn"),
          _time("penstock_update_seconds", "4 update", 'phase="compute"'),
          _time("penstock_update_seconds", "5 publish", 'phase="publish"'),
          _time("penstock_weight_apply_seconds", "6 apply"), wide=2),
    lines("Bytes", "Payload bytes that actors send and brokers append.", "Bps", above(100e6, 1e9),
          _flow("penstock_fragment_sent_bytes_total", "sent"),
          _flow("penstock_fragment_appended_bytes_total", "appended")),
    _quantiles("Acknowledgement", "From cutting a fragment to its acknowledgement, as the actor sees it.",
               "penstock_ack_latency_seconds", 0.2, 1),
    _quantiles("Append", "One Append call in the broker; at durability fsync the disk is part of it.",
               "penstock_append_seconds", 0.05, 0.5),
    _quantiles("To its turn", "From cutting a batch's oldest fragment to the beginning of its update.",
               "penstock_batch_age_seconds", 10, 60),
    _quantiles("Weights", "From learning that there are new weights to acting with them.",
               "penstock_weight_apply_seconds", 0.5, 5),
    lines("Repeated",
          "Sent again because no reply came, acknowledged again because they were in the log already, given "
          "up by an actor.",
          "suffix: fragments/s", above(0.1, 10),
          _flow("penstock_fragments_resent_total", "sent again"),
          _flow("penstock_fragments_repeated_total", "acknowledged again"),
          (rate("penstock_fragments_abandoned_total", "run, reason"), "given up: {{reason}} {{run}}")),
    lines("Refusals",
          "What brokers and policy servers did not take, by reason; the runbook has a row for each.",
          "suffix: /s", above(0.1, 10),
          (rate("penstock_refusals_total"), "all {{run}}"),
          ("sum by (run, reason) (rate(penstock_refusals_total{RUN}[WINDOW])) > 0", "{{reason}} {{run}}")),
]  # fmt: skip

_PACING: Final[Sequence[Panel]] = [
    lines("Who waits for whom",
          "Share of their time that the learner waits for a batch and rollout workers for credit or for "
          "their outbox.",
          "percentunit", above(0.8),
          ("penstock:learner_wait_share{RUN}", "learner {{run}}"),
          ("penstock:actor_wait_share{RUN}", "actors {{run}}")),
    lines("Rollout workers",
          "That are there, and as many as would keep the learner and themselves busy: what they are scaled "
          "by.",
          "none", below(1),
          ("penstock:actors{RUN}", "there {{run}}"), ("penstock:actors_wanted{RUN}", "wanted {{run}}")),
    lines("Why actors wait", "Seconds in a second, all actors together, by cause.", "percentunit", above(10),
          (rate("penstock_actor_wait_seconds_total", "run, cause"), "{{cause}} {{run}}")),
    lines("Outstanding",
          "Steps generated or allowed and not yet learned from, and the budget that bounds them.",
          "suffix: steps", below(0),
          ("max by (run) (penstock_outstanding_steps{RUN})", "outstanding {{run}}"),
          ("max by (run) (penstock_budget_steps{RUN})", "budget {{run}}")),
    lines("Outboxes", "Fragments that wait for their acknowledgement, in the fullest outbox and together.",
          "suffix: fragments", above(8, 64),
          ("max by (run) (penstock_outbox_fragments{RUN})", "fullest {{run}}"),
          ("sum by (run) (penstock_outbox_fragments{RUN})", "together {{run}}")),
    lines("Sessions", "Open at the brokers, by role.", "none", above(1000),
          ("max by (run, role) (penstock_sessions_open{RUN})", "{{role}} {{run}}")),
]  # fmt: skip

_LOG: Final[Sequence[Panel]] = [
    lines("Size of the log", "Payload bytes between two trims. At 80% of its ceiling an alert fires.",
          "bytes", above(400e6, 512e6),
          ("max by (run) (penstock_log_bytes{RUN})", "{{run}}")),
    lines("Of its ceiling", "What the log holds of what it may, in bytes and in entries.", "percentunit",
          above(0.6, 0.8),
          ("max by (run) (penstock_log_bytes{RUN}) / max by (run) (penstock_log_ceiling_bytes{RUN})",
           "bytes {{run}}"),
          ("max by (run) (penstock_log_entries{RUN}) / max by (run) (penstock_log_ceiling_entries{RUN})",
           "entries {{run}}")),
    lines("Staged", "Payload bytes on their way into the log.", "bytes", above(100e6, 256e6),
          ("sum by (run) (penstock_staged_bytes{RUN})", "{{run}}")),
    heat("Staleness", "Fragments by how many updates old they were at their turn.", "none", above(8),
         "sum by (le) (increase(penstock_staleness_updates_bucket{RUN}[WINDOW]))"),
    lines("Staleness and its setting",
          "In updates; the setting (S) holds for when a fragment is begun, one more is usual.", "none",
          above(8),
          (quantile(0.5, "penstock_staleness_updates"), "p50 {{run}}"),
          (quantile(0.99, "penstock_staleness_updates"), "p99 {{run}}"),
          ("max by (run) (penstock_staleness_setting_updates{RUN})", "setting {{run}}")),
    lines("Lag of the actors", "Versions between what is published and what an actor acts with.",
          "suffix: versions", above(5, 20),
          ("penstock:actor_lag_versions{RUN}", "{{instance}} {{run}}")),
]  # fmt: skip

_ACCOUNTED: Final = (
    "\n    max by (run) (penstock_ledger_trained_fragments{RUN})"
    " + sum by (run) (penstock_ledger_dropped_fragments{RUN})"
    "\n      + max by (run) (penstock_ledger_resident_fragments{RUN})\n"
)
_BOOKS: Final[Sequence[Panel]] = [
    lines("The books",
          "Acknowledged fragments are trained, dropped under a name, or resident: the two curves lie on one "
          "another.",
          "suffix: fragments", below(0),
          ("max by (run) (penstock_ledger_acked_fragments{RUN})", "acknowledged {{run}}"),
          (_ACCOUNTED, "trained, dropped or resident {{run}}")),
    lines("Resident", "Fragments in the log that wait for their turn.", "suffix: fragments", above(10_000),
          ("max by (run) (penstock_ledger_resident_fragments{RUN})", "{{run}}")),
    lines("Dropped and lost", "By reason, since the run began. `log_lost`: Redis came back without them.",
          "suffix: fragments", above(1),
          ("sum by (run, reason) (penstock_ledger_dropped_fragments{RUN})", "{{reason}} {{run}}"),
          ("max by (run) (penstock_ledger_lost_fragments{RUN})", "lost with Redis {{run}}")),
]  # fmt: skip


def board() -> Dashboard:
    """Return the dashboard."""
    text = (
        "From an environment's step to published weights: rate and time at every hop, pacing, log, "
        "staleness, books."
    )
    rows = {"Way of a fragment": _HOPS, "Pacing": _PACING, "Log and staleness": _LOG, "Ledger": _BOOKS}
    return dashboard(BOARD, "Flow", text, rows)
