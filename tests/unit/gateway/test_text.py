import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from penstock.client import Unreachable
from penstock.gateway.frame.requests import CallLimits
from penstock.gateway.frame.route_access import make_app
from penstock.gateway.text_listener import text_listener
from penstock.gateway.upstream import RunAddresses, ServedText, Upstream
from penstock.protocol.limits import MIB
from penstock.rpc.auth import Credentials
from penstock.rpc.gate import Rates
from tests.support.gateway.small_gateway import serving
from tests.support.language.text_stand import (
    BEHIND,
    THOUGHT,
    WITHOUT,
    TextStand,
    agents_api,
    agents_api_over,
    form_of,
    make_model,
    make_thinker,
    relay_to,
    served_text,
    upstream_at,
)
from tests.support.run.harness import eventually

ASKED: Final[list[Any]] = [{"role": "user", "content": "sum"}]
SOON_S: Final = 0.2
"""In which a server that is away is given up."""
PATIENCE_S: Final = 20.0
"""In which a call that waits for a server that says nothing would not have come back."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agents")


@pytest.fixture(scope="module")
def stands(folder: Path) -> Iterator[dict[str, TextStand]]:
    """The first, and one agent whose policy has a name of its own; a second agent's server is not there."""
    model = make_model(folder / "model")
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(served_text(model, folder / f"{name or 'first'}.sock", policy=policy))
            for name, policy in (("", "default"), ("coder", "whatever"))
        }


def over(folder: Path, *names: str) -> Any:
    """The address of the API over these agents; of who has no server nobody answers at the socket."""
    addresses = {name: f"unix:{folder}/{name or 'first'}.sock" for name in names}
    return agents_api_over(addresses, reach_s=SOON_S)


def client_of(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=address, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(stands: dict[str, TextStand], folder: Path) -> Iterator[openai.OpenAI]:
    assert set(stands) == {"", "coder"}
    with over(folder, "", "coder", "away") as address:
        yield client_of(address)


@pytest.mark.parametrize(("model", "asked"), [("default", ""), ("coder", "coder"), ("coder:latest", "coder")])
def test_the_model_name_selects_the_agent_that_answers_and_learns(
    client: openai.OpenAI, stands: dict[str, TextStand], model: str, asked: str
) -> None:
    name = f"talk-with-{model}"
    made: Any = client.chat.completions.create(
        model=model, messages=ASKED, metadata={"conversation_id": name}
    )
    assert (made.model, made.system_fingerprint) == (model, f"{model.partition(':')[0]}:1")
    assert made.penstock["learned"]
    reward = {"conversation_id": name, "model": model, "reward": 1.0, "final": True}
    result: Any = client.post("/rewards", body=reward, cast_to=object)
    assert (result["total_return"], result["turns"]) == (1.0, 1)
    learned = {each: len(stand.fragments()) for each, stand in stands.items()}
    assert learned == {"": int(asked == ""), "coder": int(asked == "coder")}


def test_the_models_are_those_of_every_answering_server(client: openai.OpenAI) -> None:
    names = [one.id for one in client.models.list()]
    assert names == ["default", "default:latest", "default:1", "coder", "coder:latest", "coder:1"]
    for name in names:
        assert client.models.retrieve(name).id == name
        assert client.chat.completions.create(model=name, messages=ASKED, max_tokens=1).model == name


@pytest.mark.parametrize("model", ["other", "whatever", "coder:v15", "default:v15", "coder:canary:1", ""])
def test_an_unknown_model_is_refused_with_the_known_ones(client: openai.OpenAI, model: str) -> None:
    final = {"conversation_id": "x", "model": model, "final": True}
    calls: tuple[Callable[[], Any], ...] = (
        lambda: client.chat.completions.create(model=model, messages=ASKED),
        lambda: client.post("/rewards", body=final, cast_to=object),
        lambda: client.models.retrieve(model or "none"),
    )
    for call in calls:
        with pytest.raises(openai.NotFoundError, match="there is none of that name; use ") as raised:
            call()
        assert (raised.value.param, raised.value.code) == ("model", "model_not_found")
        assert all(name in str(raised.value) for name in ("default", "coder", "away"))


def test_an_absent_server_is_absent_for_its_own_names_alone(client: openai.OpenAI, folder: Path) -> None:
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match=r"away\.sock.*another --agent away=") as raised:
            client.chat.completions.create(model="away", messages=ASKED, stream=stream)
        assert (raised.value.status_code, raised.value.code) == (503, "unreachable")
    with pytest.raises(openai.InternalServerError, match=r"another --agent away="):
        client.post("/rewards", body={"conversation_id": "x", "model": "away", "final": True}, cast_to=object)
    with pytest.raises(openai.InternalServerError, match=r"another --agent away="):
        client.models.retrieve("away")
    assert client.chat.completions.create(model="coder", messages=ASKED).choices
    assert "away" not in [one.id for one in client.models.list()]
    with over(folder, "away") as address, pytest.raises(openai.InternalServerError, match="--agent away="):
        client_of(address).models.list()


