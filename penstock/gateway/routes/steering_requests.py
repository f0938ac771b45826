"""What is asked of a run and its versions, as requests say it."""

import re
import secrets
from typing import Annotated, Literal

from fastapi import Path, Response
from pydantic import Field

from penstock.gateway.frame.api_errors import ApiError
from penstock.gateway.frame.request_numbers import NUMERIC, Number
from penstock.gateway.frame.request_text import Body, Text
from penstock.gateway.jobs.steering import Action, Order, TrafficChange, VersionFile

Reason = Annotated[Text, Field(max_length=500)]
Share = Annotated[Number, Field(ge=0, le=1, allow_inf_nan=False)]
Version = (
    Annotated[int, Field(strict=True, ge=1, lt=2**53)]
    | Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9._-]{0,62}$")]
)
"""A version by its number, or by its name, such as `v15`."""
VersionNumber = Annotated[int, Path(ge=1, lt=2**53)]


class WeightsFile(Response):
    """An answer that is a version's weights, for a browser to keep as a file."""

    media_type = "application/octet-stream"

    @classmethod
    def of(cls, file: VersionFile) -> "WeightsFile":
        """Return a file as an answer."""
        name = re.sub(r"[^A-Za-z0-9._-]", "-", file.name)
        return cls(file.content, headers={"Content-Disposition": f'attachment; filename="{name}"'})


class Wanted(Body):
    """What is wanted of a run.

    name: of a checkpoint, for `checkpoint` and `restore`. minSteps: for `flush`. requestId: of the answer of
    an order that is asked after.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    minSteps: Annotated[int, Field(ge=1, lt=2**53), NUMERIC] = 1  # noqa: N815 - as all names of the API
    requestId: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] | None = None  # noqa: N815
    reason: Reason = ""

    def order(self, action: Action) -> Order:
        """Return it as a run is told; raises ApiError 422 where an action lacks its name."""
        if action is Action.RESTORE and self.name is None:
            raise ApiError(422, "name: say which checkpoint shall be restored", field="name")
        return Order(
            action=action,
            name=self.name or "",
            min_steps=self.minSteps,
            request_id=self.requestId or secrets.token_hex(8),
            reason=self.reason,
        )


class Promotion(Body):
    """A version that more clients shall get, and why."""

    version: Version
    to: Literal["active", "canary"] = "active"
    canaryShare: Share | None = None  # noqa: N815
    reason: Annotated[Reason, Field(min_length=1)]


class Withdrawal(Body):
    """A version that no client shall get any more, and why; left out: the canary, else the active one."""

    version: Version | None = None
    reason: Annotated[Reason, Field(min_length=1)]


class NewTraffic(Body):
    """Which clients get which version, and why; what is left out stays. shadow 0: none."""

    canaryShare: Share | None = None  # noqa: N815
    latestShare: Share | None = None  # noqa: N815
    shadow: Annotated[int, Field(ge=0, lt=2**53), NUMERIC] | None = None
    reason: Annotated[Reason, Field(min_length=1)]

    def change(self) -> TrafficChange:
        """Return it as the registry is told."""
        return TrafficChange(canary_share=self.canaryShare, latest_share=self.latestShare, shadow=self.shadow)
