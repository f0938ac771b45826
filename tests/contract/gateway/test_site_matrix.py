"""Every route of a site that other machines reach, called by everybody: whom its token door lets in."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from penstock.gateway.sites.site import RunAddresses, Site, Upstream
from penstock.gateway.sites.site_process import OPEN, Reach, guarded_app
from penstock.gateway.store.tables import Role
from penstock.rpc.auth import Credentials
from penstock.workloads.chat.http.chat_routes import site as chat
from penstock.workloads.prompts.http.prompt_routes import site as prompts
from tests.support.gateway.small_gateway import SmallGateway

SITES = {"chat": chat(), "prompts": prompts()}


@pytest.mark.parametrize("name", SITES)
def test_every_route_of_a_site_admits_members_alone(
    small_gateway: SmallGateway, name: str, tmp_path: Path
) -> None:
    site = SITES[name]
    for role in reversed(Role):
        small_gateway.person(role.value, "alpha", role)
    small_gateway.person("stranger", "beta", Role.OWNER)
    members = [(role, small_gateway.bearer(role.value)) for role in Role]
    outsiders = [small_gateway.bearer("stranger"), small_gateway.token("beta")]
    seen = 0
    for client, method, path in calls(small_gateway, site, tmp_path):
        is_open = method == "GET" and path.startswith(site.open_paths)
        if is_open or path in OPEN:
            continue
        seen += 1
        assert client.request(method, path).status_code == 401, path
        for headers in outsiders:
            assert client.request(method, path, headers=headers).status_code == 403, path
        for role, headers in members:
            found = client.request(method, path, headers=headers).status_code
            least = Role.VIEWER if path in {*site.viewer_paths, "/api/me"} else Role.EDITOR
            assert (found not in {401, 403}) is role.includes(least), (method, path, role, found)
    assert seen >= 10


def calls(gateway: SmallGateway, site: Site, state: Path) -> Iterator[tuple[TestClient, str, str]]:
    """A client, and every call of the site's own document but that which ends the caller."""
    upstream = Upstream(addresses=RunAddresses, credentials=Credentials(), state=state)
    reach = Reach(listen="127.0.0.1:0", project="alpha")
    app = guarded_app(site, upstream, reach, gateway.accounts)
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        for path, operations in app.openapi()["paths"].items():
            for method in operations:
                if path != "/api/auth/sign-out":
                    yield client, method.upper(), path.replace("{file}", "nothing")
