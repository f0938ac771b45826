"""The yardstick of a publication: the same bytes in unary gRPC calls of 1 MiB, nothing stored or checked.

`python -m benchmarks.plain_grpc ADDRESS SIZE` is the server: it holds the bytes already, in pieces, says
"ready" on its standard output and ends with its standard input.
"""

import asyncio
import os
import sys
from typing import Final

import grpc

from penstock.rpc.auth import Credentials
from penstock.rpc.channel import open_channel
from penstock.rpc.server import SERVER_OPTIONS
from penstock.wire.limits import MIB

PIECE_BYTES: Final = MIB
READY: Final = "ready"
_SERVICE, _METHOD = "penstock.bench.Plain", "Piece"


class Client:
    """One caller; `fetch` takes all bytes, one call in flight."""

    def __init__(self, address: str, size: int) -> None:
        self._channel = open_channel(address, Credentials())
        self._piece = self._channel.unary_unary(f"/{_SERVICE}/{_METHOD}", None, None)
        self._size = size

    def fetch(self) -> bytes:
        """Return the bytes."""
        data = bytearray()
        while len(data) < self._size:
            data += self._piece((len(data) // PIECE_BYTES).to_bytes(4))
        return bytes(data)

    def close(self) -> None:
        """End the channel."""
        self._channel.close()


async def serve(address: str, size: int) -> None:
    """Serve until standard input ends."""
    blob = os.urandom(size)
    pieces = [blob[at : at + PIECE_BYTES] for at in range(0, size, PIECE_BYTES)]

    async def piece(request: bytes, _context: object) -> bytes:
        return pieces[int.from_bytes(request)]

    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers = {_METHOD: grpc.unary_unary_rpc_method_handler(piece)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    server.add_insecure_port(address)
    await server.start()
    print(READY, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
