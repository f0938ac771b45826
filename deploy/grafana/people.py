"""The dashboard of a gateway: its calls, what people say, and the trainings that they ask for."""

from collections.abc import Sequence
from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana.panels import Panel, above, below, dashboard, lines, number
from deploy.grafana.promql import quantile, rate

BOARD: Final = "people"

_ALL: Final = rate("penstock_gateway_requests_total")
_ERRORS: Final = rate("penstock_gateway_requests_total", matcher='code=~"5.."')
_REFUSED: Final = 'route="/api/auth/token", code=~"401|429"'


_NOW: Final[Sequence[Panel]] = [
    number("Requests", "Answered, all gateways together.", "suffix: /s", below(0.001, "blue"),
           (rate("penstock_gateway_requests_total"), "{{run}}")),
    number("p99", "From a request's head to the begin of its answer; one in a hundred takes longer.", "s",
           above(0.2, 1),
           (quantile(0.99, "penstock_gateway_request_seconds"), "p99 {{run}}")),
    number("Errors", "Share of the requests that were answered by 5xx.", "percentunit", above(0.001, 0.05),
           (f"({_ERRORS} or 0 * {_ALL}) / {_ALL}", "{{run}}")),
    number("Ratings", "Taken in the last hour.", "none", below(1, "blue"),
           ("sum by (run) (increase(penstock_gateway_ratings_total{RUN}[1h]))", "{{run}}")),
    number("Jobs running", "Of all gateways.", "none", below(1, "blue"),
           ('max by (run) (penstock_gateway_jobs{RUN, state="running"})', "{{run}}")),
    number("Jobs queued", "Wait for a place.", "none", above(1, 16),
           ('max by (run) (penstock_gateway_jobs{RUN, state="queued"})', "{{run}}")),
]  # fmt: skip

_CALLS: Final[Sequence[Panel]] = [
    lines("Requests by route", "As the route is declared.", "suffix: /s", below(0, "blue"),
          ("sum by (run, method, route) (rate(penstock_gateway_requests_total{RUN}[WINDOW])) > 0",
           "{{method}} {{route}} {{run}}")),
    lines("Requests by status", "4xx: the caller's; 5xx: a database's, or the gateway's.", "suffix: /s",
          below(0, "blue"),
          ("sum by (run, code) (rate(penstock_gateway_requests_total{RUN}[WINDOW])) > 0",
           "{{code}} {{run}}")),
    lines("Time to answer", "From a request's head to the begin of its answer.", "s", above(0.2, 1),
          (quantile(0.5, "penstock_gateway_request_seconds"), "p50 {{run}}"),
          (quantile(0.99, "penstock_gateway_request_seconds"), "p99 {{run}}")),
    lines("Sign-ins refused", "Wrong passwords and tokens, and attempts that came too often.", "suffix: /s",
          above(0.05, 0.2),
          (rate("penstock_gateway_requests_total", "run, code", _REFUSED), "{{code}} {{run}}")),
]  # fmt: skip

_WORK: Final[Sequence[Panel]] = [
    lines("Ratings by way", "Taken by a call, as lines or by a link.", "suffix: /s", below(0, "blue"),
          (rate("penstock_gateway_ratings_total", "run, way"), "{{way}} {{run}}")),
    lines("Jobs", "That have not ended, by state, of all gateways.", "none", above(16),
          ("max by (run, state) (penstock_gateway_jobs{RUN})", "{{state}} {{run}}")),
    lines("Jobs ended", "In the last hour, by how they ended.", "none", below(0, "blue"),
          ("sum by (run, state) (increase(penstock_gateway_jobs_ended_total{RUN}[1h]))",
           "{{state}} {{run}}")),
]  # fmt: skip


def board() -> Dashboard:
    """Return the dashboard."""
    text = "Requests of a gateway, the ratings that people give, and the trainings that they ask for."
    rows = {"Now": _NOW, "Calls": _CALLS, "Feedback and jobs": _WORK}
    return dashboard(BOARD, "People", text, rows)
