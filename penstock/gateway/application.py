"""The application: its routes, whom they admit, what surrounds them, and the parts that they work with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from fastapi import APIRouter, FastAPI

from penstock.gateway.frame.api_errors import add_handlers
from penstock.gateway.frame.envelope import Doors, Envelope, bare_app
from penstock.gateway.frame.route_access import ACCESS, Parts, Table, add_routes
from penstock.gateway.jobs.job_records import JobKind
from penstock.gateway.jobs.live_jobs import LiveJobs
from penstock.gateway.routes import (
    account_routes,
    console_routes,
    control_routes,
    description_routes,
    feedback_links,
    feedback_routes,
    job_routes,
    project_routes,
    satisfaction_routes,
)

OWN: Final = (
    account_routes.router,
    console_routes.router,
    project_routes.router,
    feedback_routes.router,
    feedback_links.router,
    satisfaction_routes.router,
    job_routes.router,
    control_routes.router,
    description_routes.router,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Says what a workload adds to a gateway.

    router: its routes, of `GuardedRoute`. access: who may call each of them. kinds: of jobs, by the name that
    templates give.
    """

    router: APIRouter
    access: Table
    kinds: Mapping[str, JobKind] = field(default_factory=dict)


def make_app(parts: Parts, doors: Doors, services: Sequence[Service] = ()) -> FastAPI:
    """Return the application.

    services: of workloads.
    Raises ValueError for a route without a line of access, and for a line without its route.
    """
    app = bare_app("Penstock")
    app.state.parts, app.state.accounts = parts, parts.accounts
    app.state.access = {}
    app.state.live = LiveJobs(parts.accounts, parts.dispatcher)
    add_routes(app, OWN, ACCESS)
    for one in services:
        add_routes(app, [one.router], one.access)
    add_handlers(app)
    app.add_middleware(Envelope, doors=doors, admit=parts.limits.admit_address)
    return app
