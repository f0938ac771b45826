"""The dashboard of the processes and Redis."""

from collections.abc import Sequence
from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana.panels import Panel, above, below, dashboard, lines, number
from deploy.grafana.promql import rate

BOARD: Final = "fleet"
_DAY_S: Final = 86_400

_NOW: Final[Sequence[Panel]] = [
    number("Processes", "That Prometheus reaches.", "none", below(1),
           ("sum by (run) (up{RUN})", "{{run}}")),
    number("Out of reach", "Processes that Prometheus knows of and does not reach.", "none", above(1),
           ("count by (run) (up{RUN}) - sum by (run) (up{RUN})", "{{run}}")),
    number("Alerts", "Those that fire now, of deploy/prometheus/alerts.yml.", "none", above(1, 3),
           ('count(ALERTS{RUN, alertstate="firing"}) or vector(0)', "firing")),
    number("CPU", "Cores that all processes together keep busy; Redis is not among them.", "suffix: cores",
           above(64),
           (rate("process_cpu_seconds_total"), "{{run}}")),
    number("Memory", "Resident, all processes together; Redis is not among them.", "bytes",
           above(64e9, 256e9),
           ("sum by (run) (process_resident_memory_bytes{RUN})", "{{run}}")),
    number("Redis", "Memory of its `maxmemory`.", "percentunit", above(0.7, 0.9),
           ((
               "max by (run) (penstock_redis_memory_bytes{RUN}) / (max by (run) "
               "(penstock_redis_memory_limit_bytes{RUN}) > 0)"
           ), "{{run}}")),
]  # fmt: skip

_PROCESSES: Final[Sequence[Panel]] = [
    lines("Processes by role", "That Prometheus reaches.", "none", below(1),
          ("count by (run, role) (penstock_cpu_seconds_total{RUN})", "{{role}} {{run}}")),
    lines("Restarts", "Processes that died and were started again, in ten minutes.", "none", above(1, 3),
          ("penstock:restarts{RUN}", "{{role}} {{run}}")),
    lines("Age", "Since a process was started; a drop is a restart.", "s", below(60, "orange"),
          ("time() - process_start_time_seconds{RUN}", "{{instance}} {{run}}")),
    lines("CPU by process", "Cores that a process keeps busy.", "suffix: cores", above(64),
          (rate("process_cpu_seconds_total", "run, instance"), "{{instance}} {{run}}"), stacked=True),
    lines("Memory by process", "Resident, as the kernel counts it.", "bytes", above(8e9, 32e9),
          ("process_resident_memory_bytes{RUN}", "{{instance}} {{run}}")),
    lines("Open files", "File descriptors by process, of what it may have.", "percentunit", above(0.5, 0.8),
          ("process_open_fds{RUN} / process_max_fds{RUN}", "{{instance}} {{run}}")),
    lines("Sessions and retries",
          "Sessions that actors opened and calls to a broker that failed and were retried, in ten minutes.",
          "none", above(10, 100),
          ("sum by (run) (increase(penstock_sessions_opened_total{RUN}[10m]))", "sessions {{run}}"),
          ("sum by (run) (increase(penstock_reconnects_total{RUN}[10m]))", "retries {{run}}")),
    lines("Calls being held", "WatchLatest calls at the brokers: one for each actor.", "none",
          above(4000, 8000),
          ("sum by (run) (penstock_watchers{RUN})", "{{run}}")),
    lines("Event loops", "The latest that the event loop of a broker or server came round.", "s",
          above(0.05, 0.5),
          ("max by (run, instance) (penstock_loop_lag_worst_seconds{RUN})", "{{instance}} {{run}}")),
]  # fmt: skip

_REDIS: Final[Sequence[Panel]] = [
    lines("Memory of Redis", "Used, and `maxmemory`.", "bytes", above(1.8e9, 2e9),
          ("max by (run) (penstock_redis_memory_bytes{RUN})", "used {{run}}"),
          ("max by (run) (penstock_redis_memory_limit_bytes{RUN})", "limit {{run}}")),
    lines("Commands", "That Redis runs in a second.", "suffix: /s", above(50_000, 100_000),
          ("max by (run) (penstock_redis_operations_per_second{RUN})", "{{run}}")),
    lines("Connections", "To Redis, of brokers and learner.", "none", above(1000, 8000),
          ("max by (run) (penstock_redis_clients{RUN})", "{{run}}")),
    lines("Redis serves", "1 while it answers and takes writes.", "none", below(1),
          ("min by (run) (penstock_redis_up{RUN})", "{{run}}")),
    lines("What is wrong with Redis",
          "1 while the log waits for the learner to re-open it, the append-only file cannot be written, or "
          "not rewritten.",
          "none", above(1), ("max by (run) (penstock_log_closed{RUN})", "log closed {{run}}"),
          ("max by (run) (penstock_redis_write_failing{RUN})", "cannot write {{run}}"),
          ("max by (run) (penstock_redis_rewrite_failing{RUN})", "cannot rewrite {{run}}")),
    lines("Certificates", "How long the certificate of a process still holds; no curve without TLS.", "s",
          ((None, "red"), (7 * _DAY_S, "green")),
          ("penstock_certificate_expiry_timestamp_seconds{RUN} - time()", "{{instance}} {{run}}")),
]  # fmt: skip


def board() -> Dashboard:
    """Return the dashboard."""
    text = "Processes, restarts, CPU, memory and Redis."
    return dashboard(BOARD, "Fleet", text, {"Now": _NOW, "Processes": _PROCESSES, "Redis": _REDIS})
