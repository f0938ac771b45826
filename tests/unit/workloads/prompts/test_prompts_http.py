import asyncio
import base64
import json
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from fastapi.testclient import TestClient

from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.application import site_listener
from penstock.gateway.frame.envelope import Doors
from penstock.gateway.frame.route_access import make_app
from penstock.gateway.process import Mount
from penstock.gateway.store.tables import Role
from penstock.gateway.upstream import RunAddresses, RunSettings, Upstream
from penstock.launch.gateway.gateway_commands import BEYOND
from penstock.protocol.fragment import Fragment
from penstock.protocol.spaces import Box, Discrete
from penstock.registry.ratings import Rating
from penstock.registry.registry import Registry
from penstock.rpc.auth import Credentials
from penstock.workloads.prompts.features import PromptError, mutate
from penstock.workloads.prompts.http.api_bodies import OptimizeAnswer
from penstock.workloads.prompts.http.prompt_routes import mutation_path, site
from penstock.workloads.prompts.http.prompts_api import MOST_WORK_WAITING, PromptsApi, PromptWork, ShownPaths
from penstock.workloads.prompts.http.run_learning import MOST_CHAINS, GivenAnswers
from penstock.workloads.prompts.task_parts import parts_of
from tests.support.gateway.small_gateway import SmallGateway
from tests.support.serving.server_parts import ServedStand, column, served_policy, specification

SIZE: Final = 1536
State = int | str | list[float]
"""The number of an embedding, its base64, or its numbers."""


class SmallPrompts:
    """A client of the API, and the policy server behind it."""

    def __init__(self, client: TestClient, served: ServedStand, api: PromptsApi) -> None:
        self.client, self.served, self.api = client, served, api

    def post(self, route: str, /, **body: Any) -> Any:
        return self.client.post(route, json=body)

    def select(self, state: State, **body: Any) -> dict[str, Any]:
        given = embedding(state) if isinstance(state, int) else state
        reply = self.post("/select_action", embedding=given, **body)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def store(self, state: State, answer: dict[str, Any], following: State, **body: Any) -> Any:
        """The answer to a transition that an answer led to."""
        told = {name: answer[name] for name in ("action", "log_prob", "value")}
        for name, one in (("state", state), ("next_state", following)):
            told[name] = embedding(one) if isinstance(one, int) else one
        return self.post("/store_experience", **({"reward": 1.0, "done": False} | told | body))

    def fragments(self) -> list[Fragment]:
        """What the policy server would send to the learner, oldest first."""
        return self.served.stand.fragments()


@contextmanager
def small_prompts(
    folder: Path, *, task: Mapping[str, Any] | None = None, registry: str = ""
) -> Iterator[SmallPrompts]:
    """The API, ready; the policy server has version 1. folder: with a path short enough for a socket.

    task, registry: what the run was begun with.
    """
    ones = np.ones(SIZE, np.float32)
    made = specification(Box(-ones, ones), Discrete(5), unroll=16)
    socket = folder / "policy.sock"
    with served_policy(made, socket) as served:
        served.publish(1)
        upstream = Upstream(
            addresses=lambda: RunAddresses(server=f"unix:{socket}"),
            credentials=Credentials(),
            settings=lambda: RunSettings(task=task or {}, registry=registry),
        )
        app = make_app(site_listener(site(), upstream, Doors()))
        with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
            yield SmallPrompts(client, served, app.state.api)


def embedding(number: int) -> list[float]:
    """An embedding of unit length, drawn; `number`: which."""
    drawn = np.random.default_rng(number).normal(size=SIZE).astype(np.float32)
    made: list[float] = (drawn / np.linalg.norm(drawn)).tolist()
    return made


@pytest.fixture
def prompts(short_folder: Path) -> Iterator[SmallPrompts]:
    with small_prompts(short_folder) as made:
        yield made


