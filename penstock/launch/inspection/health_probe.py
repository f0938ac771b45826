"""One look at the health of a process, on the HTTP port that it has announced."""

import http.client
from http import HTTPStatus
from typing import Final

from penstock.runtime.health import Endpoint

_PROBE_TIMEOUT_S: Final = 1.0


def probe(endpoint: Endpoint, path: str) -> str | None:
    """Return None when a page of health is green, else why it is not.

    endpoint: of the process. path: `/healthz` or `/readyz`.
    """
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.metrics_port, timeout=_PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        reason = reply.read().decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return f"does not answer: {error}"
    else:
        return None if reply.status == HTTPStatus.OK else reason
    finally:
        connection.close()
