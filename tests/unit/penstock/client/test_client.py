import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final, cast

import grpc
import numpy as np
import pytest

from penstock.client import (
    Arm,
    AsyncPolicyClient,
    BadReply,
    DeadlinePassed,
    EpisodeElsewhere,
    EpisodeUnknown,
    InvalidRequest,
    NotAllowed,
    NotReady,
    Overloaded,
    PolicyClient,
    PolicyError,
    TextClient,
    UnknownVersion,
    Unreachable,
    calls,
    text_calls,
)
from penstock.client.calls import from_parts, rows_of, to_mask_parts, to_parts
from penstock.client.values import ActOptions, Description
from penstock.protocol import spaces
from penstock.protocol.limits import CALL_DEADLINE_S
from penstock.protocol.refusal import Reason
from penstock.protocol.spaces import Box, Discrete
from penstock.protocol.tensor import from_tensor, to_tensor
from penstock.v1 import policy_pb2 as pb
from tests.support.serving.scripted_server import (
    CARTPOLE,
    VERSION,
    ScriptedPolicy,
    ScriptedServer,
    fails,
    hangs,
    refuses,
    serving,
)

HALF: Final = "a\ud83d"
"""A text that was cut in the middle of a pair of surrogates, as JSON lets it through."""


def act(**options: Any) -> object:
    described = Description(
        run="r", policy="p", observation_space=Box(low=-np.ones(1, np.float32), high=np.ones(1, np.float32)),
        action_space=Discrete(2), versions=(), max_batch=1, max_message_bytes=1, max_episodes=1,
        reward_window_ms=1, episode_timeout_ms=1, server="s", learns=True,
    )  # fmt: skip
    return calls.Codec("p", described).act(np.zeros(1, np.float32), cast(ActOptions, options))


SAID: Final[dict[str, Callable[[], object]]] = {
    "policy": lambda: PolicyClient("127.0.0.1:1", policy=HALF),
    "policy of text": lambda: TextClient("127.0.0.1:1", policy=HALF),
    "address": lambda: PolicyClient(f"{HALF}:1"),
    "address of a socket": lambda: PolicyClient(f"unix:/tmp/{HALF}"),
    "client_key": lambda: calls.start("p", HALF, learned=True),
    "client_key of one action": lambda: act(client_key=HALF),
    "state": lambda: act(state={HALF: np.zeros(1)}),
    "client_key of a conversation": lambda: text_calls.start("p", HALF, {}),
    "name": lambda: text_calls.start("p", "", {"name": HALF}),
    "messages[1]": lambda: text_calls.generate(
        "p", [{"role": "user", "content": "a"}, {"role": "user", "content": HALF}], {}
    ),
    "stop": lambda: text_calls.generate("p", [], {"stop": ["a", HALF]}),
    "begins_with": lambda: text_calls.generate("p", [], {"begins_with": HALF}),
    "request_id": lambda: text_calls.reward("c", [], HALF),
}


@pytest.mark.parametrize(("name", "call"), SAID.items(), ids=SAID.keys())
def test_invalid_text_is_refused_by_its_field(name: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(name.partition(' ')[0])}[=:]") as told:
        call()
    assert not isinstance(told.value, UnicodeEncodeError)
    assert r"\ud83d" in str(told.value)


OBSERVATION = [0.5, 1.0, 1.5, 2.0]


async def test_an_observation_is_answered(either: Any, policy: ScriptedPolicy) -> None:
    action = await either.act(
        OBSERVATION, client_key="Ünï 😀", deterministic=True, seed=5, version=VERSION, distribution=True,
        value=True, mask=[True, False], state={"core": np.arange(2, dtype=np.float32)},
    )  # fmt: skip
    request: pb.ActRequest = policy.heard["Act"][0]
    assert (request.policy, request.client_key) == ("default", "Ünï 😀")
    assert (request.seed, request.version) == (5, VERSION)
    assert (request.deterministic, request.batch, len(request.request_id)) == (True, 0, 32)
    assert from_tensor("mask", request.action_mask[0].value).tolist() == [True, False]
    assert not request.HasField("step")
    assert (action.action, action.log_prob, action.value) == (0, 5.0, -5.0)
    assert (action.version, action.arm, action.fallback) == (VERSION, Arm.PINNED, None)
    assert action.distribution["probability"].tolist() == [0.5, 0.5]
    assert action.state["core"].tolist() == [0.0, 1.0]
    assert action.request_id == request.request_id


