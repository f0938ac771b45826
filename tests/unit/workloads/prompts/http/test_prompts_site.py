"""Where other machines reach the API, callers need a token of the run's project."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")

from fastapi.testclient import TestClient

from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.application import site_listener
from penstock.gateway.frame.envelope import Doors
from penstock.gateway.frame.route_access import make_app
from penstock.gateway.process import Mount
from penstock.gateway.store.tables import Role
from penstock.gateway.upstream import RunAddresses, Upstream
from penstock.launch.gateway.gateway_commands import BEYOND
from penstock.rpc.auth import Credentials
from penstock.workloads.prompts.http.prompt_routes import site
from tests.support.gateway.small_gateway import SmallGateway

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


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer nonsense"},
        {"Authorization": "Basic YWRhOmFkYQ=="},
        {"Authorization": "Bearer " + "x" * 4000},
    ],
    ids=["none", "nonsense", "another scheme", "long"],
)
def test_a_call_without_a_token_is_refused(doored: Doored, headers: dict[str, str]) -> None:
    reply = doored.call("/embed", headers, EMBED)
    assert (reply.status_code, reply.json()["error"]) == (401, "unauthenticated")
    assert reply.headers["www-authenticate"]


def test_a_token_of_the_project_opens_as_far_as_its_role_does(doored: Doored) -> None:
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


@pytest.mark.parametrize("path", ["/prompts", "/prompts/prompts.js", "/prompts/console.css", "/openapi.json"])
def test_the_page_itself_is_open(doored: Doored, path: str) -> None:
    reply = doored.call(path, {})
    assert reply.status_code == 200
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/prompts/absent.js", "/prompts/..%2f..%2fapi_bodies.py", "/promptsx"])
def test_no_other_file_is_a_page(doored: Doored, path: str) -> None:
    assert doored.call(path, {}).status_code in {401, 404}


def test_beyond_loopback_a_project_must_be_named() -> None:
    with pytest.raises(ConfigurationError, match="--project NAME, and --accounts or --database of"):
        Mount(
            name="prompts",
            listen="0.0.0.0:8765",
            open=pytest.fail,
            insecure=True,
            kept_here=BEYOND,
        ).check(encrypted=False)
