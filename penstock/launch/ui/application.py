"""The application of one person: live runs and, if the person may act, a form that starts trainings.

It uses the frame of the gateway without accounts. It refuses requests with a foreign Host (DNS rebinding),
from pages of other origins, and without the cookie of the one admitted browser. The page loads nothing from
elsewhere.
"""

import asyncio
import getpass
import hmac
import math
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse

from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.frame.envelope import Doors
from penstock.gateway.frame.event_stream import STILL_HERE, EventStream, event
from penstock.gateway.frame.pages import SHARED, add_files, add_page, files_in
from penstock.gateway.frame.requests import ApiError, Body
from penstock.gateway.frame.route_access import Access, GuardedRoute, Listener, open_door
from penstock.gateway.frame.route_access import make_app as application
from penstock.gateway.jobs.job_records import Steering
from penstock.gateway.routes.control_routes import steering_routes
from penstock.launch.gateway.run_steering import RunSteering
from penstock.launch.ui.catalogue import Catalogue, UnknownRun
from penstock.launch.ui.run_starter import CannotStart, RunStarter, settings_schema

# ---- Actions: start a training, steer a run, promote and withdraw its versions.


class NewRun(Body):
    """A training: the name of its run, and settings over the defaults, as `SECTION: {KEY: value}`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    settings: dict[str, Any] = Field(default_factory=dict)


def actions_of(runs: Catalogue, starter: RunStarter) -> APIRouter:
    steering, by = RunSteering(lambda name: runs.find(name).folder), getpass.getuser()

    @contextmanager
    def steered(_request: Request, run: str, _action: str, **_facts: Any) -> Iterator[tuple[Steering, str]]:
        runs.find(run)  # raises UnknownRun
        yield steering, by

    router = steering_routes("/api/runs/{job}", steered)

    @router.get("/api/settings")
    def schema() -> Mapping[str, Any]:
        """Return the JSON schema of all settings of a run."""
        return settings_schema()

    @router.post("/api/runs", status_code=201)
    def start(body: NewRun) -> dict[str, str]:
        """Start a training, and answer once its run exists."""
        try:
            starter.start(body.name, body.settings)
        except CannotStart as error:
            raise ApiError(422 if error.field else 409, str(error), field=error.field) from error
        return {"name": body.name}

    return router


# ---- Values of runs as JSON has them.


def json_values(value: Any) -> Any:
    """Return a value with None for NaN and infinity, and with undecodable bytes of file names escaped.

    Raises RecursionError for a value that is nested too deeply.
    """
    if isinstance(value, dict):
        return {json_values(key): json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(item) for item in value]
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- Admission of one browser: the secret in a URL is exchanged, once, for a cookie.

SECRET_BYTES: Final = 32
PARAMETER: Final = "secret"
_NOT_LET_IN: Final = (
    "open the address that `penstock ui` printed; it lets in one browser: start it again for another"
)


class Admission:
    """The check of callers. Keeps digests of the secret, which is valid once, and of the cookie."""

    def __init__(self) -> None:
        self.secret = secrets.token_urlsafe(SECRET_BYTES)
        """Secret of the URL that is printed for the person."""
        self.cookie = f"penstock-{secrets.token_hex(4)}"
        """Name of the cookie, which differs from those of other pages on the same host."""
        self._secret: bytes | None = _digest(self.secret)
        self._session: bytes | None = None

    async def __call__(self, request: Request, _access: Access) -> Response | None:
        """Admit the browser with the cookie; redirect from the printed URL to the page."""
        is_known = self._admits(request.cookies.get(self.cookie))
        secret = request.query_params.get(PARAMETER)
        if secret is not None and (request.method, request.url.path) == ("GET", "/"):
            session = self._exchange(secret)
            if session is not None or is_known:
                away = RedirectResponse("/", status_code=303)
                if session is not None:
                    away.set_cookie(self.cookie, session, httponly=True, samesite="strict")
                return away
        if not is_known:
            raise ApiError(401, _NOT_LET_IN)
        return None

    def _exchange(self, secret: str) -> str | None:
        """Return the value of the cookie for the secret, the first time; None for anything else."""
        if self._secret is None or not hmac.compare_digest(_digest(secret), self._secret):
            return None
        self._secret = None
        session = secrets.token_urlsafe(SECRET_BYTES)
        self._session = _digest(session)
        return session

    def _admits(self, session: str | None) -> bool:
        held = self._session
        return held is not None and session is not None and hmac.compare_digest(_digest(session), held)


def _digest(text: str) -> bytes:
    return sha256(text.encode(errors="surrogateescape")).digest()


# ---- Live runs as server-sent events: only what has changed since it was last sent.

LOOK_S: Final = 1.0
"""Seconds between two looks."""
QUIET_LOOKS: Final = 15
"""Looks without changes after which a comment is sent."""


async def live(runs: Catalogue, chosen: str, compared: Sequence[str], **more: Any) -> AsyncIterator[str]:
    """Yield events without end.

    chosen: the shown run, "" for none. compared: runs whose curves are shown, too. more: sent with the list.
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
    return {key: _event_of(*key, look) for key, look in looks.items()}