async def test_a_batch_has_rows(either: Any, policy: ScriptedPolicy) -> None:
    batch = await either.act_batch(np.arange(12).reshape(3, 4), value=True, mask=np.ones((3, 2), bool))
    assert policy.heard["Act"][0].batch == 3
    assert batch.action.tolist() == [0, 0, 0]
    assert batch.log_prob is not None
    assert batch.log_prob.tolist() == [6.0, 22.0, 38.0]
    assert batch.value is not None
    assert (batch.value.dtype.name, batch.value.shape) == ("float32", (3,))


async def test_nested_spaces_are_encoded_and_decoded() -> None:
    box = spaces.Box(np.full(2, -1, np.float32), np.full(2, 1, np.float32))
    seen = spaces.Dict((("body", box), ("mode", spaces.Discrete(3))))
    done = spaces.Tuple((spaces.Discrete(2, start=4), box))
    async with serving(seen, done) as server, AsyncPolicyClient(server.address) as client:
        action = await client.act({"body": [0.25, 0.25], "mode": 2})
        assert action.action[0] == 4
        assert action.action[1].tolist() == [-1.0, -1.0]
        assert action.log_prob == 2.5
        with pytest.raises(ValueError, match="observation/mode: float64"):
            await client.act({"body": [0, 0], "mode": 0.5})
    assert [part.path for part in server.policy.heard["Act"][0].observation] == ["body", "mode"]


async def test_the_spaces_are_learned_once(client: AsyncPolicyClient, policy: ScriptedPolicy) -> None:
    await asyncio.gather(*(client.act(OBSERVATION) for _ in range(5)))
    assert len(policy.heard["Describe"]) == 1
    policy.script["Act"] = [refuses(Reason.INVALID)]
    with pytest.raises(InvalidRequest, match="invalid: scripted"):
        await client.act(OBSERVATION)
    await client.act(OBSERVATION)
    assert len(policy.heard["Describe"]) == 2
    description = await client.describe()
    assert (description.observation_space, description.action_space) == CARTPOLE
    assert description.versions[0].arms == (Arm.LATEST, Arm.ACTIVE)
    assert (description.run, description.max_batch, description.server) == ("scripted", 64, "peer")


async def test_an_episode_is_played(either: Any, policy: ScriptedPolicy) -> None:
    episode = await either.start_episode("player", learned=False)
    assert (episode.arm, episode.learned) == (Arm.LATEST, False)
    first = await episode.act(OBSERVATION)
    second = await episode.act(OBSERVATION, reward=1.0, taken_action=1, taken_log_prob=-0.5)
    assert (first.step, second.step, second.episode_id) == (0, 1, episode.episode_id)
    taken: pb.ActRequest = policy.heard["Act"][1]
    assert (taken.step, taken.reward, taken.taken_log_prob) == (1, 1.0, -0.5)
    assert from_tensor("taken", taken.taken_action[0].value).item() == 1
    assert await episode.reward(2.0) == 0
    assert await episode.rewards([(0, 4.0), (None, 8.0)]) == 1
    result = await episode.end(truncated=True, final_observation=OBSERVATION, reward=16.0)
    assert (result.total_return, result.length) == (31.0, 2)
    ended: pb.EndEpisodeRequest = policy.heard["EndEpisode"][0]
    assert (ended.ending, len(ended.final_observation)) == (pb.ENDING_TRUNCATED, 1)
    asked = [request for method in policy.heard.keys() - {"Describe"} for request in policy.heard[method]]
    assert len({request.request_id for request in asked}) == 6


async def test_an_end_needs_its_kind_and_a_truncation_its_last_observation(client: AsyncPolicyClient) -> None:
    episode = await client.start_episode()
    with pytest.raises(ValueError, match="terminated=True or truncated=True"):
        await episode.end()
    with pytest.raises(ValueError, match="give final_observation"):
        await episode.end(truncated=True)


