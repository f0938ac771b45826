"""The application of one person: runs live, and where the person may act, a form that starts trainings.

It has the envelope, the errors and the words of the gateway, and none of its accounts. A request under
another host's name (a page elsewhere whose name was made to lead here), from a page of another origin, or
without the cookie of the one browser that was let in is refused. Everything the page loads comes from here.
"""

import asyncio
import getpass
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import HTTPConnection
from starlette.responses import RedirectResponse
from starlette.types import Scope

from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.frame.api_errors import ApiError, add_handlers
from penstock.gateway.frame.envelope import Doors, Envelope, LetIn, bare_app
from penstock.gateway.frame.event_stream import STILL_HERE, EventStream, event
from penstock.gateway.frame.requests import Body
from penstock.gateway.jobs.job_records import Action
from penstock.gateway.routes.control_routes import (
    NewTraffic,
    Promotion,
    VersionNumber,
    Wanted,
    WeightsFile,
    Withdrawal,
)
from penstock.launch.gateway.run_steering import RunSteering
from penstock.launch.ui.admission import PARAMETER, Admission
from penstock.launch.ui.catalogue import Catalogue, UnknownRun
from penstock.launch.ui.run_starter import CannotStart, RunStarter, settings_schema

# ---- What the person does: start a training, steer a run, decide about its versions.


