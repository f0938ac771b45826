"""What the person does: start a training, steer a run, decide about its versions."""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI
from pydantic import Field

from penstock.gateway.frame.api_errors import ApiError
from penstock.gateway.frame.request_text import Body
from penstock.gateway.jobs.steering import Action
from penstock.gateway.personal.shown_runs import Actions, CannotStart, Runs
from penstock.gateway.routes.steering_requests import (
    NewTraffic,
    Promotion,
    VersionNumber,
    Wanted,
    WeightsFile,
    Withdrawal,
)


class NewRun(Body):
    """A training: the name of its run, and what is set, as `SECTION: {KEY: value}`, over the defaults."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    settings: dict[str, Any] = Field(default_factory=dict)


def add_actions(app: FastAPI, runs: Runs, actions: Actions) -> None:
    """Add the routes."""
    router, steering = APIRouter(), actions.steering

    @router.get("/api/settings")
    def schema() -> Mapping[str, Any]:
        """Return the JSON schema of all settings of a run."""
        return actions.starter.schema()

    @router.post("/api/runs", status_code=201)
    def start(body: NewRun) -> dict[str, str]:
        """Start a training, and answer once its run is there."""
        try:
            actions.starter.start(body.name, body.settings)
        except CannotStart as error:
            raise ApiError(422 if error.field else 409, str(error), field=error.field) from error
        return {"name": body.name}

    @router.post("/api/runs/{name}/control/{action}")
    def control(name: str, action: Action, body: Wanted) -> Mapping[str, Any]:
        """Tell a run what is wanted."""
        runs.detail(name)  # a name that is none is told before anything is asked
        return steering.order(name, body.order(action))

    @router.get("/api/runs/{name}/versions/{version}/weights", response_class=WeightsFile)
    def weights(name: str, version: VersionNumber) -> WeightsFile:
        """Return the weights of a version as a file of safetensors."""
        runs.detail(name)
        return WeightsFile.of(steering.weights(name, version))

    @router.post("/api/runs/{name}/promote")
    def promote(name: str, body: Promotion) -> Mapping[str, Any]:
        """Make a version active or the canary."""
        return steering.promote(
            name, body.version, to=body.to, canary_share=body.canaryShare, reason=body.reason, by=actions.by
        )

    @router.post("/api/runs/{name}/rollback")
    def roll_back(name: str, body: Withdrawal) -> Mapping[str, Any]:
        """Withdraw a version, the canary or the active one."""
        return steering.roll_back(name, body.version, reason=body.reason, by=actions.by)

    @router.put("/api/runs/{name}/traffic")
    def set_traffic(name: str, body: NewTraffic) -> Mapping[str, Any]:
        """Change which share of the clients gets which version."""
        return steering.set_traffic(name, body.change(), reason=body.reason, by=actions.by)

    app.include_router(router)
