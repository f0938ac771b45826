import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from penstock.client import (
    Arm,
    AsyncPolicyClient,
    AsyncTextClient,
    DeadlinePassed,
    EpisodeElsewhere,
    EpisodeUnknown,
    ExternalEnvironment,
    InvalidRequest,
    NotAllowed,
    NotReady,
    PolicyClient,
    TextClient,
    UnknownVersion,
    Unreachable,
)
from penstock.protocol.refusal import Reason
from penstock.runtime import metrics
from penstock.v1 import policy_pb2 as pb
from tests.support.language.text_stand import TOOLS, TextStand, answers_by_heart, make_model, served_text
from tests.support.run.harness import eventually
from tests.support.serving.scripted_server import (
    Happening,
    ScriptedPolicy,
    ScriptedServer,
    fails,
    hangs,
    refuses,
)

OBSERVATION = [0.0, 0.0, 0.0, 0.0]


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the server announces nothing
            await asyncio.sleep(0.005)


def held(gate: asyncio.Event) -> Happening:
    async def happening(_request: Any, _context: Any) -> None:
        await gate.wait()

    return happening


async def test_replies_find_their_requests_in_any_order(
    client: AsyncPolicyClient, policy: ScriptedPolicy
) -> None:
    gate = asyncio.Event()
    policy.script["Act"] = [held(gate)]
    async with client.act_stream() as stream:
        first = asyncio.create_task(stream.act([100, 0, 0, 0]))
        await until(lambda: policy.heard["Act"])
        others = await asyncio.gather(*(stream.act([number, 0, 0, 0]) for number in range(50)))
        assert [action.log_prob for action in others] == list(range(50))
        assert not first.done()
        gate.set()
        assert (await first).log_prob == 100
        rows = await stream.act_batch([OBSERVATION, OBSERVATION])
        assert rows.action.tolist() == [0, 0]
        assert policy.streams == 1
    await until(lambda: policy.streams == 0)


async def test_an_episode_can_go_over_a_stream(client: AsyncPolicyClient, policy: ScriptedPolicy) -> None:
    episode = await client.start_episode()
    async with client.act_stream() as stream:
        steps = [(await episode.act(OBSERVATION, stream=stream, reward=1.0)).step for _ in range(3)]
    assert steps == [0, 1, 2]
    assert (await episode.end(terminated=True)).total_return == 3.0


async def test_an_overload_is_retried_and_a_refusal_reaches_only_its_caller(
    client: AsyncPolicyClient, policy: ScriptedPolicy
) -> None:
    policy.script["Act"] = [refuses(Reason.OVERLOADED, 50), refuses(Reason.NOT_READY)]
    async with client.act_stream() as stream:
        with pytest.raises(NotReady):
            await stream.act(OBSERVATION)
        assert len({request.request_id for request in policy.heard["Act"]}) == 1
        assert (await stream.act(OBSERVATION)).action == 0


async def test_an_unanswered_request_ends_at_its_deadline(
    server: ScriptedServer, policy: ScriptedPolicy
) -> None:
    gate = asyncio.Event()
    policy.script["Act"] = [held(gate)]
    async with AsyncPolicyClient(server.address, deadline_s=2.0) as client, client.act_stream() as stream:
        with pytest.raises(DeadlinePassed, match="no reply to"):
            await stream.act(OBSERVATION)
        gate.set()
        assert (await stream.act(OBSERVATION)).action == 0


async def test_a_cancelled_request_leaves_the_stream_to_the_others(
    client: AsyncPolicyClient, policy: ScriptedPolicy
) -> None:
    policy.script["Act"] = [hangs]
    async with client.act_stream() as stream:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.act(OBSERVATION), 0.1)
        assert (await stream.act(OBSERVATION)).action == 0


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, Unreachable),
        (grpc.StatusCode.PERMISSION_DENIED, NotAllowed),
        (None, Unreachable),
    ],
)
async def test_a_stream_that_fails_or_whose_server_goes_away_fails_everybody_who_waits(
    client: AsyncPolicyClient,
    server: ScriptedServer,
    policy: ScriptedPolicy,
    code: grpc.StatusCode | None,
    kind: type[Exception],
) -> None:
    policy.script["Act"] = [hangs, hangs, server.closes if code is None else fails(code)]
    async with client.act_stream() as stream:
        ended = await asyncio.gather(*(stream.act(OBSERVATION) for _ in range(3)), return_exceptions=True)
        assert [type(error) for error in ended] == [kind] * 3
        assert code is None or all(code.name in str(error) for error in ended)
        with pytest.raises(kind, match="is over"):
            await stream.act(OBSERVATION)
    async with client.act_stream() as another:
        assert (await another.act(OBSERVATION)).action == 0


