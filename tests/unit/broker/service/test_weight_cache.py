"""The cache of the newest weights."""

import asyncio
import hashlib

import pytest

from penstock.broker.service.weight_service import MAX_CACHED_BYTES, CorruptWeights, WeightCache
from penstock.protocol.limits import WEIGHT_CHUNK_BYTES
from penstock.protocol.messages import Publication


class StoredWeights:
    """Chunks by (version, index), counting how often each is read."""

    def __init__(self) -> None:
        self.chunks: dict[tuple[int, int], bytes] = {}
        self.reads: list[tuple[int, int]] = []

    def put(self, version: int, blob: bytes) -> Publication:
        """Cut a blob as Redis holds it."""
        for index in range(-(-len(blob) // WEIGHT_CHUNK_BYTES)):
            begin = index * WEIGHT_CHUNK_BYTES
            self.chunks[version, index] = blob[begin : begin + WEIGHT_CHUNK_BYTES]
        sha256 = hashlib.sha256(blob).hexdigest()
        return Publication(version=version, update=version, sha256=sha256, size=len(blob))

    async def read(self, version: int, index: int) -> bytes | None:
        """One chunk."""
        self.reads.append((version, index))
        await asyncio.sleep(0)
        return self.chunks.get((version, index))


async def test_many_actors_cost_one_read() -> None:
    stored = StoredWeights()
    publication = stored.put(1, b"w" * 1000)
    cache = WeightCache(stored.read)
    got = await asyncio.gather(*(cache.chunk(publication, 0) for _ in range(64)))
    assert got == [b"w" * 1000] * 64
    assert stored.reads == [(1, 0)]


async def test_every_chunk_of_large_weights_is_served_whole() -> None:
    stored = StoredWeights()
    blob = bytes(range(256)) * 10_000
    publication = stored.put(3, blob)
    cache = WeightCache(stored.read)
    chunks = [await cache.chunk(publication, index) for index in range(4)]
    assert b"".join(chunk or b"" for chunk in chunks) == blob
    assert chunks[3] == b""


async def test_an_older_version_is_read_through_and_does_not_replace_the_newest() -> None:
    stored = StoredWeights()
    older, newest = stored.put(1, b"old"), stored.put(2, b"new")
    cache = WeightCache(stored.read)
    assert await cache.chunk(newest, 0) == b"new"
    assert await cache.chunk(older, 0) == b"old"
    assert await cache.chunk(newest, 0) == b"new"
    assert stored.reads == [(2, 0), (1, 0)]


async def test_versions_beyond_the_bound_make_room_and_a_larger_one_is_not_kept() -> None:
    stored, blob = StoredWeights(), bytes(MAX_CACHED_BYTES // 2)
    first, second = stored.put(1, blob), stored.put(2, blob)
    cache = WeightCache(stored.read)
    for publication in (first, second, first):
        await cache.chunk(publication, 0)
    assert sum(kept.size for kept, _ in cache._held.values()) == MAX_CACHED_BYTES
    third = stored.put(3, b"one more")
    await cache.chunk(third, 0)
    assert cache.publication(1) == first
    assert cache.publication(2) is None
    large = Publication(version=4, update=4, sha256="0" * 64, size=MAX_CACHED_BYTES + 1)
    for _ in range(2):
        await cache.chunk(large, 0)
    assert stored.reads[-2:] == [(4, 0), (4, 0)]
    assert cache.publication(4) is None


async def test_a_version_that_is_gone_is_none() -> None:
    cache = WeightCache(StoredWeights().read)
    assert await cache.chunk(Publication(version=9, size=5, sha256="0" * 64), 0) is None


async def test_bytes_that_are_not_the_published_ones_are_never_served() -> None:
    stored = StoredWeights()
    publication = stored.put(4, b"good")
    stored.chunks[4, 0] = b"evil"
    cache = WeightCache(stored.read)
    for _ in range(2):
        with pytest.raises(CorruptWeights, match="version 4"):
            await cache.chunk(publication, 0)


async def test_another_run_with_the_same_version_number_replaces_what_is_held() -> None:
    stored = StoredWeights()
    first = stored.put(5, b"first run")
    cache = WeightCache(stored.read)
    await cache.chunk(first, 0)
    second = stored.put(5, b"second run")
    assert await cache.chunk(second, 0) == b"second run"
