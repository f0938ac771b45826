"""What the routes of a gateway work with."""

from dataclasses import dataclass, field
from pathlib import Path

from fastapi import Request

from penstock.gateway.accounts.accounts import Accounts
from penstock.gateway.accounts.audit import Quotas
from penstock.gateway.accounts.oidc_sign_in import OidcSignIn
from penstock.gateway.frame.api_errors import CallLimits
from penstock.gateway.jobs.job_dispatcher import JobDispatcher
from penstock.registry.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of one gateway, made when it starts.

    dispatcher: None where it runs no jobs. state: folder of what it keeps on this machine; None where it
    keeps nothing. oidc: None where no provider of identities is set up. quotas: of each project.
    """

    accounts: Accounts
    registry: Registry
    limits: CallLimits
    dispatcher: JobDispatcher | None = None
    state: Path | None = None
    oidc: OidcSignIn | None = None
    quotas: Quotas = field(default_factory=Quotas)


def parts_of(request: Request) -> Parts:
    """Return the parts of the gateway that a request came to."""
    found: Parts = request.app.state.parts
    return found


def address_of(request: Request) -> str:
    """Return the address that a request came from, "" where it is not known."""
    return request.client.host if request.client is not None else ""
