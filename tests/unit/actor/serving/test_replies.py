"""A reply put together from pieces is, byte for byte, what protobuf writes of its message."""

from typing import Final

import numpy as np
import pytest

from penstock.protocol.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space
from penstock.v1 import policy_pb2 as pb
from tests.support.serving.server_parts import FAR, OBSERVATION, Stand, parts_of, rows_of, specification

ACTIONS: Final[dict[str, Space]] = {
    "choice": Discrete(3, start=-1),
    "choices": MultiDiscrete((2, 3)),
    "bits": MultiBinary(3),
    "real": Box(np.full((2, 2), -1, np.float32), np.full((2, 2), 1, np.float32)),
    "nested": Dict((("move", Discrete(4)), ("force", Box(np.array(-1.0), np.array(1.0))))),
}


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("action", ACTIONS)
async def test_every_kind_of_action_is_written_as_protobuf_does(action: str, batch: int) -> None:
    stand = Stand(specification(action=ACTIONS[action]))
    await stand.publish(300)
    rows = rows_of(max(batch, 1))["observation"]
    observation = parts_of(OBSERVATION, rows if batch else rows[0])
    for request_id in ("", "a", "b" * 128, "ä"):
        request = pb.ActRequest(request_id=request_id, observation=observation, batch=batch)
        written = await stand.reply(request, FAR)
        expected = stand.handler.writer.reply(request, stand.told[-1])
        assert expected.version == 300
        assert written == expected.SerializeToString()


@pytest.mark.parametrize("wish", ["want_value", "want_distribution"])
async def test_a_reply_that_says_more_is_written_whole(wish: str) -> None:
    stand = Stand()
    await stand.publish(1)
    request = stand.asking(rows_of(1)["observation"][0], **{wish: True})
    reply, _ = await stand.answer(request, FAR)
    assert reply.value if wish == "want_value" else reply.distribution