@pytest.mark.usefixtures("stands")
def test_a_silent_server_delays_no_other(folder: Path, short_folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(short_folder / "silent.sock"))
        silent.listen()
        addresses = {"coder": f"unix:{folder}/coder.sock", "silent": f"unix:{short_folder}/silent.sock"}
        with agents_api_over(addresses, describe_s=2.0) as address:
            client = client_of(address).with_options(timeout=PATIENCE_S)
            assert [one.id for one in client.models.list()] == ["coder", "coder:latest", "coder:1"]
            with pytest.raises(openai.InternalServerError, match="silent has not said in 2 s") as raised:
                client.models.retrieve("silent")
            assert (raised.value.status_code, raised.value.code) == (503, "unreachable")


@pytest.mark.usefixtures("stands")
def test_without_a_first_server_every_name_is_an_agents(folder: Path) -> None:
    closed = {"conversation_id": "nobody's", "final": True}
    with over(folder, "coder") as address:
        client = client_of(address)
        with pytest.raises(openai.NotFoundError, match="use coder, coder:latest"):
            client.chat.completions.create(model="default", messages=ASKED)
        with pytest.raises(openai.NotFoundError, match="nobody's"):
            client.post("/rewards", body=closed, cast_to=object)
    with over(folder, "coder", "away") as address:
        with pytest.raises(openai.BadRequestError, match="model: say which, of coder, away") as raised:
            client_of(address).post("/rewards", body=closed, cast_to=object)
        assert raised.value.param == "model"


@pytest.mark.usefixtures("stands")
def test_an_agents_name_wins_over_the_first_servers_policy(folder: Path) -> None:
    names = {"": f"unix:{folder}/first.sock", "default": f"unix:{folder}/coder.sock"}
    with agents_api_over(names) as address:
        client = client_of(address)
        assert [one.id for one in client.models.list()] == ["default", "default:latest", "default:1"]
        with_reward = {"conversation_id": "theirs", "model": "default", "final": True}
        client.chat.completions.create(
            model="default", messages=ASKED, metadata={"conversation_id": "theirs"}
        )
        client.post("/rewards", body=with_reward, cast_to=object)
        with pytest.raises(openai.NotFoundError):
            client.post("/rewards", body={"conversation_id": "theirs", "final": True}, cast_to=object)


def test_an_agent_whose_server_has_not_started_is_not_ready() -> None:
    with (
        agents_api_over({"coder": ""}) as address,
        pytest.raises(openai.InternalServerError, match="coder has no server yet.*--agent coder=") as raised,
    ):
        client_of(address).chat.completions.create(model="coder", messages=ASKED)
    assert (raised.value.status_code, raised.value.code, raised.value.param) == (503, "not_ready", "model")
    assert raised.value.response.headers["retry-after"] == "1"


THOUGHTS_ASKED: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": "sum"}],
    "temperature": 0,
}


