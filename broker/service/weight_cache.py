"""The weights that actors ask for, kept as the chunks that Redis holds.

The newest version is read once, whatever the number of actors that wait for it, and kept until a newer
one is asked for; chunks of any other version are read through. A version whose bytes do not match its
SHA-256 raises CorruptWeights and is not kept.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Final

from penstock.wire.limits import MIB, WEIGHT_CHUNK_BYTES
from penstock.wire.messages import Publication

MAX_CACHED_BYTES: Final = 256 * MIB
"""Larger weights are read through chunk by chunk."""

ReadChunk = Callable[[int, int], Awaitable[bytes | None]]


class CorruptWeights(RuntimeError):
    """Redis holds bytes that are not the published ones."""


class WeightCache:
    """`read_chunk(version, index)` answers None where the chunk does not exist (any more)."""

    def __init__(self, read_chunk: ReadChunk) -> None:
        self._read_chunk = read_chunk
        self._lock = asyncio.Lock()
        self._held = Publication()
        self._chunks: list[bytes] = []

    async def chunk(self, publication: Publication, index: int, *, newest: bool = False) -> bytes | None:
        """Chunk `index` of a version; None when Redis no longer holds it. At most 1 MiB, never copied."""
        wanted = newest or publication.version > self._held.version
        if wanted and publication != self._held and publication.size <= MAX_CACHED_BYTES:
            await self._load(publication)
        if publication == self._held:
            return self._chunks[index] if index < len(self._chunks) else b""
        return await self._read_chunk(publication.version, index)

    async def _load(self, publication: Publication) -> None:
        async with self._lock:
            if publication == self._held:
                return
            chunks: list[bytes] = []
            for index in range(-(-publication.size // WEIGHT_CHUNK_BYTES)):
                chunk = await self._read_chunk(publication.version, index)
                if chunk is None:
                    return
                chunks.append(chunk)
            _verify(publication, chunks)
            self._held, self._chunks = publication, chunks


def _verify(publication: Publication, chunks: list[bytes]) -> None:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    if digest.hexdigest() != publication.sha256:
        raise CorruptWeights(
            f"version {publication.version}: Redis holds sha256 {digest.hexdigest()[:12]}…, "
            f"published was {publication.sha256[:12]}…; the learner's next publication replaces it"
        )
