"""Metrics of a gateway. A route is named as it is declared: never by what a caller wrote."""

from typing import Final

from penstock.runtime.metrics import LATENCY_S, declare

_families = declare("gateway")

REQUESTS: Final = _families.counter(
    "gateway_requests_total", "Requests answered, by method, route and status", "method", "route", "code"
)
REQUEST_SECONDS: Final = _families.histogram(
    "gateway_request_seconds", "Time from a request's head to the begin of its answer", LATENCY_S, "route"
)
RATINGS: Final = _families.counter(
    "gateway_ratings_total", "Ratings taken: one by a call, many as lines, one by a link", "way"
)
JOBS: Final = _families.gauge("gateway_jobs", "Jobs of all gateways that have not ended, by state", "state")
JOB_HEARD: Final = _families.gauge(
    "gateway_job_heard_timestamp_seconds",
    "When the run of a job of this gateway has last written, of that which is silent longest; 0: none runs",
)
JOBS_ENDED: Final = _families.counter(
    "gateway_jobs_ended_total", "Jobs that this gateway has seen end, by state", "state"
)
