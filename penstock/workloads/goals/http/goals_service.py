"""Routes of the page of goals.

    GET  /rl, /rl/{file}                                         the page, of plain files
    GET  /api/projects/{project}/injectors                       injectors of a project
    GET  /api/projects/{project}/injectors/{injector}            one: its day, its success, its last goals
    PUT  /api/projects/{project}/injectors/{injector}/auto       carry goals out, or only propose them
    POST /api/projects/{project}/injectors/{injector}/vetoes     forbid a goal that waits

Trainings, their curves and versions are the gateway's own routes of jobs.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request, Response
from pydantic import StrictBool

from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.surface import (
    Access,
    ApiError,
    Body,
    GuardedRoute,
    Line,
    Membership,
    Page,
    Service,
    answers,
    file_answer,
    member_of,
    noted,
    state_folder,
)
from penstock.workloads.goals.http.goals_answers import InjectorList, InjectorShown
from penstock.workloads.goals.http.injector_folders import NoSuchInjector, injector_folder, injector_folders
from penstock.workloads.goals.injector.auto_switch import switch
from penstock.workloads.goals.injector.injection_journal import TooLate, UnknownGoal, veto
from penstock.workloads.goals.injector.injector_view import summary_of, view_of

router = APIRouter(route_class=GuardedRoute, tags=["goals"])

Member = Annotated[Membership, Depends(member_of)]
_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_FILES: Final = {file.name: file for file in (Path(__file__).parent / "static").iterdir()}


class WantedAuto(Body):
    """Whether goals shall be carried out."""

    on: StrictBool


class NewVeto(Body):
    """The goal that must not be carried out."""

    goalId: Line  # noqa: N815 - as all names of the API


@router.get("/rl", response_class=Page)
def page() -> Page:
    """Return the page of goals."""
    return Page(_FILES["rl.html"].read_bytes())


@router.get(
    "/rl/{file}",
    response_class=Response,
    responses={200: {"content": {kind: {"schema": {"type": "string"}} for kind in _TYPES.values()}}},
)
def file_of_page(file: str) -> Response:
    """Return a file of the page of goals."""
    return file_answer(_FILES, file)


@router.get("/api/projects/{project}/injectors", responses=answers(InjectorList))
def injectors(request: Request, member: Member) -> dict[str, Any]:
    """Return the injectors of a project: whether each lives, and whether it carries goals out."""
    now, found = time.time(), injector_folders(state_folder(request), member.project)
    with _told():
        return {"injectors": [{"name": name} | summary_of(folder, now) for name, folder in found.items()]}


@router.get("/api/projects/{project}/injectors/{injector}", responses=answers(InjectorShown))
def injector(request: Request, member: Member, injector: str) -> dict[str, Any]:
    """Return an injector: what it did in the last day, how often goals succeed, and its last twenty."""
    with _told():
        folder = injector_folder(state_folder(request), member.project, injector)
        return {"name": injector} | view_of(folder, time.time())


@router.put("/api/projects/{project}/injectors/{injector}/auto", status_code=204)
def set_auto(request: Request, member: Member, injector: str, body: WantedAuto) -> None:
    """Have goals carried out, or only proposed, from the next interval on."""
    with _told():
        folder = injector_folder(state_folder(request), member.project, injector)
        with _noted(request, member, "injector switched", injector, on=body.on) as by:
            switch(folder, on=body.on, by=by)


@router.post("/api/projects/{project}/injectors/{injector}/vetoes", status_code=204)
def forbid(request: Request, member: Member, injector: str, body: NewVeto) -> None:
    """Forbid a goal that was proposed and is not carried out yet; again changes nothing."""
    with _told():
        folder = injector_folder(state_folder(request), member.project, injector)
        with _noted(request, member, "goal vetoed", injector, goal=body.goalId) as by:
            veto(folder, body.goalId, by)


def service() -> Service:
    """Return what this workload adds to a gateway."""
    one = "/api/projects/{project}/injectors/{injector}"
    access = {
        ("GET", "/rl"): Access.ANYBODY,
        ("GET", "/rl/{file}"): Access.ANYBODY,
        ("GET", "/api/projects/{project}/injectors"): Access.VIEWER,
        ("GET", one): Access.VIEWER,
        ("PUT", f"{one}/auto"): Access.EDITOR,
        ("POST", f"{one}/vetoes"): Access.EDITOR,
    }
    return Service(router=router, access=access)


def _noted(
    request: Request, member: Membership, action: str, injector: str, **detail: Any
) -> AbstractContextManager[str]:
    """Have the audit say what is asked of an injector, unless its files refuse it."""
    refusals = (UnknownGoal, TooLate, ConfigurationError)
    return noted(request, member, action, f"injector/{injector}", refusals=refusals, **detail)


@contextmanager
def _told() -> Iterator[None]:
    """Tell what the files say as the API does."""
    try:
        yield
    except NoSuchInjector as error:
        raise ApiError(404, str(error)) from error
    except UnknownGoal as error:
        raise ApiError(404, "this injector has proposed no such goal", field="goalId") from error
    except TooLate as error:
        raise ApiError(409, str(error)) from error
    except ConfigurationError as error:
        raise ApiError(409, f"the files of this injector cannot be used: {error}") from error
    except OSError as error:
        raise ApiError(409, f"the files of this injector cannot be used: {error.strerror}") from error
