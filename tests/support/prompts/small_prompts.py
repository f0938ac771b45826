"""The API of prompts over a policy server of real parts, without a run behind it."""

import base64
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from fastapi.testclient import TestClient
from numpy.typing import NDArray

from penstock.gateway.application import site_listener
from penstock.gateway.frame.envelope import Doors
from penstock.gateway.frame.route_access import make_app
from penstock.gateway.upstream import RunAddresses, RunSettings, Upstream
from penstock.protocol.fragment import Fragment
from penstock.protocol.spaces import Box, Discrete
from penstock.rpc.auth import Credentials
from penstock.workloads.prompts.http.prompt_routes import site
from penstock.workloads.prompts.http.prompts_api import PromptsApi
from tests.support.serving.server_parts import ServedStand, served_policy, specification

SIZE: Final = 1536
OBSERVATION: Final = Box(np.full(SIZE, -1, np.float32), np.full(SIZE, 1, np.float32))
ADDRESS: Final = "http://127.0.0.1"


class SmallPrompts:
    """A client of the API, and the policy server behind it."""

    def __init__(self, client: TestClient, served: ServedStand, api: PromptsApi) -> None:
        self.client, self.served, self.api = client, served, api

    def post(self, route: str, /, **body: Any) -> Any:
        """The answer to a POST."""
        return self.client.post(route, json=body)

    def select(self, state: list[float], **body: Any) -> dict[str, Any]:
        """An action for an embedding."""
        reply = self.post("/select_action", embedding=state, **body)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def store(self, state: list[float], answer: dict[str, Any], following: list[float], **body: Any) -> Any:
        """The answer to a transition that an answer led to."""
        said = {
            "state": state,
            "action": answer["action"],
            "reward": 1.0,
            "next_state": following,
            "done": False,
            "log_prob": answer["log_prob"],
            "value": answer["value"],
        }
        return self.post("/store_experience", **(said | body))

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
    made = specification(OBSERVATION, Discrete(5), unroll=16)
    socket = folder / "policy.sock"
    with served_policy(made, socket) as served:
        served.publish(1)
        upstream = Upstream(
            addresses=lambda: RunAddresses(server=f"unix:{socket}"),
            credentials=Credentials(),
            settings=lambda: RunSettings(task=task or {}, registry=registry),
        )
        app = make_app(site_listener(site(), upstream, Doors()))
        with TestClient(app, base_url=ADDRESS, raise_server_exceptions=False) as client:
            yield SmallPrompts(client, served, app.state.api)


def embedding(number: int) -> list[float]:
    """An embedding of unit length, drawn; `number`: which."""
    drawn = np.random.default_rng(number).normal(size=SIZE).astype(np.float32)
    made: list[float] = (drawn / np.linalg.norm(drawn)).tolist()
    return made


def as_base64(numbers: list[float]) -> str:
    """The same as base64 of float32."""
    array: NDArray[np.float32] = np.asarray(numbers, "<f4")
    return base64.b64encode(array.tobytes()).decode()
