"""Compressed messages: gRPC would unfold them before anything of ours has looked at their size."""

from collections.abc import Iterator
from typing import Final

import grpc
import pytest

from penstock.protocol.limits import MAX_MESSAGE_BYTES, MIB
from tests.support.abuse.stage import Stage, memory_within, nothing_stored, staged, unharmed
from tests.support.abuse.wire import EXPERIENCE, RawChannel

BOMB_BYTES: Final = 256 * MIB
"""Zeros: they arrive as a quarter of a MiB."""
BOMBS: Final = {"gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with staged(tmp_path_factory.mktemp("stage")) as ready:
        yield ready


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_before_it_is_unfolded(stage: Stage, name: str) -> None:
    pid = stage.broker.process.pid
    with (
        unharmed(stage),
        nothing_stored(stage),
        memory_within(pid, 64 * MIB),
        RawChannel(stage.address) as channel,
    ):
        answer = channel.send(f"{EXPERIENCE}Append", bytes(BOMB_BYTES), compression=BOMBS[name])
    assert answer.code is grpc.StatusCode.UNIMPLEMENTED, answer
    assert name in answer.text


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_compressed_message_is_refused_too(stage: Stage, name: str) -> None:
    with unharmed(stage), nothing_stored(stage), RawChannel(stage.address) as channel:
        answer = channel.send(
            f"{EXPERIENCE}Append", bytes(MAX_MESSAGE_BYTES // 1024), compression=BOMBS[name]
        )
    assert answer.code is grpc.StatusCode.UNIMPLEMENTED, answer
