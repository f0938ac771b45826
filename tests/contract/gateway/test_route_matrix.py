"""Every route of the gateway and its services, called by everybody, in every project: the one table holds."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.gateway.frame.route_access import ACCESS, PROJECT_HEADER, Access, Table
from penstock.gateway.store.tables import Role
from penstock.launch.gateway.local_runner import LocalRunner
from penstock.workloads.goals.http.goals_service import service as goals
from penstock.workloads.goals.injection_journal import INJECTIONS
from penstock.workloads.rlhf.policy_service import service as policies
from tests.support.gateway.job_templates import write_templates
from tests.support.gateway.small_gateway import SmallGateway

BODIES: Final[dict[str, Any]] = {
    "{user}": {"role": "viewer"},
    "promote": {"version": 1, "reason": "r"},
    "rollback": {"reason": "r"},
    "traffic": {"reason": "r"},
    "auto": {"on": True},
    "vetoes": {"goalId": "g"},
}
"""What routes that change something want to be told, by the last word of their path."""
PROJECTS = {"own": "alpha", "other": "beta", "absent": "gamma"}


@dataclass(frozen=True)
class Caller:
    """Somebody who calls. role: in the project `alpha`, None for an outsider."""

    name: str
    headers: dict[str, str]
    role: Role | None
    is_person: bool = True


@pytest.fixture
def gateway(database_url: str, tmp_path: Path) -> SmallGateway:
    """One with all services that workloads add, and a template of jobs."""
    registry = f"sqlite:///{tmp_path}/registry.sqlite" if "sqlite" in database_url else database_url
    runner = LocalRunner(tmp_path / "jobs", write_templates(tmp_path / "templates"))
    return SmallGateway.at(database_url, registry, tmp_path, runner=runner, services=[policies(), goals()])


@pytest.fixture
def callers(gateway: SmallGateway) -> list[Caller]:
    """Members of each role, programs, one who belongs elsewhere; `beta` has an owner of its own."""
    for role in reversed(Role):  # the owner adds the project
        gateway.person(role.value, "alpha", role)
    gateway.person("stranger", "beta", Role.OWNER)
    people = [Caller(role.value, gateway.bearer(role.value), role) for role in Role]
    programs = [
        Caller(f"{role} token", gateway.token("alpha", role), role, is_person=False)
        for role in (Role.VIEWER, Role.EDITOR)
    ]
    outsiders = [
        Caller("stranger", gateway.bearer("stranger"), None),
        Caller("token of beta", gateway.token("beta"), None, is_person=False),
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


def test_every_route_admits_whom_the_table_says(gateway: SmallGateway, callers: list[Caller]) -> None:
    for (method, path), access in table_of(gateway).items():
        place = f"{method} {path}"
        if access is not Access.ANYBODY:
            assert called(gateway, method, path, {}, "alpha").status_code == 401, place
        if access not in {Access.ANYBODY, Access.KNOWN}:
            for caller in callers:
                check(gateway, method, path, caller, Role(access))


def table_of(gateway: SmallGateway) -> Table:
    """Who may call what, services included."""
    found: Table = gateway.client.app.state.access  # type: ignore[attr-defined]
    assert found.keys() == ACCESS.keys() | policies().access.keys() | goals().access.keys()
    return found


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


def test_what_is_another_project_s_is_not_found_under_one_s_own(
    gateway: SmallGateway, callers: list[Caller], tmp_path: Path
) -> None:
    theirs = things_of_beta(gateway, tmp_path)
    before = seen_by_beta(gateway)
    about = [place for place in table_of(gateway) if set(re.findall(r"{(\w+)}", place[1])) & theirs.keys()]
    assert len(about) == 17
    for caller in callers:
        for method, path in about:
            if caller.role is None or not caller.role.includes(Role(table_of(gateway)[method, path])):
                continue
            place = path.format(project="alpha", action="pause", version=1, **theirs)
            body = {} if method in {"GET", "DELETE"} else {"json": BODIES.get(path.rpartition("/")[2], {})}
            reply = gateway.client.request(method, place, headers=caller.headers, **body)
            assert (reply.status_code, reply.json()["error"]) == (404, "not_found"), (
                method,
                path,
                reply.text,
            )
    events = f"/api/projects/alpha/events?job={theirs['job']}"
    assert gateway.get(events, gateway.bearer("owner")).status_code == 404
    assert seen_by_beta(gateway) == before


def things_of_beta(gateway: SmallGateway, folder: Path) -> dict[str, str]:
    """Something of each kind in `beta`, by what paths call it."""
    owner = gateway.bearer("stranger")
    ids = {"user": gateway.people["stranger"], "injector": "host"}
    for name, path, body in (
        ("job", "jobs", {"agent": "a", "template": "quick"}),
        ("token", "tokens", {"name": "nightly"}),
        ("link", "agents/a/links", {"items": [{"prompt": "p", "response": "r"}]}),
    ):
        reply = gateway.client.post(f"/api/projects/beta/{path}", json=body, headers=owner)
        assert reply.status_code == 201, reply.text
        ids[name] = reply.json()["id"]
    place = folder / "injectors" / "beta" / "host"
    place.mkdir(parents=True)
    (place / INJECTIONS).touch()
    return ids


def seen_by_beta(gateway: SmallGateway) -> list[Any]:
    """What its owner sees of them."""
    owner = gateway.bearer("stranger")
    paths = ("members", "jobs", "tokens", "agents/a/links", "injectors")
    return [gateway.get(f"/api/projects/beta/{path}", owner).json() for path in paths]


def test_a_route_without_an_access_rule_is_not_served(small_gateway: SmallGateway) -> None:
    from fastapi import APIRouter

    from penstock.gateway.frame.route_access import GuardedRoute, Listener, make_app

    unguarded, guarded = APIRouter(), APIRouter(route_class=GuardedRoute)
    for router in (unguarded, guarded):
        router.get("/api/open")(lambda: None)
    rules = [("GET", "/api/open"), ("GET", "/api/no")]
    for one, rule, why in (
        (unguarded, rules[:1], "no rule of access applies"),
        (guarded, [], "lacks"),
        (guarded, rules, "without a route"),
    ):
        access = dict.fromkeys(rule, Access.KNOWN)
        with pytest.raises(ValueError, match=why):
            make_app(Listener(title="one", routers=[one], access=access, admit=lambda _: None))
    served = {route.path for route in small_gateway.client.app.routes}  # type: ignore[attr-defined]
    assert served == {path for _, path in ACCESS}