@pytest.mark.parametrize("method", ["StartEpisode", "Act", "Reward", "EndEpisode"])
async def test_a_lost_reply_is_requested_again_under_the_same_id(
    either: Any, server: ScriptedServer, policy: ScriptedPolicy, method: str
) -> None:
    policy.lost[method] = [server.closes]
    episode = await either.start_episode()
    assert (await episode.act(OBSERVATION)).step == 0
    await episode.reward(1.0)
    assert (await episode.end(terminated=True, reward=2.0)).total_return == 3.0
    assert policy.heard[method][0] == policy.heard[method][1]


async def test_a_silent_server_is_called_again_after_half_of_the_deadline(
    client: AsyncPolicyClient, policy: ScriptedPolicy
) -> None:
    episode = await client.start_episode()
    policy.lost["Act"] = [hangs]
    assert (await episode.act(OBSERVATION)).step == 0
    first, again = policy.heard["Act"]
    assert first.request_id == again.request_id


async def test_a_deadline_is_kept_whatever_the_server_does(
    server: ScriptedServer, policy: ScriptedPolicy
) -> None:
    policy.script["Describe"] = [hangs]
    policy.script["Act"] = [hangs, hangs, hangs]
    async with AsyncPolicyClient(server.address, deadline_s=0.4) as client:
        started = time.monotonic()
        with pytest.raises(DeadlinePassed, match="DEADLINE_EXCEEDED"):
            await client.act(OBSERVATION)
        assert time.monotonic() - started > 0.3


async def test_an_overloaded_call_is_retried(either: Any, policy: ScriptedPolicy) -> None:
    policy.script["Act"] = [refuses(Reason.OVERLOADED, 150), refuses(Reason.OVERLOADED, 150)]
    started = time.monotonic()
    await either.act(OBSERVATION)
    assert time.monotonic() - started >= 0.3
    assert len(policy.heard["Act"]) == 3
    assert len({request.request_id for request in policy.heard["Act"]}) == 1


async def test_an_overload_beyond_the_deadline_is_raised_at_once(
    client: AsyncPolicyClient, policy: ScriptedPolicy
) -> None:
    policy.script["Act"] = [refuses(Reason.OVERLOADED, 60_000)]
    started = time.monotonic()
    with pytest.raises(Overloaded) as refused:
        await client.act(OBSERVATION)
    assert time.monotonic() - started < 30
    assert refused.value.refusal is not None
    assert refused.value.refusal.retry_after_ms == 60_000


FAILURES: Final[dict[Reason | grpc.StatusCode, type[PolicyError]]] = {
    Reason.INVALID: InvalidRequest,
    Reason.UNKNOWN_VERSION: UnknownVersion,
    Reason.EPISODE_UNKNOWN: EpisodeUnknown,
    Reason.EPISODE_ELSEWHERE: EpisodeElsewhere,
    Reason.NOT_READY: NotReady,
    Reason.DEADLINE: DeadlinePassed,
    Reason.FENCED: PolicyError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: NotAllowed,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
    grpc.StatusCode.UNIMPLEMENTED: Unreachable,
}


@pytest.mark.parametrize("why", FAILURES, ids=lambda why: why.name)
async def test_a_refusal_or_status_is_an_error_of_its_kind_and_not_asked_again(
    client: AsyncPolicyClient, policy: ScriptedPolicy, why: Reason | grpc.StatusCode
) -> None:
    policy.script["Act"] = [refuses(why) if isinstance(why, Reason) else fails(why)]
    with pytest.raises(FAILURES[why], match="scripted") as refused:
        await client.act(OBSERVATION)
    assert type(refused.value) is FAILURES[why]
    if isinstance(why, Reason):
        assert refused.value.refusal is not None
        assert refused.value.refusal.reason is why
    else:
        assert refused.value.refusal is None
        assert f"{why.name}: scripted" in str(refused.value)
    assert len(policy.heard["Act"]) == 1


async def test_an_address_without_a_server_is_unreachable_by_the_deadline() -> None:
    started = time.monotonic()
    async with AsyncPolicyClient("127.0.0.1:1", deadline_s=0.3) as client:
        with pytest.raises(Unreachable, match="127.0.0.1:1: UNAVAILABLE"):
            await client.act(OBSERVATION)
    with PolicyClient("127.0.0.1:1", deadline_s=0.3) as other, pytest.raises(Unreachable):
        await asyncio.to_thread(other.describe)
    assert time.monotonic() - started < 2 * CALL_DEADLINE_S