@pytest.fixture(scope="module")
def thoughts_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("thinking")
    model = make_thinker(folder / "model")
    with (
        served_text(model, folder / "text.sock", form=form_of()),
        agents_api(folder / "text.sock") as address,
    ):
        yield openai.OpenAI(base_url=address, api_key="none", max_retries=0)


def asked(thoughts_client: Any, **extension: Any) -> Any:
    extra = {"extra_body": {"penstock": extension}} if extension else {}
    return thoughts_client.chat.completions.create(**THOUGHTS_ASKED, **extra)


def test_a_thought_is_counted_and_hidden_from_who_does_not_ask_for_it(thoughts_client: Any) -> None:
    made = asked(thoughts_client)
    assert made.choices[0].message.content == BEHIND
    (thought,) = made.penstock["thoughts"]
    assert thought.keys() == {"tokens", "milliseconds", "is_cut"}
    assert (thought["tokens"], thought["is_cut"]) == (3, False)
    assert made.usage.completion_tokens_details.reasoning_tokens == 3
    assert made.usage.completion_tokens == 3 + len(made.penstock["token_ids"][0])
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    assert "lookup" not in made.model_dump_json()
    (thought,) = asked(thoughts_client, show_thought=True).penstock["thoughts"]
    assert (thought["text"], len(thought["token_ids"])) == (THOUGHT, 3)


def test_without_a_budget_there_is_no_thought_at_all(thoughts_client: Any) -> None:
    made = asked(thoughts_client, thought_tokens=0, show_thought=True)
    assert made.choices[0].message.content == WITHOUT
    assert made.penstock["thoughts"] == [None]
    assert made.usage.completion_tokens_details is None


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (6, r"penstock\.thought_tokens=6: ask for 0 to 5"),
        (-1, "thought_tokens.*greater than or equal to 0"),
    ],
)
def test_an_invalid_budget_is_refused(thoughts_client: Any, budget: Any, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        asked(thoughts_client, thought_tokens=budget)
    assert refused.value.param == "penstock.thought_tokens"
    assert asked(thoughts_client).choices


@pytest.mark.parametrize("shows", [False, True])
def test_a_stream_holds_only_the_answer(thoughts_client: Any, shows: bool) -> None:
    parts = list(
        thoughts_client.chat.completions.create(
            **THOUGHTS_ASKED,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"penstock": {"show_thought": shows}},
        )
    )
    text = "".join(choice.delta.content or "" for part in parts for choice in part.choices)
    assert text == BEHIND
    holding = [number for number, part in enumerate(parts) if "lookup" in part.model_dump_json()]
    assert holding == ([len(parts) - 2] if shows else [])
    assert parts[-1].usage.completion_tokens_details.reasoning_tokens == 3


ONE_CALL_HELD: Final = 6_000
"""Bytes that conversations may hold: an answer of six tokens has room, several have not."""
SELDOM: Final = Rates(calls=1e-3, bytes=MIB, settings="per address")
"""One call is taken at once, and the next one some minutes later."""


def hold_conversations(completions: Any, count: int) -> None:
    for each in range(count):
        kept = {"X-Conversation-Id": f"kept-{each}"}
        completions.create(model="default", messages=ASKED, extra_headers=kept)


@pytest.mark.promise("openai-s-api-answers")
def test_a_server_without_room_gives_429(tmp_path: Path) -> None:
    socket = tmp_path / "text.sock"
    with (
        served_text(make_model(tmp_path / "model"), socket, max_buffered_bytes=ONE_CALL_HELD),
        agents_api(socket, deadline_s=8.0) as base_url,
    ):
        completions = client_of(base_url).chat.completions
        with pytest.raises(openai.BadRequestError, match=r"n=16: .*serving\.max_buffered_bytes"):
            completions.create(model="default", messages=ASKED, n=16)
        assert completions.create(model="default", messages=ASKED).choices
        with pytest.raises(openai.RateLimitError, match=r"serving\.max_buffered_bytes") as raised:
            hold_conversations(completions, 20)
    assert (raised.value.status_code, raised.value.code) == (429, "overloaded")
    assert (raised.value.type, raised.value.response.headers["retry-after"]) == ("rate_limit_error", "1")


