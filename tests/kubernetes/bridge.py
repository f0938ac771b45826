"""Connections of a socket that was opened outside go to an address that is reached from inside.

`nsenter --net … python -m tests.kubernetes.bridge FILE HOST PORT`: FILE is the number of an open listening
socket, which stays in the network where it was opened.
"""

import asyncio
import socket
import sys


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(1 << 16):
        target.write(data)
        await target.drain()
    if target.can_write_eof():
        target.write_eof()


async def serve(file: int, host: str, port: int) -> None:
    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError as error:  # it has not begun
            print(f"{host}:{port}: {error}", flush=True)
            writer.close()
            return
        try:
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        except OSError as error:  # one of the two is gone
            print(f"{host}:{port}: {error}", flush=True)
        finally:
            far_writer.close()
            writer.close()

    server = await asyncio.start_server(connect, sock=socket.socket(fileno=file))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
