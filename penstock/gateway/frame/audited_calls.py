"""What is done outside the accounts' database (in a registry, a run, a file), with its row in the audit.

The row is written before: what a gateway that is killed in between has done is audited. Where it is refused,
the row is taken back, since nothing was done; where no answer comes it stays, since it may have been done.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final

from sqlalchemy.orm import Session

from penstock.gateway.accounts import audit
from penstock.gateway.accounts.account_errors import AccountError
from penstock.gateway.accounts.accounts import Accounts
from penstock.gateway.jobs.steering import CannotSteer, NoAnswer
from penstock.registry.records import RegistryError, Unavailable

_REFUSALS: Final = (AccountError, CannotSteer, RegistryError)
_UNKNOWN: Final = (NoAnswer, Unavailable)


@contextmanager
def audited(
    accounts: Accounts,
    *,
    by: str,
    action: str,
    project: str,
    subject: str,
    request: str | None = None,
    refusals: tuple[type[Exception], ...] = (),
    **detail: Any,
) -> Iterator[None]:
    """Have the audit say what the block does, before it does it.

    request: an id under which the same is asked for again, to hear how far it has come: one row for all.
    refusals: exceptions by which the block says that it has done nothing, beside those of accounts, runs and
    registries. detail: facts that are neither secrets nor a person's text.
    """
    said = detail if request is None else detail | {"request": request}

    def write(session: Session, now: datetime) -> int | None:
        if request is not None and audit.is_noted(
            session, project=project, action=action, subject=subject, request=request
        ):
            return None
        row = audit.note(session, now, by=by, action=action, project=project, subject=subject, **said)
        session.flush()
        return row.number

    number = accounts.run(write)
    known: tuple[type[Exception], ...] = (*_REFUSALS, *refusals)
    try:
        yield
    except known as error:
        if number is not None and not isinstance(error, _UNKNOWN):
            accounts.run(lambda session, _: audit.take_back(session, number))
        raise
