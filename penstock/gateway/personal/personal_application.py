"""The application of one person: runs live, and where the person may act, a form that starts trainings.

It has the envelope, the errors and the words of the gateway, and none of its accounts. A request under
another host's name (a page elsewhere whose name was made to lead here), from a page of another origin, or
without the cookie of the one browser that was let in is refused. Everything the page loads comes from here.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse

from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.frame.api_errors import ApiError, add_handlers
from penstock.gateway.frame.doors import Doors
from penstock.gateway.frame.envelope import Envelope
from penstock.gateway.frame.event_stream import EventStream
from penstock.gateway.personal.action_routes import add_actions
from penstock.gateway.personal.admission import Admission
from penstock.gateway.personal.json_values import json_values
from penstock.gateway.personal.personal_door import PersonalDoor
from penstock.gateway.personal.run_events import live
from penstock.gateway.personal.shown_runs import Actions, Runs, UnknownRun

STATIC: Final = Path(__file__).parent / "static"
MAX_COMPARED: Final = 16
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def make_app(
    runs: Runs, *, doors: Doors, admission: Admission | None = None, actions: Actions | None = None
) -> FastAPI:
    """Return the application.

    doors: under which names it is reached. admission: who is let in; None: everyone who reaches it. actions:
    what may be done; None: everything is only looked at.

    Raises ValueError for actions without an admission.
    """
    if actions is not None and admission is None:
        raise ValueError("who may act is let in by name: actions need an admission")
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    _serve_page(app)
    _serve_runs(app, runs, can_act=actions is not None)
    if actions is not None:
        add_actions(app, runs, actions)
    _tell_errors(app)
    if admission is not None:
        app.add_middleware(PersonalDoor, admission=admission)
    app.add_middleware(Envelope, doors=doors, admit=lambda _: None)
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


def _serve_runs(app: FastAPI, runs: Runs, *, can_act: bool) -> None:
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
        return _json(runs.detail(name))

    @router.get("/api/runs/{name}/curve")
    def curve(name: str) -> Response:
        """Return its curve as columns."""
        return _json(runs.curve(name))

    @router.get("/api/runs/{name}/versions")
    def versions(name: str) -> Response:
        """Return the versions of its policy that were kept, newest first."""
        return _json(runs.versions(name))

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
