"""HTTP/2 by hand: what a peer may do to a connection that no gRPC client would.

Just enough to begin calls, to send parts of messages, to leave replies unread and to flood with frames.
Headers go as literals without compression (RFC 7541 §6.2.2), which every peer must take.
"""

import socket
import struct
from collections.abc import Iterable
from typing import Final, Self

DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
INITIAL_WINDOW_SIZE: Final = 4
CANCEL: Final = 8
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def message(data: bytes, *, promised: int | None = None) -> bytes:
    """A gRPC message; `promised` is the length that it claims."""
    return b"\0" + struct.pack(">I", len(data) if promised is None else promised) + data


class Connection:
    """One connection; `stream` is the number of the newest call."""

    def __init__(self, address: str, *, window: int = 65_535) -> None:
        """Window: bytes of a reply that the peer may send unasked."""
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        self.stream = -1
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, window)
        self.send(_PREFACE + frame(SETTINGS, 0, 0, settings) + frame(SETTINGS, ACK, 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Bytes as they are."""
        self.socket.sendall(data)

    def headers(self, path: str, extra: Iterable[tuple[str, str]] = ()) -> bytes:
        """The HEADERS frame of a new call."""
        self.stream += 2
        fields = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "localhost"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
            *extra,
        ]
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)
        return frame(HEADERS, END_HEADERS, self.stream, block)

    def call(self, path: str, data: bytes) -> None:
        """A whole unary call; its reply is left where it is."""
        self.send(self.headers(path) + frame(DATA, END_STREAM, self.stream, message(data)))

    def half_a_call(self, path: str, data: bytes, promised: int) -> None:
        """A call whose message promises more than is sent."""
        self.send(self.headers(path) + frame(DATA, 0, self.stream, message(data, promised=promised)))

    def read_until(self, kind: int) -> None:
        """Read frames until one of this kind; EOFError when the peer closes before."""
        while True:
            head = self._read(9)
            self._read(int.from_bytes(head[:3]))
            if head[3] == kind:
                return

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def is_closed(self) -> bool:
        """Read what came; True when the peer has closed the connection."""
        try:
            while self.socket.recv(65_536):
                pass
        except TimeoutError:
            return False
        except OSError:
            return True
        return True


def _text(text: str) -> bytes:
    """A string literal: length with a prefix of seven bits, then the bytes."""
    data = text.encode()
    if len(data) < 127:
        return bytes([len(data)]) + data
    rest, length = len(data) - 127, b"\x7f"
    while rest > 127:
        length += bytes([rest & 127 | 128])
        rest >>= 7
    return length + bytes([rest]) + data
