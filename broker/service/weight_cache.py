"""The weights that actors ask for, kept as the chunks that Redis holds.

A version is read when its first chunk is asked for, once, whatever the number of actors, and served from
here until others need the room: the one that was asked for longest ago goes first. So a fetch that has begun
ends, also where Redis has dropped the version since. Chunks of a version that is not held are read through.
A version whose bytes do not match its SHA-256 raises CorruptWeights and is not kept.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Final

from penstock.protocol.limits import MIB, WEIGHT_CHUNK_BYTES
from penstock.protocol.messages import Publication

MAX_CACHED_BYTES: Final = 256 * MIB
"""Of all versions together; a larger version is read through chunk by chunk."""

ReadChunk = Callable[[int, int], Awaitable[bytes | None]]


class CorruptWeights(RuntimeError):
    """Redis holds bytes that are not the published ones."""


class WeightCache:
    """`read_chunk(version, index)` answers None where the chunk does not exist (any more)."""

    def __init__(self, read_chunk: ReadChunk) -> None:
        self._read_chunk = read_chunk
        self._lock = asyncio.Lock()
        self._held: dict[int, tuple[Publication, list[bytes]]] = {}
        """By version; the one that was asked for longest ago comes first."""

    def publication(self, version: int) -> Publication | None:
        """The publication of a version that is held here."""
        held = self._held.get(version)
        return None if held is None else held[0]

    async def chunk(self, publication: Publication, index: int) -> bytes | None:
        """Chunk `index` of a version; None when Redis no longer holds it. At most 1 MiB, never copied."""
        if index == 0 and not self._holds(publication) and publication.size <= MAX_CACHED_BYTES:
            await self._load(publication)
        if not self._holds(publication):
            return await self._read_chunk(publication.version, index)
        held = self._held[publication.version] = self._held.pop(publication.version)
        return held[1][index] if index < len(held[1]) else b""

    def _holds(self, publication: Publication) -> bool:
        return self.publication(publication.version) == publication

    async def _load(self, publication: Publication) -> None:
        async with self._lock:
            if self._holds(publication):
                return
            chunks: list[bytes] = []
            digest = hashlib.sha256()
            for index in range(-(-publication.size // WEIGHT_CHUNK_BYTES)):
                chunk = await self._read_chunk(publication.version, index)
                if chunk is None:
                    return
                digest.update(chunk)
                chunks.append(chunk)
            _verify(publication, digest.hexdigest())
            self._held.pop(publication.version, None)
            self._held[publication.version] = (publication, chunks)
            while self._size() > MAX_CACHED_BYTES:
                del self._held[next(iter(self._held))]

    def _size(self) -> int:
        return sum(publication.size for publication, _ in self._held.values())


def _verify(publication: Publication, sha256: str) -> None:
    if sha256 != publication.sha256:
        raise CorruptWeights(
            f"version {publication.version}: Redis holds sha256 {sha256[:12]}…, "
            f"published was {publication.sha256[:12]}…; the learner's next publication replaces it"
        )