def _curve(runs: Catalogue, name: str) -> Any:
    return {"name": name, "columns": runs.find(name).curve()}


def _event_of(kind: str, name: str, look: Callable[[], Any]) -> str:
    """Return the result of a look as an event, or an event `trouble` if it cannot be shown."""
    try:
        return event(kind, json_values(look()))
    except TROUBLES as error:
        status, detail = _trouble(error)
        return event("trouble", json_values({"run": name, "status": status, "detail": detail}))


# ---- Errors of runs that cannot be shown.

TROUBLES: Final = (UnknownRun, RecursionError, OSError, ConfigurationError)


def _trouble(error: Exception) -> tuple[int, str]:
    """Return the HTTP status and the text of an error."""
    if isinstance(error, UnknownRun):
        return 404, f"no run of this name: {error.args[0]}"
    if isinstance(error, RecursionError):
        return 409, "a file of this run is nested too deeply to be shown"
    return 409, str(error)


async def _answer_trouble(_request: Request, error: Exception) -> Response:
    status, detail = _trouble(error)
    return ApiError(status, json_values(detail)).response()


STATIC: Final = Path(__file__).parent / "static"
MAX_COMPARED: Final = 16


def make_app(
    runs: Catalogue, *, doors: Doors, admission: Admission | None = None, starter: RunStarter | None = None
) -> FastAPI:
    """Return the application.

    doors: accepted requests. admission: of one browser; None: everybody is admitted. starter: of trainings;
    None: the page is read-only.

    Raises ValueError for a starter without an admission.
    """
    if starter is not None and admission is None:
        raise ValueError("actions need an admission")
    page = APIRouter(route_class=GuardedRoute)
    add_page(page, "/", STATIC / "index.html")
    add_files(page, "", files_in(STATIC) | {"api.js": SHARED["api.js"]})
    add_files(page, "/vendor", files_in(STATIC / "vendor"))
    routers = [page, _runs(runs, can_act=starter is not None)]
    if starter is not None:
        routers.append(actions_of(runs, starter))
    every = [route for router in routers for route in router.routes if isinstance(route, GuardedRoute)]
    return application(
        Listener(
            title="Penstock runs",
            routers=routers,
            access={(one, route.path): Access.OWNER for route in every for one in route.methods or ()},
            admit=lambda _: None,
            door=admission or open_door,
            doors=doors,
            errors=dict.fromkeys(TROUBLES, _answer_trouble),
        )
    )


def _runs(runs: Catalogue, *, can_act: bool) -> APIRouter:
    router = APIRouter(route_class=GuardedRoute)

    @router.get("/api/runs")
    def listed() -> Response:
        """Return every run, newest first, and whether the person may act."""
        return _json({**runs.listed(), "can_act": can_act})

    @router.get("/api/events", response_class=EventStream)
    async def events(
        run: str = "",
        compared: Annotated[list[str] | None, Query(alias="with", max_length=MAX_COMPARED)] = None,
    ) -> EventStream:
        """Send changes as they happen."""
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

    return router


def _json(content: Mapping[str, Any]) -> Response:
    return JSONResponse(json_values(dict(content)))
