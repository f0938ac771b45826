"""A client of Prometheus's HTTP interface."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection
from typing import Any, Final
from urllib.parse import urlencode

TIMEOUT_S: Final = 30.0

Series = Mapping[str, Any]
"""`metric` (labels) and `values` ([[Unix time, text], …]), or `value` of one moment."""


class QueryError(ValueError):
    """Reports that Prometheus does not accept a query; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Prometheus:
    """A server on this machine or another."""

    host: str = "127.0.0.1"
    port: int = 9090

    def query(self, expression: str) -> list[Series]:
        """Return the current series; raises QueryError, OSError."""
        return list(self.get("query", query=expression)["result"])

    def query_range(self, expression: str, began_s: float, ended_s: float, step_s: float) -> list[Series]:
        """Return the series between two Unix times; raises QueryError, OSError."""
        parameters = {"start": str(began_s), "end": str(ended_s), "step": str(step_s)}
        return list(self.get("query_range", query=expression, **parameters)["result"])

    def get(self, path: str, **parameters: str) -> Any:
        """Return the `data` of an answer of /api/v1; raises QueryError, OSError."""
        status, body = self.fetch(f"/api/v1/{path}?{urlencode(parameters)}")
        if status != HTTPStatus.OK:
            raise QueryError(f"{parameters}: {body.decode()}")
        return json.loads(body)["data"]

    def fetch(self, path: str) -> tuple[int, bytes]:
        """Return status and body; raises OSError when no server listens."""
        connection = HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()
