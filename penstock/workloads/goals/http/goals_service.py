"""Routes of the page of goals.

    GET  /rl, /rl/{file}                                         the page, of plain files
    GET  /api/projects/{project}/injectors                       injectors of a project
    GET  /api/projects/{project}/injectors/{injector}            one: its day, its success, its last goals
    PUT  /api/projects/{project}/injectors/{injector}/auto       carry goals out, or only propose them
    POST /api/projects/{project}/injectors/{injector}/vetoes     forbid a goal that waits

Trainings, their curves and versions are the gateway's own routes of jobs.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, Literal

from fastapi import APIRouter, Request
from pydantic import StrictBool

from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.accounts.principal import Membership
from penstock.gateway.application import Service
from penstock.gateway.frame.pages import add_files, add_page, files_in
from penstock.gateway.frame.requests import Answer, ApiError, Body, Line
from penstock.gateway.frame.route_access import (
    GuardedRoute,
    Member,
    audited,
    parts_of,
    state_folder,
    table,
)
from penstock.workloads.goals.injection_journal import INJECTIONS, TooLate, UnknownGoal, switch, veto
from penstock.workloads.goals.injector_view import summary_of, view_of

# ---- Answers about injectors, as the document describes them.


class RulesShown(Answer):
    """The rules that an injector keeps. quiet: hours of the day in which it carries nothing out."""

    threshold: float
    explore: float
    interval_s: float
    daily_limit: int
    veto_s: float
    quiet: list[str]


class InjectorListed(Answer):
    """An injector. stopped: why it has stopped itself. version: of the policy that it uses."""

    name: str
    state: Literal["running", "silent", "stopped", "ended"]
    seen: float | None
    auto: bool
    stopped: str | None
    trouble: str
    version: int | None
    rules: RulesShown | None


class InjectorList(Answer):
    """The injectors of a project."""

    injectors: list[InjectorListed]


class LastDay(Answer):
    """What an injector did in the last day. held: goals that were held back, by reason."""

    proposed: int
    injected: int
    succeeded: int
    failed: int
    held: dict[str, int]
    perHour: float  # noqa: N815 - as all names of the API


class SuccessShown(Answer):
    """The share of the last goals that succeeded; null: no outcome is known."""

    of: int
    share: float | None


class ReliabilityShown(Answer):
    """How well the probabilities fit the outcomes. gap: between probability and rate, on average."""

    brier: float
    gap: float
    outcomes: int


class GoalShown(Answer):
    """A goal. learned: whether the server accepted its reward for training; null: it has none yet."""

    goal_id: str
    goal: str
    timestamp: float
    reasoning: str
    priority: float
    confidence: float
    expected_reward: float | None
    outcome: str
    held: str | None
    learned: bool | None
    vetoed: bool
    mayVeto: bool  # noqa: N815


class InjectorShown(InjectorListed):
    """An injector with what it did. confidence: how many goals of the day, in ten equal parts of 0 to 1."""

    day: LastDay
    success: SuccessShown
    confidence: list[int]
    reliability: ReliabilityShown | None
    goals: list[GoalShown]


# ---- The injectors of a project: folders below `STATE/injectors/PROJECT` of the gateway's machine.

INJECTORS: Final = "injectors"


def injector_folders(state: Path, project: str) -> Mapping[str, Path]:
    """Return the folders of a project's injectors by name, sorted. state: the gateway's folder."""
    projects = _folders(state / INJECTORS)
    found = _folders(projects[project]) if project in projects else {}
    return {name: folder for name, folder in sorted(found.items()) if (folder / INJECTIONS).is_file()}


def injector_folder(state: Path, project: str, name: str) -> Path:
    """Return the folder of one injector; raises ApiError where the project has none of that name."""
    found = injector_folders(state, project)
    if name not in found:
        raise ApiError(
            404, f"this project has no such injector: start one with --folder STATE/{INJECTORS}/PROJECT/NAME"
        )
    return found[name]


def _folders(place: Path) -> dict[str, Path]:
    try:
        return {one.name: one for one in place.iterdir() if one.is_dir()}
    except (FileNotFoundError, NotADirectoryError):
        return {}


router = APIRouter(route_class=GuardedRoute, tags=["goals"])

_FILES: Final = files_in(Path(__file__).parent / "static")
add_page(router, "/rl", _FILES["rl.html"])
add_files(router, "/rl", _FILES)


class WantedAuto(Body):
    """Whether goals shall be carried out."""

    on: StrictBool


class NewVeto(Body):
    """The goal that must not be carried out."""

    goalId: Line  # noqa: N815 - as all names of the API


@router.get("/api/projects/{project}/injectors", response_model=InjectorList)
def injectors(request: Request, member: Member) -> dict[str, Any]:
    """Return the injectors of a project: whether each lives, and whether it carries goals out."""
    now, found = time.time(), injector_folders(state_folder(request), member.project)
    with _refusals():
        return {"injectors": [{"name": name} | summary_of(folder, now) for name, folder in found.items()]}


@router.get("/api/projects/{project}/injectors/{injector}", response_model=InjectorShown)
def injector(request: Request, member: Member, injector: str) -> dict[str, Any]:
    """Return an injector: what it did in the last day, how often goals succeed, and its last twenty."""
    with _refusals():
        folder = injector_folder(state_folder(request), member.project, injector)
        return {"name": injector} | view_of(folder, time.time())


@router.put("/api/projects/{project}/injectors/{injector}/auto", status_code=204)
def set_auto(request: Request, member: Member, injector: str, body: WantedAuto) -> None:
    """Have goals carried out, or only proposed, from the next interval on."""
    with _refusals():
        folder = injector_folder(state_folder(request), member.project, injector)
        with _audited(request, member, "injector switched", injector, on=body.on):
            switch(folder, on=body.on, by=member.principal.subject)


@router.post("/api/projects/{project}/injectors/{injector}/vetoes", status_code=204)
def forbid(request: Request, member: Member, injector: str, body: NewVeto) -> None:
    """Forbid a goal that was proposed and is not carried out yet; again changes nothing."""
    with _refusals():
        folder = injector_folder(state_folder(request), member.project, injector)
        with _audited(request, member, "goal vetoed", injector, goal=body.goalId):
            veto(folder, body.goalId, member.principal.subject)


def service() -> Service:
    one = "/api/projects/{project}/injectors/{injector}"
    access = table(
        anybody=["GET /rl", "GET /rl/{file}"],
        viewer=["GET /api/projects/{project}/injectors", f"GET {one}"],
        editor=[f"PUT {one}/auto", f"POST {one}/vetoes"],
    )
    return Service(router=router, access=access)


def _audited(
    request: Request, member: Membership, action: str, injector: str, **detail: Any
) -> AbstractContextManager[None]:
    """Write a request to an injector into the audit log, unless its files refuse it."""
    refusals = (UnknownGoal, TooLate, ConfigurationError)
    return audited(parts_of(request), member, action, f"injector/{injector}", refusals=refusals, **detail)


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except UnknownGoal as error:
        raise ApiError(404, "this injector has proposed no such goal", field="goalId") from error
    except TooLate as error:
        raise ApiError(409, str(error)) from error
    except ConfigurationError as error:
        raise ApiError(409, f"the files of this injector cannot be used: {error}") from error
    except OSError as error:
        raise ApiError(409, f"the files of this injector cannot be used: {error.strerror}") from error
