"""Several servers of text behind one address: the model's name says which of them is asked."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from tests.support.language.text_address import agents_api_over, served_text
from tests.support.language.text_stand import TextStand, make_model

ASKED: Final[list[Any]] = [{"role": "user", "content": "sum"}]
SOON_S: Final = 0.2
"""In which a server that is away is given up."""
PATIENCE_S: Final = 20.0
"""In which a call that waits for a server that says nothing would not have come back."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model, and of the sockets."""
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
    """The client, which an agent has made with another `base_url`."""
    return openai.OpenAI(base_url=address, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(stands: dict[str, TextStand], folder: Path) -> Iterator[openai.OpenAI]:
    """Of the first, an agent, and one that is away."""
    assert set(stands) == {"", "coder"}
    with over(folder, "", "coder", "away") as address:
        yield client_of(address)


@pytest.mark.parametrize(("model", "asked"), [("default", ""), ("coder", "coder"), ("coder:latest", "coder")])
def test_the_model_says_who_answers_and_who_learns(
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


def test_models_are_those_of_all_whose_servers_answer(client: openai.OpenAI) -> None:
    names = [one.id for one in client.models.list()]
    assert names == ["default", "default:latest", "default:1", "coder", "coder:latest", "coder:1"]
    for name in names:
        assert client.models.retrieve(name).id == name
        assert client.chat.completions.create(model=name, messages=ASKED, max_tokens=1).model == name


@pytest.mark.parametrize("model", ["other", "whatever", "coder:v15", "default:v15", "coder:canary:1", ""])
def test_an_unknown_model_is_refused_with_those_that_there_are(client: openai.OpenAI, model: str) -> None:
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


def test_one_that_is_away_is_away_for_its_own_names_alone(client: openai.OpenAI) -> None:
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


@pytest.mark.usefixtures("stands")
def test_one_that_says_nothing_holds_up_no_other(folder: Path, short_folder: Path) -> None:
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
def test_where_the_first_is_away_agents_answer(folder: Path) -> None:
    addresses = {"": f"unix:{folder}/away.sock", "coder": f"unix:{folder}/coder.sock"}
    with agents_api_over(addresses, reach_s=SOON_S) as address:
        client = client_of(address)
        assert client.chat.completions.create(model="coder", messages=ASKED).choices
        with pytest.raises(openai.InternalServerError, match=r"away\.sock.*another --server"):
            client.chat.completions.create(model="default", messages=ASKED)
        assert [one.id for one in client.models.list()] == ["coder", "coder:latest", "coder:1"]
    with over(folder, "away") as address, pytest.raises(openai.InternalServerError, match="--agent away="):
        client_of(address).models.list()


@pytest.mark.usefixtures("stands")
def test_without_a_first_every_name_is_an_agents(folder: Path) -> None:
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
def test_the_name_of_an_agent_counts_before_that_of_the_firsts_policy(folder: Path) -> None:
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


def test_an_agent_whose_server_has_not_come_up_is_not_ready() -> None:
    with (
        agents_api_over({"coder": ""}) as address,
        pytest.raises(openai.InternalServerError, match="coder has no server yet.*--agent coder=") as raised,
    ):
        client_of(address).chat.completions.create(model="coder", messages=ASKED)
    assert (raised.value.status_code, raised.value.code, raised.value.param) == (503, "not_ready", "model")
    assert raised.value.response.headers["retry-after"] == "1"