async def test_a_message_above_the_limit_is_an_invalid_request() -> None:
    space = spaces.Box(np.zeros(2**20, np.float64), np.ones(2**20, np.float64))
    async with serving(action=space) as server, AsyncPolicyClient(server.address) as client:
        with pytest.raises(InvalidRequest, match="above its limit, here 8388608 bytes"):
            await client.describe()
    assert len(server.policy.heard["Describe"]) == 1


async def test_an_unreadable_reply_raises_a_clear_error(
    client: AsyncPolicyClient, policy: ScriptedPolicy
) -> None:
    await client.act(OBSERVATION)
    policy.spaces = (policy.spaces[0], spaces.Tuple((policy.spaces[1],)))
    with pytest.raises(BadReply, match=r"action: the parts are \['0'\]"):
        await client.act(OBSERVATION)
    assert (await client.act(OBSERVATION)).action == (0,)


async def test_closing_the_client_ends_its_calls(either: Any, policy: ScriptedPolicy) -> None:
    reached = asyncio.Event()

    async def holds(request: Any, context: Any) -> None:
        reached.set()
        await hangs(request, context)

    policy.script["Act"] = [holds]
    waiting = asyncio.create_task(either.act(OBSERVATION))
    await reached.wait()
    await either.close()
    for call in (either.act(OBSERVATION), waiting):
        with pytest.raises(Unreachable, match="was closed"):
            await call


async def test_a_cancelled_task_stays_cancelled(client: AsyncPolicyClient, policy: ScriptedPolicy) -> None:
    await client.describe()
    policy.script["Act"] = [hangs]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.act(OBSERVATION), 0.2)
    assert (await client.act(OBSERVATION)).action == 0


async def test_threads_share_a_client(server: ScriptedServer) -> None:
    with PolicyClient(server.address) as client:
        ask = lambda number: client.act([number, 0, 0, 0]).log_prob  # noqa: E731
        answers = await asyncio.gather(*(asyncio.to_thread(ask, number) for number in range(20)))
    assert answers == list(range(20))
    assert len(server.policy.heard["Describe"]) == 1
    assert threading.active_count() < 60