def test_transitions_that_follow_one_another_are_one_episode(prompts: SmallPrompts) -> None:
    answers = [prompts.select(number) for number in range(3)]
    for number, answer in enumerate(answers):
        reply = prompts.store(number, answer, number + 1, reward=float(number), done=number == 2)
        stored = {"stored": True, "buffer_size": number + 1, "verified": True, "duplicate": False}
        assert reply.json() == stored
    (fragment,) = prompts.fragments()
    assert column(fragment, "reward") == [0.0, 1.0, 2.0]
    assert column(fragment, "action") == [answer["action"] for answer in answers]
    assert np.allclose(column(fragment, "log_prob"), [answer["log_prob"] for answer in answers])
    assert column(fragment, "terminated") == [False, False, True]
    assert column(fragment, "valid") == [True] * 3
    assert np.allclose(column(fragment, "observation")[3], embedding(3))


def test_an_idle_chain_ends_truncated_at_its_last_state(prompts: SmallPrompts) -> None:
    prompts.store(0, prompts.select(0), 1)
    prompts.store(7, prompts.select(7), 8)
    assert prompts.fragments() == []
    prompts.client.__exit__(None, None, None)
    one, other = prompts.fragments()
    for fragment, following in ((one, 1), (other, 8)):
        arrays = fragment.arrays()
        assert arrays["truncated"].tolist() == [[True]]
        assert np.allclose(arrays["final/observation"][0], embedding(following))


def test_a_state_that_does_not_follow_begins_another_chain(prompts: SmallPrompts) -> None:
    for number in (0, 10, 1, 11):
        answer = prompts.select(number)
        prompts.store(number, answer, number + 1, done=number in {1, 11})
    assert [column(one, "terminated") for one in prompts.fragments()] == [[False, True]] * 2


def test_a_transition_counts_for_the_version_that_answered(prompts: SmallPrompts) -> None:
    answer = prompts.select(0)
    prompts.served.publish(2)
    prompts.store(0, answer, 1, done=True, log_prob=-50.0)
    (fragment,) = prompts.fragments()
    assert [(one.version, one.update) for one in fragment.header.weights] == [(1, 1)]
    assert column(fragment, "log_prob") == pytest.approx([answer["log_prob"]])


def test_the_likeliest_action_is_not_learned_from_on_policy(prompts: SmallPrompts) -> None:
    answer = prompts.select(0, deterministic=True)
    assert prompts.store(0, answer, 1, done=True).status_code == 200
    (fragment,) = prompts.fragments()
    assert column(fragment, "valid") == [False]


def test_a_transition_repeated_with_its_ticket_counts_once(prompts: SmallPrompts) -> None:
    answer = prompts.select(0)
    for duplicate in (False, True):
        reply = prompts.store(0, answer, 1, done=True, ticket=answer["ticket"])
        assert (reply.json()["duplicate"], reply.json()["buffer_size"]) == (duplicate, 1)
    assert len(prompts.fragments()) == 1


@pytest.mark.parametrize("is_first", [True, False])
def test_a_transition_without_ticket_does_not_use_a_ticketed_answer(
    prompts: SmallPrompts, is_first: bool
) -> None:
    two = _equal_answers(prompts)
    named = two[1] if is_first else two[0]
    prompts.store(0, named, 1, done=True, reward=-1.0)
    for duplicate in (False, True):
        reply = prompts.store(0, named, 1, done=True, reward=2.0, ticket=named["ticket"]).json()
        assert (reply["verified"], reply["duplicate"], reply["buffer_size"]) == (True, duplicate, 2)
    assert [column(one, "reward") for one in prompts.fragments()] == [[-1.0], [2.0]]


def test_a_transition_that_used_all_answers_does_not_count_for_another(prompts: SmallPrompts) -> None:
    two = _equal_answers(prompts)
    for _ in two:
        prompts.store(0, two[0], 1, done=True, reward=-1.0)
    same, other = (
        prompts.store(0, one, 1, done=True, reward=reward, ticket=one["ticket"]).json()
        for one, reward in zip(two, (-1.0, 2.0), strict=True)
    )
    assert (same["duplicate"], other["duplicate"], other["buffer_size"]) == (True, False, 3)


