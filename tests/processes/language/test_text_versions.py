"""Versions of a language model behind traffic: bad canaries, labels, and files that came to harm."""

import itertools
import random
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from penstock.client import Arm, TextClient
from penstock.registry.records import Status
from penstock.registry.registry import Registry
from penstock.registry.weight_files import path_of
from tests.support.language.text_stand import (
    BAD,
    GOOD,
    TOOLS,
    ServedTextRun,
    agents_api,
    begun,
    serving_text,
)
from tests.support.run.harness import BrokerProcess, eventually
from tests.support.run.serving_run import POLICY

ASKED: Final = ({"role": "user", "content": "sum"},)
MOST: Final = 1_500
"""Clients after which a bad canary counts as not found."""
RATED: Final = 0.4
"""Share of the clients that press a thumb."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ServedTextRun:
    return begun(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def http_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return f"127.0.0.1:{found.getsockname()[1]}"


@pytest.fixture(scope="module")
def server(run: ServedTextRun, http_address: str) -> Iterator[BrokerProcess]:
    settings: dict[str, Any] = {
        "canary.settle_s": 0.05,
        "canary.slow_ms": 1e6,
        "serving.http_listen": http_address,
    }
    with serving_text(run, **settings) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: BrokerProcess) -> Iterator[TextClient]:
    with TextClient(server.address) as connected:
        yield connected


def reward(chance: random.Random, *, is_right: bool) -> float | None:
    return 0.5 + 0.5 * is_right + 0.1 * chance.random()


def thumb(chance: random.Random, *, is_right: bool) -> float | None:
    return float(is_right and chance.random() < 0.9) if chance.random() < RATED else None


@pytest.mark.parametrize("say", [reward, thumb])
def test_a_canary_that_answers_badly_is_withdrawn(
    run: ServedTextRun, client: TextClient, say: Callable[..., float | None]
) -> None:
    chance, canary = random.Random(3), run.add(2 if say is reward else 3, BAD)
    run.promote(canary, canary_share=0.5)
    eventually(lambda: canary in [one.version for one in client.describe().versions], "the canary", 60)
    versions = set[int]()
    for number in itertools.count():
        assert number < MOST, "the canary is still there"
        conversation = client.start_conversation(f"{say.__name__}-{number}")
        given = conversation.generate(ASKED, tools=TOOLS)
        versions.add(given.version)
        amount = say(chance, is_right=bool(given.answers[0].message.get("tool_calls")))
        conversation.end(reward=amount)
        if number % 10 == 9 and run.status(canary) is Status.ROLLED_BACK:
            break
    assert versions == {1, canary}
    assert run.status(1) is Status.ACTIVE
    eventually(
        lambda: {client.start_conversation(f"back-{n}").arm for n in range(20)} == {Arm.ACTIVE},
        "everybody back",
        60,
    )


@pytest.mark.promise("label-operator-registry-model", "server-text-answers-openai")
def test_a_label_of_the_registry_is_a_model(
    run: ServedTextRun, client: TextClient, server: BrokerProcess, http_address: str
) -> None:
    found = []
    for version in (run.add(5, GOOD), run.add(6, GOOD)):
        with Registry.open(run.url) as registry:
            wanted = replace(registry.traffic(POLICY), pins={"label:v15": version, "ada": 1})
            registry.set_traffic(wanted, "a test", by="test")
        eventually(lambda: dict(client.describe().labels) == {"v15": version}, "the label", 60)  # noqa: B023
        with agents_api(server.address) as behind_gateway:
            for base_url in (behind_gateway, f"http://{http_address}/v1"):
                agent = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
                made: Any = agent.chat.completions.create(model="default:v15", messages=list(ASKED))
                found.append((made.model, made.penstock["version"], made.penstock["arm"]))
                assert "default:v15" in [one.id for one in agent.models.list()]
                with pytest.raises(openai.NotFoundError, match="or its label"):
                    agent.chat.completions.create(model="default:ada", messages=list(ASKED))
    assert found == [("default:v15", version, "pinned") for version in (5, 5, 6, 6)]


def truncated(run: ServedTextRun) -> None:
    path = path_of(run.folder, 1)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def changed(run: ServedTextRun) -> None:
    run.damage(1)


def absent(run: ServedTextRun) -> None:
    path_of(run.folder, 1).unlink()


@pytest.mark.parametrize("harm", [truncated, changed, absent])
def test_a_damaged_version_is_replaced_by_the_base_model(
    tmp_path: Path, harm: Callable[[ServedTextRun], None]
) -> None:
    run = begun(tmp_path)
    harm(run)
    with serving_text(run) as server, TextClient(server.address) as client:
        given = client.start_conversation("ada").generate(ASKED, tools=TOOLS)
        assert (given.version, given.fallback is not None) == (0, True)
        assert given.answers[0].message
        run.promote(run.add(2, GOOD))
        eventually(
            lambda: client.start_conversation("bob").generate(ASKED, tools=TOOLS).version == 2,
            "the version that is whole",
            60,
        )
        assert client.start_conversation("eve").generate(ASKED, tools=TOOLS).fallback is None
