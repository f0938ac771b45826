"""Weights as an actor gets them: fetched in chunks where they are large, their digest checked."""

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.actor.link.broker_client import BrokerClient
from penstock.protocol.limits import MAX_WEIGHT_BYTES
from penstock.protocol.messages import Publication
from penstock.runtime.exit import Fatal
from penstock.runtime.failpoint import failpoint


@dataclass(frozen=True, slots=True)
class Weights:
    """A publication, its bytes, and the numbers that came with it.

    blob: the bytes, their digest checked.   arrived_s: when they arrived, in monotonic seconds.
    """

    publication: Publication
    blob: bytes
    arrived_s: float
    scalars: Mapping[str, float] = field(default_factory=dict)


def fetch(
    broker_client: BrokerClient,
    session: int,
    version: int,
    stop: threading.Event,
    on_arrived: Callable[[int], None],
) -> Weights | None:
    """Return the weights of a version, fetched in chunks from where a broken transfer stopped.

    Args:
        broker_client: the broker that is asked.
        session: number of the session in which it is asked.
        version: the version that is wanted.
        stop: ends the transfer (Interrupted).
        on_arrived: told after each chunk how many bytes have arrived.

    Returns:
        The weights; None when the version is no longer kept, or another run publishes under its number.

    Raises:
        Fatal: the bytes are more than are allowed, or do not have the digest that was published.
        Interrupted: `stop` was set.
    """
    pieces: list[memoryview] = []
    size, publication = 0, None
    while True:
        failpoint("weights.fetching", version)
        chunk = broker_client.weights(session, version, size, stop)
        if chunk is None or chunk.publication != (publication or chunk.publication):
            return None
        publication = chunk.publication
        if chunk.publication.size > MAX_WEIGHT_BYTES:
            raise Fatal(f"weights {version}: {chunk.publication.size} bytes, {MAX_WEIGHT_BYTES} are allowed")
        pieces.append(chunk.data)
        size += len(chunk.data)
        on_arrived(size)
        if size >= chunk.publication.size or not chunk.data:
            return checked(chunk.publication, b"".join(pieces))


def checked(publication: Publication, blob: bytes) -> Weights:
    """Return the weights of these bytes, arrived now; raises Fatal when they are not those published."""
    digest = hashlib.sha256(blob).hexdigest()
    if len(blob) != publication.size or digest != publication.sha256:
        raise Fatal(
            f"weights {publication.version}: {len(blob)} bytes with digest {digest[:12]}…, "
            f"{publication.size} with {publication.sha256[:12]}… were published"
        )
    return Weights(publication, blob, time.monotonic())