@pytest.mark.parametrize("what", ["stream", "client"])
async def test_closing_cancels_the_stream_and_its_pending_requests(
    client: AsyncPolicyClient, policy: ScriptedPolicy, what: str
) -> None:
    policy.script["Act"] = [hangs]
    stream = client.act_stream()
    waiting = asyncio.create_task(stream.act(OBSERVATION))
    await until(lambda: policy.heard["Act"])
    await (stream.aclose() if what == "stream" else client.close())
    with pytest.raises(Unreachable):
        await waiting
    await stream.aclose()
    await until(lambda: policy.streams == 0)


ASKED: Final = ({"role": "user", "content": "sum"},)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("text")


@pytest.fixture(scope="module")
def stand(folder: Path) -> Iterator[TextStand]:
    with served_text(make_model(folder / "model"), folder / "text.sock") as made:
        yield made


@pytest.fixture
def text_client(stand: TextStand, folder: Path) -> Iterator[TextClient]:
    with TextClient(f"unix:{folder / 'text.sock'}") as made:
        yield made


def test_a_conversation_continues_with_the_messages_unchanged(text_client: TextClient) -> None:
    told = text_client.describe()
    assert [(one.version, one.arms) for one in told.versions] == [(1, (Arm.LATEST,))]
    assert (told.max_tokens, told.answer_tokens, told.learns) == (64, 6, True)
    conversation = text_client.start_conversation("ada")
    assert (conversation.arm, conversation.learned) == (Arm.LATEST, True)
    messages: list[Any] = list(ASKED)
    for turn, said in enumerate(("3", "sea", None)):
        made = conversation.generate(messages, tools=TOOLS)
        assert (made.turn, made.version, made.learned, made.fallback) == (turn, 1, True, None)
        messages.append(made.answers[0].message)
        if said is not None:
            (call,) = made.answers[0].message["tool_calls"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
    assert made.text == "done"
    assert conversation.reward(0.5, turn=1) == 0
    assert conversation.end(reward=1.0).total_return == 1.5
    with pytest.raises(EpisodeUnknown):
        conversation.generate([*messages, {"role": "user", "content": "and now"}])


def test_the_parts_of_a_stream_make_up_the_answer(text_client: TextClient) -> None:
    stream = text_client.stream(ASKED, temperature=0.0)
    text = "".join(part.text for part in stream)
    assert stream.result is not None
    assert text == stream.result.text == answers_by_heart()[0]
    held = text_client.stream(ASKED, temperature=0.0, tools=TOOLS)
    assert "".join(part.text for part in held) == ""
    assert held.result is not None
    assert held.result.answers[0].message["tool_calls"][0]["function"]["name"] == "add"


def test_a_stream_that_is_closed_stops_its_answer(text_client: TextClient, stand: TextStand) -> None:
    before = metrics.NOT_LEARNED_STEPS.labels("stopped")._value.get()
    with text_client.stream(ASKED, max_tokens=55, logit_bias={9: 100.0}) as stream:
        next(iter(stream))
    eventually(lambda: metrics.NOT_LEARNED_STEPS.labels("stopped")._value.get() > before)
    eventually(lambda: stand.engine.under_way == 0)


def test_unknown_options_and_invalid_values_are_named(
    text_client: TextClient,
) -> None:
    misspelt: dict[str, Any] = {"thoughts_token": 0}
    for asks in (text_client.generate, text_client.start_conversation("ada").generate):
        with pytest.raises(
            TypeError, match="thoughts_token: no option of an answer; there are .*thought_tokens"
        ):
            asks(ASKED, **misspelt)
    of_single: dict[str, Any] = {"version": 1}
    with pytest.raises(TypeError, match="version: no option"):
        text_client.start_conversation("ada").generate(ASKED, **of_single)
    with pytest.raises(ValueError, match="thought_tokens=-1: "):
        text_client.generate(ASKED, thought_tokens=-1)
    halves: dict[str, Any] = {"max_tokens": 2.5}
    with pytest.raises(TypeError, match=r"max_tokens=2\.5: "):
        text_client.generate(ASKED, **halves)


def test_refusals_are_typed(text_client: TextClient, folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="top_p=2: say 1e-06 to 1"):
        text_client.generate(ASKED, top_p=2.0)
    with pytest.raises(UnknownVersion):
        text_client.generate(ASKED, version=77)
    with pytest.raises(InvalidRequest, match=r"tools\[0\]: write"):
        text_client.generate(ASKED, tools=[{"function": {}}])
    with pytest.raises(ValueError, match=r"messages\[0\]"):
        text_client.generate([{"content": "no role"}])
    with (
        TextClient(f"unix:{folder / 'text.sock'}", deadline_s=0.05) as hasty,
        pytest.raises(DeadlinePassed),
    ):
        hasty.generate(ASKED, max_tokens=55, logit_bias={9: 100.0}, count=16)


async def test_the_asynchronous_client_behaves_alike(stand: TextStand, folder: Path) -> None:
    async with AsyncTextClient(f"unix:{folder / 'text.sock'}") as text_client:
        made = await text_client.generate(ASKED, temperature=0.0)
        assert made.text == answers_by_heart()[0]
        stream = text_client.stream(ASKED, temperature=0.0)
        assert "".join([part.text async for part in stream]) == made.text
        conversation = await text_client.start_conversation(name="async")
        again = await text_client.start_conversation(name="async", must_exist=True)
        assert again.conversation_id == conversation.conversation_id
        await conversation.generate(ASKED)
        assert await conversation.reward(1.0) == 0
        assert (await conversation.end()).turns == 1


EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "python" / "cartpole_client.py"


class Corridor:
    """Three steps of reward 1, 2 and 3; counts its resets."""

    def __init__(self, *, truncates: bool = False) -> None:
        self.seeds: list[int | None] = []
        self._truncates = truncates
        self._at = 0

    def reset(self, *, seed: int | None = None) -> tuple[Any, Any]:
        self.seeds.append(seed)
        self._at = 0
        return [0.0] * 4, {}

    def step(self, action: int, /) -> tuple[Any, Any, bool, bool, Any]:
        assert isinstance(action, int)
        self._at += 1
        is_over = self._at == 3
        ends = (is_over and not self._truncates, is_over and self._truncates)
        return [float(self._at)] * 4, self._at, *ends, {}


def run(address: str, environment: Corridor, episodes: int) -> list[float]:
    with PolicyClient(address) as client:
        return list(ExternalEnvironment(client).run(environment, episodes, seed=4))


@pytest.mark.parametrize("truncates", [True, False])
async def test_rewards_travel_with_the_next_step(
    server: ScriptedServer, policy: ScriptedPolicy, truncates: bool
) -> None:
    environment = Corridor(truncates=truncates)
    assert await asyncio.to_thread(run, server.address, environment, 2) == [6.0, 6.0]
    assert environment.seeds == [4, None]
    acts: list[pb.ActRequest] = policy.heard["Act"]
    assert [act.reward if act.HasField("reward") else None for act in acts] == [None, 1.0, 2.0] * 2
    end: pb.EndEpisodeRequest = policy.heard["EndEpisode"][0]
    assert end.reward == 3.0
    assert end.ending == (pb.ENDING_TRUNCATED if truncates else pb.ENDING_TERMINATED)
    assert len(end.final_observation) == 1
    assert policy.heard["Reward"] == []


async def test_an_episode_that_is_lost_is_played_anew_a_few_times(
    server: ScriptedServer, policy: ScriptedPolicy
) -> None:
    environment = Corridor()
    policy.script["EndEpisode"] = [refuses(Reason.EPISODE_UNKNOWN), refuses(Reason.EPISODE_ELSEWHERE)]
    assert await asyncio.to_thread(run, server.address, environment, 1) == [6.0]
    assert len(environment.seeds) == 3
    assert len(policy.heard["StartEpisode"]) == 3
    policy.script["EndEpisode"] = [refuses(Reason.EPISODE_ELSEWHERE)] * 3
    with pytest.raises(EpisodeElsewhere):
        await asyncio.to_thread(run, server.address, environment, 1)


async def test_the_example_plays_cartpole(server: ScriptedServer, policy: ScriptedPolicy) -> None:
    command = [sys.executable, str(EXAMPLE), server.address, "2"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    assert process.returncode == 0
    returns = [float(line) for line in printed.split()]
    assert sum(returns) == len(policy.heard["Act"])
    assert all(8 <= total <= 11 for total in returns)