def _equal_answers(prompts: SmallPrompts) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two answers to one state that name one action, and no others that do."""
    before = dict[int, dict[str, Any]]()
    while True:
        answer = prompts.select(0)
        if answer["action"] in before:
            return before[answer["action"]], answer
        before[answer["action"]] = answer


def test_a_ticket_of_an_earlier_gateway_is_refused(prompts: SmallPrompts) -> None:
    answer = prompts.select(0)
    prompts.store(0, answer, 1, done=True, ticket=answer["ticket"])
    prompts.api.given = GivenAnswers()
    for _ in range(2):
        reply = prompts.store(0, answer, 1, done=True, ticket=answer["ticket"])
        assert (reply.status_code, reply.json()["field"]) == (409, "ticket")
    assert len(prompts.fragments()) == 1
    taken = prompts.store(0, answer, 1, done=True)
    assert (taken.json()["verified"], len(prompts.fragments())) == (False, 1)


def test_a_transition_of_no_answer_is_checked_against_the_answering_version(prompts: SmallPrompts) -> None:
    shown = prompts.post("/get_distribution", embedding=embedding(0)).json()["probabilities"]
    claimed = {"action": 2, "value": 0.0, "log_prob": float(np.log(shown[2]))}
    assert prompts.store(0, claimed, 1).json()["verified"] is False
    far = prompts.store(0, claimed, 1, log_prob=claimed["log_prob"] - 1.0)
    assert (far.status_code, far.json()["field"]) == (422, "log_prob")
    assert prompts.client.get("/stats").json() == {"message": "No training data yet"}
    prompts.store(1, prompts.select(1), 2, done=True)
    stats = prompts.client.get("/stats").json()
    assert (stats["unverified"], stats["total_episodes"], stats["avg_reward"]) == (1, 1, 2.0)


def test_open_chains_are_bounded(prompts: SmallPrompts) -> None:
    most = MOST_CHAINS
    for number in range(most + 2):
        answer = prompts.select(2 * number)
        prompts.store(2 * number, answer, 2 * number + 1)
    answer = prompts.select(1)
    prompts.store(1, answer, 0, done=True)
    assert prompts.client.get("/stats").json()["open_chains"] == most
    prompts.client.__exit__(None, None, None)
    assert sum(one.header.steps for one in prompts.fragments()) == most + 3


def test_a_restarted_policy_server_takes_later_transitions(prompts: SmallPrompts) -> None:
    prompts.store(0, prompts.select(0), 1)
    for episode in list(prompts.served.stand.episodes):
        prompts.served.stand.episodes.close(episode)
    assert prompts.store(1, prompts.select(1), 2, done=True).json()["stored"]
    assert prompts.client.get("/stats").json()["lost"] == 1


def test_numbers_may_come_as_base64(prompts: SmallPrompts) -> None:
    one, other = (base64.b64encode(np.array(embedding(n), "<f4").tobytes()).decode() for n in (0, 1))
    prompts.store(0, prompts.select(one), other)
    prompts.store(1, prompts.select(1), 2, done=True)
    (fragment,) = prompts.fragments()
    assert column(fragment, "terminated") == [False, True]


PROMPT = "Please, write a Python script."


class Policy:
    """A run whose policy makes these mutations, one after another."""

    def __init__(self, *actions: int) -> None:
        self.left = list(actions)
        self.shown = ShownPaths()

    async def act(self, state: Any, *, mask: Any, **_options: bool) -> Any:
        """The next of them."""
        assert state.shape == (1536,)
        assert mask.shape == (5,)
        action = self.left.pop(0)
        return SimpleNamespace(
            action=action, version=1, log_prob=-1.0, distribution={"probability": np.full(5, 0.2)}
        )


def best(policy: Policy, *, prompt: str = PROMPT) -> OptimizeAnswer:
    async def path() -> OptimizeAnswer:
        work, api = PromptWork(parts_of({})), policy
        steps = len(policy.left)
        return await mutation_path(api, work, "somebody", prompt, steps=steps, explore=False)  # type: ignore[arg-type]

    return asyncio.run(path())


def test_a_costly_step_is_kept_if_a_later_one_pays_for_it() -> None:
    found = best(Policy(4, 2))
    assert [step.mutation_type for step in found.path] == ["task-decomposition", "expansion"]
    rewards = [step.reward or 0.0 for step in found.path]
    assert found.reward is not None
    assert rewards[0] < 0 < found.reward == pytest.approx(sum(rewards))
    assert found.prompt == mutate(mutate(PROMPT, 4), 2) == found.path[-1].prompt


def test_a_path_ends_at_the_best_text_and_is_walked_until_nothing_changes() -> None:
    policy = Policy(1, 3, 4)
    assert [step.action for step in best(policy).path] == [1, 3]
    assert policy.left == []
    best(policy := Policy(1, 1, 3, 4))
    assert policy.left == [3, 4]
    nothing_better = best(Policy(3), prompt="Write a poem.")
    assert (nothing_better.prompt, nothing_better.reward, nothing_better.path) == ("Write a poem.", 0.0, [])
    with pytest.raises(PromptError, match="action=7: is no mutation"):
        best(Policy(7))


JSON = {"Content-Type": "application/json"}
TRANSITION: dict[str, Any] = {
    "state": embedding(0),
    "action": 1,
    "reward": 0.5,
    "next_state": embedding(1),
    "done": True,
    "log_prob": -1.6,
    "value": 0.0,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallPrompts]:
    """The API, for tests that leave nothing behind."""
    with small_prompts(tmp_path_factory.mktemp("http")) as made:
        yield made


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("state", embedding(0)[:-1]),
        ("next_state", [*embedding(0), 0.0]),
        ("state", [float("nan"), *embedding(0)[1:]]),
        ("next_state", [float("inf"), *embedding(0)[1:]]),
        ("state", ["0.1"] * SIZE),
        ("state", [True] * SIZE),
        ("state", "?" * 8192),
        ("state", "AAAA"),
        ("state", None),
        ("action", 5),
        ("action", -1),
        ("action", 1.5),
        ("action", "1"),
        ("reward", float("nan")),
        ("reward", 1e30),
        ("log_prob", 1.0),
        ("log_prob", float("-inf")),
        ("done", 1),
        ("ticket", "x" * 65),
        ("policy", "an unknown field"),
    ],
)
def test_what_is_wrong_with_a_transition_is_refused_by_field(
    served: SmallPrompts, field: str, value: Any
) -> None:
    body = json.dumps(TRANSITION | {field: value})
    reply = served.client.post("/store_experience", content=body, headers=JSON)
    assert reply.status_code == 422, reply.text
    error = reply.json()
    assert error.keys() == {"error", "detail", "field"}
    assert error["field"].partition(".")[0] == field
    assert served.fragments() == []


@pytest.mark.parametrize(
    ("number", "said"), [(math.nan, "number 5 is nan, must be finite"), (10**400, "of more than 300 digits")]
)
def test_a_number_that_is_not_finite_is_refused_by_its_place(
    served: SmallPrompts, number: float, said: str
) -> None:
    numbers = [*embedding(0)[:5], number, *embedding(0)[6:]]
    reply = served.client.post("/select_action", content=json.dumps({"embedding": numbers}), headers=JSON)
    assert (reply.status_code, said in reply.json()["detail"]) == (422, True), reply.text


@pytest.mark.parametrize("scale", [1.5, 30.0, -1e14, 1e307])
def test_every_finite_embedding_is_taken(prompts: SmallPrompts, scale: float) -> None:
    one, other = ([scale * number / max(map(abs, embedding(n))) for number in embedding(n)] for n in (0, 1))
    prompts.store(0, prompts.select(0), 1)
    prompts.store(one, prompts.select(one), other, done=True)
    (fragment,) = prompts.fragments()
    seen = column(fragment, "observation")
    for number in (0, 1):
        unit = np.sign(scale) * np.array(embedding(number))
        assert np.abs(seen - unit).max(1).min() < 1e-6


def test_a_ticket_of_another_state_or_action_is_refused(served: SmallPrompts) -> None:
    answer = served.select(0)
    other = served.store(5, answer, 1, ticket=answer["ticket"])
    assert (other.status_code, other.json()["field"]) == (422, "state")
    acted = served.store(0, answer, 1, ticket=answer["ticket"], action=(answer["action"] + 1) % 5)
    assert (acted.status_code, acted.json()["field"]) == (422, "action")


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/var/x", "a/b", "A", "", "x" * 65, "a\0b", "model.pt", "-", "--help"]
)
@pytest.mark.parametrize("path", ["/save", "/load"])
def test_a_checkpoint_name_is_no_path(served: SmallPrompts, path: str, name: str) -> None:
    reply = served.post(path, path=name)
    assert (reply.status_code, reply.json()["field"]) == (422, "path")


def test_invalid_bodies_are_refused(served: SmallPrompts) -> None:
    large = b'"' + b"x" * (100 << 20) + b'"'
    for content, status in ((b"", 422), (b"{", 422), (b"[]", 422), (b"[" * 100_000, 422), (large, 413)):
        reply = served.client.post("/select_action", content=content, headers=JSON)
        assert reply.status_code == status, (content[:20], reply.text)
        assert reply.json().keys() == {"error", "detail", "field"}
    form = served.client.post("/select_action", data={"embedding": "1"})
    assert form.status_code == 415


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "https://evil.example"}])
def test_other_hosts_and_origins_are_refused(served: SmallPrompts, headers: dict[str, str]) -> None:
    reply = served.client.post("/select_action", json={"embedding": embedding(0)}, headers=headers)
    assert reply.status_code in {403, 421}


def test_a_client_that_stores_and_never_updates_is_warned(prompts: SmallPrompts) -> None:
    prompts.api.most_waiting = 3
    stored = [prompts.store(number, prompts.select(number), 99, done=True) for number in range(4)]
    assert [one.status_code for one in stored] == [200, 200, 200, 429]
    assert "/update" in stored[-1].json()["detail"]
    assert stored[-1].headers["retry-after"] == "1"
    assert len(prompts.fragments()) == 3


def test_without_a_broker_a_run_is_not_steered(served: SmallPrompts) -> None:
    for path, body in (("/update", {}), ("/save", {}), ("/load", {"path": "x"})):
        reply = served.post(path, **body)
        assert (reply.status_code, "--broker" in reply.json()["detail"]) == (503, True)
    assert served.client.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("text", ["", " \n\t ", "x" * 20_001, "a\0b", "\ud800"])
@pytest.mark.parametrize("path", ["/embed", "/mutate", "/optimize"])
def test_a_text_that_is_no_prompt_is_refused(served: SmallPrompts, path: str, text: str) -> None:
    body = {"prompt": text} | ({"action": 0} if path == "/mutate" else {})
    reply = served.client.post(path, content=json.dumps(body), headers=JSON)
    assert reply.status_code == 422
    assert text == "\ud800" or reply.json()["field"] == "prompt"


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
    answer = served.select(3)
    assert answer.keys() == {"action", "mutation_type", "log_prob", "value", "version", "ticket"}
    shown = served.post("/get_distribution", embedding=embedding(3)).json()
    assert sum(shown["probabilities"]) == pytest.approx(1, abs=1e-5)
    assert shown["mutation_types"][answer["action"]] == answer["mutation_type"]


def test_a_truncated_body_is_an_error_of_its_sender(served: SmallPrompts) -> None:
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


HOST = "prompts.example"
EMBED: dict[str, Any] = {"prompt": "Write a haiku about rain"}


class Doored:
    """The API beyond loopback, and the gateway that gives out tokens."""

    def __init__(self, folder: Path) -> None:
        accounts, registry = f"sqlite:///{folder}/accounts.sqlite", f"sqlite:///{folder}/registry.sqlite"
        self.gateway = SmallGateway.at(accounts, registry, folder)
        for name, project in (("ada", "alpha"), ("bob", "beta")):
            self.gateway.person(name, project, Role.OWNER)
        upstream = Upstream(addresses=RunAddresses, credentials=Credentials())
        doors = Doors(hosts=frozenset({HOST}))
        self.app = make_app(site_listener(site(), upstream, doors, self.gateway.accounts, "alpha"))

    def call(self, path: str, headers: dict[str, str], body: dict[str, Any] | None = None) -> Any:
        """The answer to a POST with a body, else to a GET."""
        with TestClient(self.app, base_url=f"http://{HOST}", raise_server_exceptions=False) as client:
            if body is None:
                return client.get(path, headers=headers)
            return client.post(path, json=body, headers=headers)


@pytest.fixture(scope="module")
def doored(tmp_path_factory: pytest.TempPathFactory) -> Doored:
    """One for all, which leaves nothing behind."""
    return Doored(tmp_path_factory.mktemp("door"))


@pytest.mark.parametrize("said", ["", "Bearer nonsense", "Basic YWRhOmFkYQ==", "Bearer " + "x" * 4000])
def test_a_call_without_a_token_is_refused(doored: Doored, said: str) -> None:
    reply = doored.call("/embed", {"Authorization": said} if said else {}, EMBED)
    assert (reply.status_code, reply.json()["error"]) == (401, "unauthenticated")
    assert reply.headers["www-authenticate"]


def test_a_project_token_permits_what_its_role_permits(doored: Doored) -> None:
    viewer, editor, other = (
        doored.gateway.token(project, role)
        for project, role in (("alpha", Role.VIEWER), ("alpha", Role.EDITOR), ("beta", Role.EDITOR))
    )
    assert doored.call("/embed", viewer, EMBED).status_code == 200
    assert doored.call("/embed", editor, EMBED).status_code == 200
    refused = doored.call("/embed", other, EMBED)
    assert (refused.status_code, refused.json()["error"]) == (403, "forbidden")
    saving = doored.call("/save", viewer, {})
    assert (saving.status_code, "viewer" in saving.json()["detail"]) == (403, True)
    assert doored.call("/save", editor, {}).status_code == 503  # no run behind it
    assert doored.call("/rate", viewer, {"id": "x", "score": 1.0}).status_code == 403


def test_the_page_itself_is_open_and_no_other_file_is_one(doored: Doored) -> None:
    for path in ("/prompts", "/prompts/prompts.js", "/prompts/console.css", "/openapi.json"):
        reply = doored.call(path, {})
        assert reply.status_code == 200
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert reply.headers["x-content-type-options"] == "nosniff"
    for path in ("/prompts/absent.js", "/prompts/..%2f..%2fapi_bodies.py", "/promptsx"):
        assert doored.call(path, {}).status_code in {401, 404}


def test_beyond_loopback_a_project_must_be_named() -> None:
    mount = Mount(name="prompts", listen="0.0.0.0:8765", open=pytest.fail, insecure=True, kept_here=BEYOND)
    with pytest.raises(ConfigurationError, match="--project NAME, and --accounts or --database of"):
        mount.check(encrypted=False)


PATHS_PROMPT = "Write a function that sorts a list"


def longer(prompts: list[Any], responses: list[str]) -> list[float]:
    """A source of rewards, which likes long texts."""
    del prompts
    return [len(one) / 100 for one in responses]


def kept(url: str) -> list[Rating]:
    """All ratings, oldest first."""
    with Registry.read(url) as registry:
        return [one.rating for one in registry.ratings("default")]


def test_a_rating_is_kept_once(short_folder: Path) -> None:
    url = f"sqlite:///{short_folder}/registry.sqlite"
    with small_prompts(short_folder, registry=url) as prompts:
        best = prompts.post("/optimize", prompt=PATHS_PROMPT).json()
        assert prompts.post("/rate", id=best["id"], score=0.75).json() == {"stored": True, "learned": 0}
        again = prompts.post("/rate", id=best["id"], score=0.5)
        assert (again.status_code, again.json()["field"]) == (404, "id")
        (rating,) = kept(url)
        assert (rating.prompt, rating.response) == (PATHS_PROMPT, best["prompt"])
        assert (rating.score, rating.version) == (0.75, 1)
        assert prompts.fragments() == []


@pytest.mark.parametrize("score", ["-0.1", "1.1", '"1"', "true", "NaN", "null"])
def test_an_invalid_rating_is_refused(prompts: SmallPrompts, score: str) -> None:
    reply = prompts.client.post("/rate", content=f'{{"id": "x", "score": {score}}}', headers=JSON)
    assert (reply.status_code, reply.json()["field"]) == (422, "score")


def test_without_a_registry_a_path_can_be_rated_later(prompts: SmallPrompts) -> None:
    best = prompts.post("/optimize", prompt=PATHS_PROMPT).json()
    for _ in range(2):
        reply = prompts.post("/rate", id=best["id"], score=1.0)
        assert (reply.status_code, "--run" in reply.json()["detail"]) == (409, True)


def test_ratings_are_the_reward(short_folder: Path) -> None:
    url = f"sqlite:///{short_folder}/registry.sqlite"
    with small_prompts(short_folder, task={"reward": "ratings"}, registry=url) as prompts:
        assert prompts.client.get("/checks").json()["rewarded_by"] == "ratings"
        assert prompts.post("/mutate", prompt=PATHS_PROMPT, action=1).json()["reward"] is None
        refused = prompts.post("/optimize", prompt=PATHS_PROMPT)
        assert (refused.status_code, refused.json()["field"]) == (409, "explore")
        drawn = prompts.post("/optimize", prompt=PATHS_PROMPT, steps=3, explore=True).json()
        assert (len(drawn["path"]), drawn["reward"]) == (3, None)
        assert prompts.post("/rate", id=drawn["id"], score=0.25).json()["learned"] == 3
        (fragment,) = prompts.fragments()
        assert column(fragment, "reward") == [0.0, 0.0, -0.5]
        assert column(fragment, "action") == [one["action"] for one in drawn["path"]]
        assert column(fragment, "terminated") == [False, False, True]
        assert column(fragment, "valid") == [True] * 3
        assert [one.score for one in kept(url)] == [0.25]


def test_ratings_without_updates_are_bounded(short_folder: Path) -> None:
    url = f"sqlite:///{short_folder}/registry.sqlite"
    with small_prompts(short_folder, task={"reward": "ratings"}, registry=url) as prompts:
        prompts.api.most_waiting = 3
        asked: dict[str, Any] = {"prompt": PATHS_PROMPT, "steps": 3, "explore": True}
        paths = [prompts.post("/optimize", **asked).json() for _ in range(2)]
        assert prompts.post("/rate", id=paths[0]["id"], score=1.0).status_code == 200
        full = prompts.post("/rate", id=paths[1]["id"], score=1.0)
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        prompts.api.learning.waiting_steps = 0
        assert prompts.post("/rate", id=paths[1]["id"], score=1.0).json()["learned"] == 3


def test_a_person_checks_one_of_so_many_rewards(short_folder: Path) -> None:
    url = f"sqlite:///{short_folder}/registry.sqlite"
    task = {"reward_source": f"{__name__}:longer", "human_check_every": 2}
    with small_prompts(short_folder, task=task, registry=url) as prompts:
        for action in (0, 2, 3, 4):
            assert prompts.post("/mutate", prompt=PATHS_PROMPT, action=action).json()["reward"] > 0
        state = prompts.client.get("/checks").json()
        assert (state["rewarded_by"], state["every"], len(state["waiting"])) == ("source", 2, 2)
        one = state["waiting"][0]
        said = prompts.post("/checks", id=one["id"], better="before").json()
        assert (said["checked"], said["agreed"]) == (1, 0)
        assert prompts.post("/checks", id=one["id"], better="before").status_code == 404
        (rating,) = kept(url)
        assert (rating.response, rating.rejected) == (one["before"], one["after"])
        assert prompts.post("/mutate", prompt=PATHS_PROMPT, action=0, rewarded=False).json()["reward"] is None


def test_failures_of_embeddings_and_rewards_are_reported(short_folder: Path) -> None:
    task = {"reward_source": f"{__name__}:nothing", "embedding": "hashing"}
    with small_prompts(short_folder, task=task) as prompts:
        reply = prompts.post("/mutate", prompt=PATHS_PROMPT, action=3)
        assert (reply.status_code, "gave no score" in reply.json()["detail"]) == (502, True)
        assert prompts.post("/embed", prompt=PATHS_PROMPT).status_code == 200


def test_a_slow_source_delays_nothing_else(short_folder: Path) -> None:
    held.clear()
    task = {"reward_source": f"{__name__}:slow"}
    many = MOST_WORK_WAITING + 1
    with small_prompts(short_folder, task=task) as prompts, ThreadPoolExecutor(many) as programs:
        asked = [programs.submit(prompts.post, "/mutate", prompt=PATHS_PROMPT, action=3) for _ in range(many)]
        refused = next(as_completed(asked)).result()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert prompts.select(0)["version"] == 1
        held.set()
        assert sorted(one.result().status_code for one in asked) == [200] * MOST_WORK_WAITING + [503]


held = Event()


def slow(prompts: list[Any], responses: list[str]) -> list[float]:
    del prompts
    assert held.wait(60)
    return [0.0] * len(responses)


def nothing(prompts: list[Any], responses: list[str]) -> list[None]:
    del prompts
    return [None] * len(responses)
