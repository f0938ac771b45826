"""What the link repeats and what it gives up on."""

import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import replace

import grpc
import pytest

from actor.link import Link
from penstock.runtime.exit import Fatal
from penstock.wire.auth import Credentials
from penstock.wire.limits import MAX_MESSAGE_BYTES
from tests import small_run


@pytest.fixture
def address() -> Iterator[str]:
    """A server that knows no method."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0)


def test_a_fragment_above_the_message_limit_is_fatal_and_never_sent_again(address: str) -> None:
    """Size and limit are named; no repetition would make it smaller."""
    link, stop = Link(address, Credentials()), threading.Event()
    big = replace(small_run.fragment(1), payload=b"\0" * (MAX_MESSAGE_BYTES + 1))
    give_up = threading.Timer(20, stop.set)
    give_up.start()
    try:
        with pytest.raises(Fatal, match=rf"limit of {MAX_MESSAGE_BYTES} bytes .*larger than max \(83\d+"):
            link.append(1, 0, [big], stop)
    finally:
        give_up.cancel()
        link.close()
