"""Every call that changes something leaves one row in the audit, and none where it is refused.

The calls are those of the gateway with the services of all installed workloads: a new one fails here by its
name until it leaves a row, or has a reason in `WITHOUT` why it leaves none.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.config.workload import find, installed, load
from penstock.gateway.accounts import audit, users
from penstock.gateway.accounts import users as passwords
from penstock.gateway.frame.route_access import ACCESS, PROJECT_HEADER, Access, Table
from penstock.gateway.jobs.job_records import CannotSteer, NoAnswer, Order
from penstock.gateway.store.tables import Role
from penstock.launch.gateway.local_runner import LocalRunner
from penstock.launch.gateway.run_steering import RunSteering
from penstock.registry.weight_files import registry_url
from tests.support.gateway.audited_changes import CHANGES, THEMSELVES, Change, Stand
from tests.support.gateway.finished_run import write_run
from tests.support.gateway.injector_files import goal, write_goals
from tests.support.gateway.job_templates import write_templates, write_tiny
from tests.support.gateway.small_gateway import PASSWORD, SmallGateway

SERVICES: Final = [load(one.http)() for one in map(find, installed()) if one.http]
RULES: Final[Table] = {**ACCESS, **{place: who for one in SERVICES for place, who in one.access.items()}}
CHANGING: Final = {"POST", "PUT", "PATCH", "DELETE"}
CALLS: Final = sorted(f"{method} {path}" for method, path in RULES if method in CHANGING)
_RECORD: Final = "what it stores is its own record: who gave it, opaquely, and when; the registry keeps both"
WITHOUT: Final = {
    "POST /api/policies/feedback/{agent_id}": _RECORD,
    "POST /api/projects/{project}/agents/{agent_id}/pairs": _RECORD,
    "POST /api/projects/{project}/agents/{agent_id}/late-rewards": _RECORD,
    "POST /api/link/ratings": _RECORD,
    "POST /api/projects/{project}/estimates": "a dry run leaves nothing",
    "POST /api/auth/oidc": "it stores nothing: the browser takes along what it must bring back",
    "POST /api/auth/oidc/session": "a refresh token is exchanged; the session has its row since it began",
}
"""The calls that leave no row, and why."""


class Answering(RunSteering):
    """Steers the versions of a run that is over, and answers orders as a broker of one that goes on."""

    def order(self, job: str, order: Order) -> Mapping[str, Any]:
        """What a run answers that goes on; a checkpoint is still being made."""
        if order.name == "lost":
            raise NoAnswer("the broker does not answer")
        if order.name == "refused":
            raise CannotSteer("the broker refuses it")
        return {"desired": "PAUSED", "revision": 1}


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    """One whose owner has a password; `bob` is an editor."""
    templates = write_tiny(write_templates(tmp_path / "templates"))
    runner = LocalRunner(tmp_path / "jobs", templates)
    url, registry = (f"sqlite:///{tmp_path}/{name}.sqlite" for name in ("accounts", "registry"))
    gateway = SmallGateway.at(url, registry, tmp_path, runner=runner, services=SERVICES)
    run = write_run(tmp_path / "run", "alpha/runs")
    assert gateway.parts.dispatcher is not None
    gateway.parts.dispatcher.steering = Answering(lambda _job: run, registry_url(run))

    def add(session: Any, now: Any) -> str:
        hashed = passwords.hash_password(PASSWORD, name="ada")
        return users.add(session, now, name="ada", password=hashed, by="test").id

    gateway.people["ada"] = gateway.accounts.run(add)
    gateway.person("ada", "alpha", Role.OWNER)
    gateway.person("bob", "alpha", Role.EDITOR)
    injector = tmp_path / "injectors" / "alpha" / "host"
    injector.mkdir(parents=True)
    write_goals(injector, goal("waits"), goal("done", injected=True))
    return Stand(gateway, tmp_path, gateway.bearer("ada"))


def test_the_calls_are_those_of_the_application(stand: Stand) -> None:
    document = stand.gateway.get("/api/openapi.json", {}).json()
    described = {
        f"{method.upper()} {path}" for path, operations in document["paths"].items() for method in operations
    }
    table: Table = stand.gateway.client.app.state.access  # type: ignore[attr-defined]
    assert table == RULES
    assert {one for one in described if one.partition(" ")[0] in CHANGING} == set(CALLS)
    assert CHANGES.keys() | WITHOUT.keys() <= set(CALLS)
    assert not CHANGES.keys() & WITHOUT.keys()


@pytest.mark.parametrize("call", [one for one in CALLS if one not in WITHOUT])
def test_a_change_leaves_one_row_and_a_refusal_none(stand: Stand, call: str) -> None:
    assert call in CHANGES, f"{call}: it leaves no row: say in CHANGES how it is made, or in WITHOUT why not"
    change, method = CHANGES[call](stand), call.partition(" ")[0]
    refused = [*strangers(stand, call, change), *change.refused]
    before = stand.rows()
    for path, said in refused:
        reply = stand.send(method, path, **said)
        assert 400 <= reply.status_code < 500, (path, said, reply.text)
        assert len(stand.rows()) == len(before), (path, said, reply.text)
    reply = stand.send(method, change.path, **change.said)
    assert 200 <= reply.status_code < 300, reply.text
    new = stand.rows()[len(before) :]
    (row,) = [one for one in new if one.action not in change.beside]
    assert [one.action for one in new if one is not row] == list(change.beside)
    assert (row.action, row.project) == (change.action, change.project)
    assert row.subject.startswith(change.subject)
    assert row.by == (row.subject if change.by == THEMSELVES else change.by)


def strangers(stand: Stand, call: str, change: Change) -> list[tuple[str, Mapping[str, Any]]]:
    """The same call by those who may not make it, and with a field that there is none of."""
    method, _, path = call.partition(" ")
    access, said = RULES[method, path], dict(change.said)
    found: list[tuple[str, Mapping[str, Any]]] = []
    if "json" in said:
        found.append((change.path, said | {"json": said["json"] | {"unknown": 1}}))
    if access is Access.ANYBODY:
        return found
    callers = [{"Authorization": "Bearer none"}]
    if access is not Access.KNOWN:
        elsewhere = stand.gateway.token("beta") | {PROJECT_HEADER: "alpha"}
        callers += [elsewhere, stand.gateway.token("alpha", Role.VIEWER)]
    return [*found, *((change.path, said | {"headers": said.get("headers", {}) | one}) for one in callers)]


def test_an_order_that_is_asked_after_again_leaves_one_row(stand: Stand) -> None:
    job, before = stand.job(), len(stand.rows())
    for action, request in (
        *(("checkpoint", "r-1"), ("checkpoint", "r-1"), ("checkpoint", "r-2"), ("flush", "r-1")),
        *(("pause", "r-1"), ("pause", "r-1")),
    ):
        stand.made(f"{job}/control/{action}", {"requestId": request})
    assert [one.action for one in stand.rows()[before:]] == [
        *("run: checkpoint", "run: checkpoint", "run: flush"),
        *("run: pause", "run: pause"),
    ]


def test_what_may_have_been_done_keeps_its_row(stand: Stand) -> None:
    job, before = stand.job(), len(stand.rows())
    lost = stand.send("POST", f"{job}/control/checkpoint", json={"name": "lost", "requestId": "r-1"})
    assert lost.status_code == 409
    again = stand.send("POST", f"{job}/control/checkpoint", json={"name": "refused", "requestId": "r-1"})
    assert again.status_code == 409
    assert [one.action for one in stand.rows()[before:]] == ["run: checkpoint"]


def test_weights_that_are_read_leave_a_row(stand: Stand) -> None:
    job, before = stand.job(), len(stand.rows())
    assert stand.send("GET", f"{job}/versions/7/weights").status_code == 409
    assert len(stand.rows()) == before
    assert stand.send("GET", f"{job}/versions/5/weights").status_code == 200
    assert [one.action for one in stand.rows()[before:]] == ["weights read"]


def test_a_row_is_found_by_what_is_asked_for_again(small_gateway: SmallGateway) -> None:
    same = {"project": "alpha", "action": "run: flush", "subject": "job/1"}
    small_gateway.accounts.run(lambda session, now: audit.note(session, now, by="t", request="r", **same))

    def found(request: str = "r", **other: str) -> bool:
        wanted = same | other
        return small_gateway.accounts.look(lambda session: audit.is_noted(session, request=request, **wanted))

    assert found()
    for other in ({"project": "beta"}, {"action": "run: pause"}, {"subject": "job/2"}, {"request": "s"}):
        assert not found(**other)