class NewRun(Body):
    """A training: the name of its run, and what is set, as `SECTION: {KEY: value}`, over the defaults."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    settings: dict[str, Any] = Field(default_factory=dict)


def add_actions(app: FastAPI, runs: Catalogue, starter: RunStarter) -> None:
    router, steering, by = APIRouter(), RunSteering(lambda name: runs.find(name).folder), getpass.getuser()

    @router.get("/api/settings")
    def schema() -> Mapping[str, Any]:
        """Return the JSON schema of all settings of a run."""
        return settings_schema()

    @router.post("/api/runs", status_code=201)
    def start(body: NewRun) -> dict[str, str]:
        """Start a training, and answer once its run is there."""
        try:
            starter.start(body.name, body.settings)
        except CannotStart as error:
            raise ApiError(422 if error.field else 409, str(error), field=error.field) from error
        return {"name": body.name}

    @router.post("/api/runs/{name}/control/{action}")
    def control(name: str, action: Action, body: Wanted) -> Mapping[str, Any]:
        """Tell a run what is wanted."""
        runs.find(name).detail()  # a name that is none is told before anything is asked
        return steering.order(name, body.order(action))

    @router.get("/api/runs/{name}/versions/{version}/weights", response_class=WeightsFile)
    def weights(name: str, version: VersionNumber) -> WeightsFile:
        """Return the weights of a version as a file of safetensors."""
        runs.find(name).detail()
        return WeightsFile.of(steering.weights(name, version))

    @router.post("/api/runs/{name}/promote")
    def promote(name: str, body: Promotion) -> Mapping[str, Any]:
        """Make a version active or the canary."""
        return steering.promote(
            name, body.version, to=body.to, canary_share=body.canaryShare, reason=body.reason, by=by
        )

    @router.post("/api/runs/{name}/rollback")
    def roll_back(name: str, body: Withdrawal) -> Mapping[str, Any]:
        """Withdraw a version, the canary or the active one."""
        return steering.roll_back(name, body.version, reason=body.reason, by=by)

    @router.put("/api/runs/{name}/traffic")
    def set_traffic(name: str, body: NewTraffic) -> Mapping[str, Any]:
        """Change which share of the clients gets which version."""
        return steering.set_traffic(name, **body.change(), reason=body.reason, by=by)

    app.include_router(router)


# ---- Values of runs as JSON has them.


def json_values(value: Any) -> Any:
    """Return a value without what JSON lacks: NaN, infinity, letters of file names that are no text.

    Raises RecursionError for one that is nested too deeply.
    """
    if isinstance(value, dict):
        return {json_values(key): json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(item) for item in value]
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- Lets in the browser that has the cookie; the secret of the address is exchanged for it.

_NOT_LET_IN: Final = (
    "open the address that `penstock ui` printed; it lets in one browser: start it again for another"
)


def door(admission: Admission) -> LetIn:
    """Return what lets in the browser with the cookie, and leads it from the printed address to the page."""

    async def let_in(scope: Scope) -> Response | None:
        asked = HTTPConnection(scope)
        is_known = admission.admits(asked.cookies.get(admission.cookie))
        secret = asked.query_params.get(PARAMETER)
        if secret is not None and (scope["method"], scope["path"]) == ("GET", "/"):
            session = admission.exchange(secret)
            if session is not None or is_known:
                away = RedirectResponse("/", status_code=303)
                if session is not None:
                    away.set_cookie(admission.cookie, session, httponly=True, samesite="strict")
                return away
        if not is_known:
            raise ApiError(401, _NOT_LET_IN)
        return None

    return let_in


# ---- Runs live, as server-sent events: what has changed since it was sent last, and nothing else.

LOOK_S: Final = 1.0
"""Seconds between two looks."""
QUIET_LOOKS: Final = 15
"""Looks without news after which a sign of life is sent."""


async def live(runs: Catalogue, chosen: str, compared: Sequence[str], **more: Any) -> AsyncIterator[str]:
    """Yield the events without end.

    chosen: the run that is looked at, "" for none. more: that is told with the list.
    """
    sent = dict[tuple[str, str], str]()
    quiet = 0
    while True:
        fresh = await run_in_threadpool(_looked, runs, chosen, compared, more)
        news = {key: text for key, text in fresh.items() if sent.get(key) != text}
        for gone in sent.keys() - fresh.keys():
            del sent[gone]
        sent |= news
        for text in news.values():
            yield text
        quiet = 0 if news else quiet + 1
        if quiet == QUIET_LOOKS:
            quiet = 0
            yield STILL_HERE
        await asyncio.sleep(LOOK_S)


def _looked(
    runs: Catalogue, chosen: str, compared: Sequence[str], more: Mapping[str, Any]
) -> dict[tuple[str, str], str]:
    looks: dict[tuple[str, str], Callable[[], Any]] = {("runs", ""): lambda: {**runs.listed(), **more}}
    if chosen:
        looks["run", chosen] = lambda: runs.find(chosen).detail()
        looks["versions", chosen] = lambda: runs.find(chosen).versions()
        looks |= {("curve", name): partial(_curve, runs, name) for name in (chosen, *compared)}
    return {key: _told(*key, look) for key, look in looks.items()}


def _curve(runs: Catalogue, name: str) -> Any:
    return {"name": name, "columns": runs.find(name).curve()}


def _told(kind: str, name: str, look: Callable[[], Any]) -> str:
    """Return what a look finds as an event; what cannot be shown hides nothing else."""
    status = 409
    try:
        return event(kind, json_values(look()))
    except UnknownRun:
        status, detail = 404, f"no run of this name: {name}"
    except RecursionError:
        detail = "a file of this run is nested too deeply to be shown"
    except (OSError, ConfigurationError) as error:
        detail = str(error)
    return event("trouble", json_values({"run": name, "status": status, "detail": detail}))


STATIC: Final = Path(__file__).parent / "static"
MAX_COMPARED: Final = 16
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def make_app(
    runs: Catalogue, *, doors: Doors, admission: Admission | None = None, starter: RunStarter | None = None
) -> FastAPI:
    """Return the application.

    doors: under which names it is reached. admission: who is let in; None: everyone who reaches it. starter:
    of trainings, for a person who may act; None: everything is only looked at.

    Raises ValueError for a starter without an admission.
    """
    if starter is not None and admission is None:
        raise ValueError("who may act is let in by name: actions need an admission")
    app = bare_app("Penstock runs")
    _serve_page(app)
    _serve_runs(app, runs, can_act=starter is not None)
    if starter is not None:
        add_actions(app, runs, starter)
    _tell_errors(app)
    let_in = None if admission is None else door(admission)
    app.add_middleware(Envelope, doors=doors, admit=lambda _: None, let_in=let_in)
    return app


def _serve_page(app: FastAPI) -> None:
    """Serve the files, which are read once.

    Their names are known, so no path is ever built from a request.
    """
    for prefix, folder in (("/", STATIC), ("/vendor/", STATIC / "vendor")):
        for file in folder.iterdir():
            if file.suffix in _TYPES:
                path = "/" if file.name == "index.html" else f"{prefix}{file.name}"
                app.get(path)(_file(file.read_bytes(), _TYPES[file.suffix]))


def _file(content: bytes, media_type: str) -> Callable[[], Response]:
    return lambda: Response(content, media_type=media_type)


def _serve_runs(app: FastAPI, runs: Catalogue, *, can_act: bool) -> None:
    router = APIRouter()

    @router.get("/api/runs")
    def listed() -> Response:
        """Return every run, newest first, and whether the person may act."""
        return _json({**runs.listed(), "can_act": can_act})

    @router.get("/api/events", response_class=EventStream)
    async def events(
        run: str = "",
        compared: Annotated[list[str] | None, Query(alias="with", max_length=MAX_COMPARED)] = None,
    ) -> EventStream:
        """Send what changes, as it changes."""
        return EventStream(live(runs, run, compared or (), can_act=can_act))

    @router.get("/api/runs/{name}")
    def detail(name: str) -> Response:
        """Return one run: its progress, its current activity, its end."""
        return _json(runs.find(name).detail())

    @router.get("/api/runs/{name}/curve")
    def curve(name: str) -> Response:
        """Return its curve as columns."""
        return _json(runs.find(name).curve())

    @router.get("/api/runs/{name}/versions")
    def versions(name: str) -> Response:
        """Return the versions of its policy that were kept, newest first."""
        return _json(runs.find(name).versions())

    app.include_router(router)


def _tell_errors(app: FastAPI) -> None:
    add_handlers(app)

    @app.exception_handler(UnknownRun)
    async def unknown_run(_request: Request, error: UnknownRun) -> Response:
        return ApiError(404, json_values(f"no run of this name: {error.args[0]}")).response()

    @app.exception_handler(RecursionError)
    async def too_deep(_request: Request, _error: RecursionError) -> Response:
        return ApiError(409, "a file of this run is nested too deeply to be shown").response()

    @app.exception_handler(OSError)
    @app.exception_handler(ConfigurationError)
    async def unreadable(_request: Request, error: Exception) -> Response:
        return ApiError(409, json_values(str(error))).response()


def _json(content: Mapping[str, Any]) -> Response:
    return JSONResponse(json_values(dict(content)))