def test_an_address_with_too_many_requests_gets_429(tmp_path: Path) -> None:
    answer = relay_to(upstream_at(f"unix:{tmp_path / 'none.sock'}"))
    with serving(make_app(text_listener(answer, CallLimits(SELDOM)))) as server:
        client = client_of(f"{server.url}/v1")
        with pytest.raises(openai.NotFoundError):
            client.get("/nothing", cast_to=object)
        with pytest.raises(openai.RateLimitError, match=r"calls or .* a second \(per address\)") as raised:
            client.models.list()
    assert (raised.value.status_code, raised.value.type) == (429, "rate_limit_error")
    assert raised.value.response.headers["retry-after"] == "1"


@pytest.mark.promise("openai-s-api-answers")
def test_a_defect_is_reported_as_a_server_error(tmp_path: Path) -> None:
    def defect() -> RunAddresses:
        raise RuntimeError(f"a defect beside {tmp_path}")

    answer = relay_to(Upstream(addresses=defect, credentials=Credentials()))
    with (
        serving(make_app(text_listener(answer))) as server,
        pytest.raises(openai.InternalServerError, match="a defect of the gateway; its log") as raised,
    ):
        client_of(f"{server.url}/v1").models.list()
    assert (raised.value.status_code, raised.value.type) == (500, "server_error")
    assert (raised.value.code, raised.value.param) == ("internal", None)
    assert str(tmp_path) not in str(raised.value)


@pytest.fixture
def client_of_none(tmp_path: Path) -> Iterator[openai.OpenAI]:
    """Its server of text is not there; it waits half as long as a call to such a server may take."""
    answer = relay_to(upstream_at(f"unix:{tmp_path / 'text.sock'}"))
    with serving(make_app(text_listener(answer))) as server:
        yield client_of(f"{server.url}/v1").with_options(timeout=30.0)


def test_an_unreachable_text_server_is_named_before_the_deadline(client_of_none: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match=r"text\.sock.*another --server") as raised:
        client_of_none.chat.completions.create(model="default", messages=ASKED)
    assert raised.value.status_code == 503
    with pytest.raises(openai.InternalServerError, match=r"text\.sock"):
        client_of_none.models.list()


def test_refusals_before_the_api_have_the_form_of_the_api(client_of_none: openai.OpenAI) -> None:
    long: Any = [{"role": "user", "content": "sum " * 300_000}]
    with pytest.raises(openai.APIStatusError, match="has more than 1048576 bytes") as raised:
        client_of_none.chat.completions.create(model="default", messages=long)
    assert (raised.value.status_code, raised.value.param, raised.value.code) == (413, "messages", "too_large")
    with pytest.raises(openai.APIStatusError, match="does not answer under this host") as other:
        client_of_none.with_options(default_headers={"Host": "elsewhere.example"}).models.list()
    assert (other.value.status_code, other.value.type) == (421, "invalid_request_error")


def test_the_listener_follows_the_address_of_the_run(tmp_path: Path) -> None:
    at, moves = [""], list[str]()
    upstream = Upstream(addresses=lambda: RunAddresses(server=at[0]), credentials=Credentials())
    served = ServedText(upstream, moved=lambda: moves.append(at[0]))
    model, socket = make_model(tmp_path / "model"), tmp_path / "text.sock"
    with asyncio.Runner() as loop, served_text(model, socket, policy="talker"):
        assert loop.run(served.client()) is None
        at[0] = f"unix:{socket}"
        client = loop.run(served.client())
        assert client is not None
        assert loop.run(client.describe()).policy == "talker"
        assert loop.run(served.client()) is client
        at[0] = f"unix:{tmp_path / 'other.sock'}"
        eventually(lambda: loop.run(served.client()) is not client, "the move")
        other = loop.run(served.client())
        assert other is not None
        with pytest.raises(Unreachable, match=r"other\.sock"):
            loop.run(other.describe())
        loop.run(served.close())
    assert moves == [f"unix:{socket}", at[0], at[0]]