def test_the_client_loads_grpc_protobuf_and_numpy_alone_and_when_it_is_asked_for() -> None:
    code = """
import json, sys, penstock
early = set(sys.modules) & {"grpc", "numpy", "penstock.client", "asyncio"}
import asyncio, grpc, grpc.aio, numpy, google.protobuf
before = {name.split(".")[0] for name in sys.modules} - {"penstock"}
from penstock import PolicyClient
loaded = {name.split(".")[0] for name in sys.modules} - before - sys.stdlib_module_names
print(json.dumps([sorted(early), sorted(loaded)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert json.loads(done.stdout) == [[], ["penstock"]]


POSITION = spaces.Box(np.full(3, -1, np.float32), np.full(3, 1, np.float32))
CAMERA = spaces.Box(np.zeros((2, 2), np.uint8), np.full((2, 2), 255, np.uint8))
ARM = spaces.Dict((("grip", spaces.Discrete(3, start=-1)), ("bits", spaces.MultiBinary(2))))
NESTED = spaces.Dict(
    (("camera", CAMERA), ("body", spaces.Tuple((POSITION, spaces.Discrete(4)))), ("arm", ARM))
)
VALUE = {
    "camera": [[0, 255], [1, 2]],
    "body": ([0.5, -0.5, 0.0], 3),
    "arm": {"grip": -1, "bits": np.array([True, False])},
}


def arrays(parts: list[pb.Part]) -> dict[str, np.ndarray[Any, Any]]:
    return {part.path: from_tensor(part.path, part.value) for part in parts}


def test_a_nested_value_becomes_one_part_per_leaf_and_comes_back_in_the_form_of_its_space() -> None:
    sent = to_parts("observation", NESTED, VALUE)
    parts = arrays(sent)
    assert {path: (array.dtype.name, array.shape) for path, array in parts.items()} == {
        "camera": ("uint8", (2, 2)),
        "body/0": ("float32", (3,)),
        "body/1": ("int64", ()),
        "arm/grip": ("int64", ()),
        "arm/bits": ("int8", (2,)),
    }
    assert parts["camera"].tolist() == [[0, 255], [1, 2]]
    assert parts["arm/bits"].tolist() == [1, 0]
    back = from_parts("action", NESTED, sent)
    assert (back["body"][1], back["arm"]["grip"]) == (3, -1)
    assert isinstance(back["arm"]["grip"], int)
    assert isinstance(back["body"], tuple)
    back["camera"][0, 0] = 9


def test_a_batch_has_a_leading_axis_in_every_leaf() -> None:
    space = spaces.Tuple((POSITION, spaces.Discrete(4)))
    value = (np.zeros((5, 3)), [0, 1, 2, 3, 0])
    assert rows_of("observation", space, value) == 5
    parts = to_parts("observation", space, value, 5)
    assert {path: array.shape for path, array in arrays(parts).items()} == {"0": (5, 3), "1": (5,)}
    assert from_parts("action", space, parts, 5)[1].tolist() == [0, 1, 2, 3, 0]


@pytest.mark.parametrize(
    ("space", "value", "message"),
    [
        (POSITION, [0, 0], r"^observation: the shape is \(2,\), the space asks for \(3,\)"),
        (POSITION, ["a", "b", "c"], r"^observation: <U1 cannot become float32"),
        (POSITION, None, r"^observation: the shape is \(\)"),
        (spaces.Discrete(2), 0.5, "^observation: float64 cannot become int64"),
        (NESTED, VALUE | {"camera": np.full((2, 2), 256)}, "^observation/camera: int64 cannot become uint8"),
        (NESTED, VALUE | {"camera": np.full((2, 2), -1)}, "^observation/camera: int64 cannot become uint8"),
        (NESTED, VALUE | {"camera": [[1], [1, 2]]}, "^observation/camera: setting an array element"),
        (NESTED, VALUE | {"body": ([0, 0, 0],)}, "^observation: IndexError.*observation/body/1"),
        (NESTED, {"camera": VALUE["camera"]}, "^observation: KeyError.'body'.*observation/arm/grip"),
        (NESTED, 3, "^observation: TypeError"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_its_leaf(
    space: spaces.Space, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        to_parts("observation", space, value)


def test_a_batch_without_rows_or_with_uneven_ones_is_refused() -> None:
    space = spaces.Tuple((POSITION, spaces.Discrete(4)))
    with pytest.raises(ValueError, match=r"observation/0: a batch needs a leading axis"):
        rows_of("observation", space, (1.0, 2))
    with pytest.raises(ValueError, match=r"observation/0: a batch needs .* not \(0, 3\)"):
        rows_of("observation", space, (np.zeros((0, 3)), []))
    with pytest.raises(ValueError, match=r"observation/1: the shape is \(4,\), the space asks for \(5,\)"):
        to_parts("observation", space, (np.zeros((5, 3)), [0] * 4), 5)
    with pytest.raises(ValueError, match="without parts"):
        rows_of("observation", spaces.Dict(()), {})


def test_masks_are_for_discrete_parts_only() -> None:
    bare = to_mask_parts(spaces.Discrete(3), [1, 0, 1])
    assert arrays(bare)[""].tolist() == [True, False, True]
    assert arrays(to_mask_parts(ARM, {"grip": np.ones((2, 3), bool)}, 2))["grip"].shape == (2, 3)
    with pytest.raises(ValueError, match=r"\['bits'\] are no choices .* those are \['grip'\]"):
        to_mask_parts(ARM, {"bits": [True, True]})
    with pytest.raises(ValueError, match=r"mask/grip: the shape is \(2,\)"):
        to_mask_parts(ARM, {"grip": [True, True]})


def test_a_reply_whose_parts_differ_from_the_space_is_refused() -> None:
    with pytest.raises(ValueError, match=r"action: the parts are \[\], not \[''\]"):
        from_parts("action", POSITION, [])
    with pytest.raises(ValueError, match=r"action: the shape is \(2,\)"):
        from_parts("action", POSITION, [pb.Part(value=to_tensor(np.zeros(2, np.float32)))])
