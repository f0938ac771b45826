"""Every route of the gateway, called by everybody, in every project: the one table holds."""

from dataclasses import dataclass
from typing import Any

import pytest

from gateway.frame.route_access import ACCESS, PROJECT_HEADER, Access
from gateway.store.tables import Role
from tests.support.gateway.small_gateway import SmallGateway

PROJECTS = {"own": "alpha", "other": "beta", "absent": "gamma"}


@dataclass(frozen=True)
class Caller:
    """Somebody who calls. role: in the project `alpha`, None for an outsider."""

    name: str
    headers: dict[str, str]
    role: Role | None
    is_person: bool = True


@pytest.fixture
def callers(small_gateway: SmallGateway) -> list[Caller]:
    """Members of each role, programs, one who belongs elsewhere; `beta` has an owner of its own."""
    for role in reversed(Role):  # the owner adds the project
        small_gateway.person(role.value, "alpha", role)
    small_gateway.person("stranger", "beta", Role.OWNER)
    people = [Caller(role.value, small_gateway.bearer(role.value), role) for role in Role]
    programs = [
        Caller(f"{role} token", small_gateway.token("alpha", role), role, is_person=False)
        for role in (Role.VIEWER, Role.EDITOR)
    ]
    outsiders = [
        Caller("stranger", small_gateway.bearer("stranger"), None),
        Caller("token of beta", small_gateway.token("beta"), None, is_person=False),
    ]
    return [*people, *programs, *outsiders]


def called(gateway: SmallGateway, method: str, path: str, caller: dict[str, str], project: str) -> Any:
    """The answer to a call without a body, of things that do not exist."""
    place = path.format_map(_Filled(project))
    headers = caller | ({} if "{project}" in path else {PROJECT_HEADER: project})
    return gateway.client.request(method, place, headers=headers)


class _Filled(dict[str, str]):
    """Fills a path: the project, and names of nothing for the rest."""

    def __init__(self, project: str) -> None:
        super().__init__(project=project)

    def __missing__(self, key: str) -> str:
        return "nothing"


def test_every_route_admits_whom_the_table_says(small_gateway: SmallGateway, callers: list[Caller]) -> None:
    """A project is unknown to people who have no part in it: 404, the same as for one that is absent."""
    for (method, path), access in ACCESS.items():
        place = f"{method} {path}"
        if access is not Access.ANYBODY:
            assert called(small_gateway, method, path, {}, "alpha").status_code == 401, place
        if access not in {Access.ANYBODY, Access.KNOWN}:
            for caller in callers:
                check(small_gateway, method, path, caller, Role(access))


def check(gateway: SmallGateway, method: str, path: str, caller: Caller, least: Role) -> None:
    """One caller of one route, in all three projects."""
    what = (method, path, caller.name)
    own, other, absent = (
        called(gateway, method, path, caller.headers, PROJECTS[which]) for which in ("own", "other", "absent")
    )
    if caller.role is None:
        assert (own.status_code, own.json()) == (404, absent.json()), what
        return
    if caller.role.includes(least):
        assert own.status_code not in {401, 403}, what
        assert "no such project" not in own.text, what
    else:
        assert (own.status_code, own.json()["error"]) == (403, "forbidden"), what
    assert other.status_code == absent.status_code == 404, what
    assert other.json() == absent.json(), what


def test_a_route_without_an_access_rule_is_not_served(small_gateway: SmallGateway) -> None:
    """Neither one without a line in the table, nor one of the framework's own kind."""
    from fastapi import APIRouter, FastAPI

    from gateway.frame.route_access import GuardedRoute, add_routes

    app = FastAPI()
    app.state.access = {}
    unguarded, guarded = APIRouter(), APIRouter(route_class=GuardedRoute)
    for router in (unguarded, guarded):
        router.get("/api/open")(lambda: None)
    with pytest.raises(ValueError, match="no rule says who may call"):
        add_routes(app, [unguarded], {("GET", "/api/open"): Access.KNOWN})
    with pytest.raises(ValueError, match="lacks"):
        add_routes(app, [guarded], {})
    with pytest.raises(ValueError, match="without a route"):
        add_routes(app, [guarded], {("GET", "/api/open"): Access.KNOWN, ("GET", "/api/no"): Access.KNOWN})
    served = {route.path for route in small_gateway.client.app.routes}  # type: ignore[attr-defined]
    assert served == {path for _, path in ACCESS}
