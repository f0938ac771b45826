"""Metrics of a gateway. A route is named as it is declared: never by what a caller wrote."""

from penstock.runtime.metrics import LATENCY_S, declare

_families = declare("gateway")

REQUESTS = _families.counter(
    "gateway_requests_total", "Requests answered, by method, route and status", "method", "route", "code"
)
REQUEST_SECONDS = _families.histogram(
    "gateway_request_seconds", "Time from a request's head to the begin of its answer", LATENCY_S, "route"
)
