"""A real reward service as a process."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.support.run.broker_process import BrokerProcess, eventually
from tests.support.run.forked_process import PENSTOCK, ForkedProcess

PATIENCE_S: Final = 120.0


@contextmanager
def serving(
    model: Path, folder: Path, listen: str, assignments: Sequence[str] = ()
) -> Iterator[BrokerProcess]:
    """`penstock rlhf reward serve`, ready."""
    folder.mkdir()
    endpoints, log = folder / "reward.json", folder / "reward.log"
    more = [word for text in assignments for word in ("--set", text)]
    words = ("rlhf", "reward", "serve", str(model), "--listen", listen, "--endpoints", str(endpoints), *more)
    process = ForkedProcess(PENSTOCK, *words, output=log)
    server = BrokerProcess(process=process, endpoint_file=endpoints, log=log)
    try:
        eventually(server.is_ready, "readiness of the reward service", within_s=PATIENCE_S)
        yield server
    finally:
        server.end()


def secured(certificates: Path, run: str) -> list[str]:
    """Assignments for a service over TLS."""
    files = {"tls_certificate": "server.pem", "tls_key": "server.key", "tls_authority": "authority.pem"}
    said = [f"security.{key}={json.dumps(str(certificates / name))}" for key, name in files.items()]
    return [f"run={run}", *said]
