"""What the routes answer, and what they refuse: by field, with what to do, and nothing is stored."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.prompts.small_prompts import SIZE, SmallPrompts, embedding, small_prompts

TRANSITION: dict[str, Any] = {
    "state": embedding(0),
    "action": 1,
    "reward": 0.5,
    "next_state": embedding(1),
    "done": True,
    "log_prob": -1.6,
    "value": 0.0,
}
WRONG: list[tuple[str, str, Any]] = [
    ("a short state", "state", embedding(0)[:-1]),
    ("a long state", "next_state", [*embedding(0), 0.0]),
    ("NaN", "state", [float("nan"), *embedding(0)[1:]]),
    ("infinity", "next_state", [float("inf"), *embedding(0)[1:]]),
    ("a number beyond float32", "state", [1e300, *embedding(0)[1:]]),
    ("strings", "state", ["0.1"] * SIZE),
    ("booleans", "state", [True] * SIZE),
    ("no base64", "state", "?" * 8192),
    ("base64 of too little", "state", "AAAA"),
    ("null", "state", None),
    ("action 5", "action", 5),
    ("action -1", "action", -1),
    ("action 1.5", "action", 1.5),
    ("action as a string", "action", "1"),
    ("NaN as a reward", "reward", float("nan")),
    ("a reward beyond all bounds", "reward", 1e30),
    ("a log-probability above 0", "log_prob", 1.0),
    ("minus infinity", "log_prob", float("-inf")),
    ("done as a number", "done", 1),
    ("a long ticket", "ticket", "x" * 65),
    ("an unknown field", "policy", "x"),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallPrompts]:
    """The API, for tests that leave nothing behind."""
    with small_prompts(tmp_path_factory.mktemp("http")) as made:
        yield made


@pytest.mark.parametrize(("field", "value"), [one[1:] for one in WRONG], ids=[one[0] for one in WRONG])
def test_what_is_wrong_with_a_transition_is_told_by_field(
    served: SmallPrompts, field: str, value: Any
) -> None:
    body = json.dumps(TRANSITION | {field: value})
    reply = served.client.post(
        "/store_experience", content=body, headers={"Content-Type": "application/json"}
    )
    assert reply.status_code == 422, reply.text
    error = reply.json()
    assert error.keys() == {"error", "detail", "field"}
    assert error["field"].partition(".")[0] == field
    assert served.fragments() == []


@pytest.mark.parametrize(
    ("number", "said"),
    [(2, "number 5 is 2, "), (-(10**14), f"number 5 is {-(10**14)}, "), (10**400, "of more than 15 digits")],
)
def test_a_number_that_is_too_large_is_told_as_it_was_sent(
    served: SmallPrompts, number: int, said: str
) -> None:
    reply = served.post("/select_action", embedding=[*embedding(0)[:5], number, *embedding(0)[6:]])
    assert (reply.status_code, said in reply.json()["detail"]) == (422, True), reply.text


def test_a_ticket_of_another_state_or_action_is_refused(served: SmallPrompts) -> None:
    answer = served.select(embedding(0))
    other = served.store(embedding(5), answer, embedding(1), ticket=answer["ticket"])
    assert (other.status_code, other.json()["field"]) == (422, "state")
    acted = served.store(
        embedding(0), answer, embedding(1), ticket=answer["ticket"], action=(answer["action"] + 1) % 5
    )
    assert (acted.status_code, acted.json()["field"]) == (422, "action")


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/var/x", "a/b", "A", "", "x" * 65, "a\0b", "model.pt", "-", "--help"]
)
@pytest.mark.parametrize("path", ["/save", "/load"])
def test_a_place_is_no_name(served: SmallPrompts, path: str, name: str) -> None:
    reply = served.post(path, path=name)
    assert (reply.status_code, reply.json()["field"]) == (422, "path")


def test_bodies_that_are_none_are_refused(served: SmallPrompts) -> None:
    headers = {"Content-Type": "application/json"}
    for content, status in (
        (b"", 422),
        (b"{", 422),
        (b"[]", 422),
        (b"[" * 100_000, 422),
        (b'"' + b"x" * (100 << 20) + b'"', 413),
    ):
        reply = served.client.post("/select_action", content=content, headers=headers)
        assert reply.status_code == status, (content[:20], reply.text)
        assert reply.json().keys() == {"error", "detail", "field"}
    form = served.client.post("/select_action", data={"embedding": "1"})
    assert form.status_code == 415


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "https://evil.example"}])
def test_other_hosts_and_origins_are_refused(served: SmallPrompts, headers: dict[str, str]) -> None:
    reply = served.client.post("/select_action", json={"embedding": embedding(0)}, headers=headers)
    assert reply.status_code in {403, 421}


def test_a_client_that_stores_and_never_updates_is_told_so(prompts: SmallPrompts) -> None:
    prompts.api.most_waiting = 3
    stored = [
        prompts.store(embedding(number), prompts.select(embedding(number)), embedding(99), done=True)
        for number in range(4)
    ]
    assert [one.status_code for one in stored] == [200, 200, 200, 429]
    assert "/update" in stored[-1].json()["detail"]
    assert stored[-1].headers["retry-after"] == "1"
    assert len(prompts.fragments()) == 3


def test_without_a_broker_a_run_is_not_steered(served: SmallPrompts) -> None:
    for path, body in (("/update", {}), ("/save", {}), ("/load", {"path": "x"})):
        reply = served.post(path, **body)
        assert (reply.status_code, "--broker" in reply.json()["detail"]) == (503, True)
    assert served.client.get("/health").json() == {"status": "ok"}


PROMPTS: list[tuple[str, str]] = [
    ("nothing", ""),
    ("space alone", " \n\t "),
    ("too long", "x" * 20_001),
    ("NUL", "a\0b"),
]


@pytest.mark.parametrize("text", [one[1] for one in PROMPTS], ids=[one[0] for one in PROMPTS])
@pytest.mark.parametrize("path", ["/embed", "/mutate", "/optimize"])
def test_a_text_that_is_no_prompt_is_refused(served: SmallPrompts, path: str, text: str) -> None:
    body = {"prompt": text} | ({"action": 0} if path == "/mutate" else {})
    reply = served.post(path, **body)
    assert (reply.status_code, reply.json()["field"]) == (422, "prompt")


def test_half_a_character_is_no_text(served: SmallPrompts) -> None:
    reply = served.client.post(
        "/embed", content=b'{"prompt": "\\ud800"}', headers={"Content-Type": "application/json"}
    )
    assert reply.status_code == 422


def test_a_prompt_is_embedded_mutated_and_optimised(served: SmallPrompts) -> None:
    text = "Write a function that sorts a list"
    embedded = served.post("/embed", prompt=text).json()
    assert (len(embedded["embedding"]), embedded["category"]) == (SIZE, "CODE_GENERATION")
    best = served.post("/optimize", prompt=text, steps=8).json()
    here, total = text, 0.0
    for step in best["path"]:
        made = served.post("/mutate", prompt=here, action=step["action"], start=text).json()
        assert (made["prompt"], made["reward"]) == (step["prompt"], step["reward"])
        here, total = made["prompt"], total + made["reward"]
    assert (best["prompt"], best["reward"]) == (here, pytest.approx(total))
    for steps in (0, 9, 2.5, "5"):
        assert served.post("/optimize", prompt=text, steps=steps).status_code == 422


def test_the_answers_are_those_of_the_contract(served: SmallPrompts) -> None:
    answer = served.select(embedding(3))
    assert answer.keys() == {"action", "mutation_type", "log_prob", "value", "version", "ticket"}
    shown = served.post("/get_distribution", embedding=embedding(3)).json()
    assert sum(shown["probabilities"]) == pytest.approx(1, abs=1e-5)
    assert shown["mutation_types"][answer["action"]] == answer["mutation_type"]


def test_a_body_that_breaks_off_is_an_error_of_its_sender(served: SmallPrompts) -> None:
    told = list[dict[str, Any]]()
    parts = iter([{"type": "http.request", "body": b'{"embedding": [', "more_body": True}])

    async def receive() -> dict[str, Any]:
        return next(parts, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        told.append(message)

    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/select_action",
        "raw_path": b"/select_action",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "scheme": "http",
        "root_path": "",
    }
    app: Any = served.client.app
    asyncio.run(app(scope, receive, send))
    assert told[0]["status"] == 400
