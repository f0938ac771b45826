"""People whom a provider of identities knows: each function is part of a caller's transaction.

An identity is the provider and its subject, never an address: who has the address of somebody who has an
account here is somebody else.
"""

import secrets
from datetime import datetime

from sqlalchemy.orm import Session

from penstock.gateway.accounts import audit, invitations, projects, users
from penstock.gateway.accounts.account_errors import AccountConflict, BadInput, Forbidden
from penstock.gateway.accounts.oidc_provider import Identity, ProviderSettings
from penstock.gateway.store.tables import IdentityRow, ProjectRow, UserRow

NOT_KNOWN = "you have no account here: ask the owner of a project for an invitation"


def find(session: Session, identity: Identity) -> UserRow | None:
    """Return the person of an identity, None for a newcomer; raises Forbidden for one who is disabled."""
    row = session.get(IdentityRow, (identity.issuer, identity.subject))
    user = None if row is None else session.get(UserRow, row.user)
    if user is not None and user.disabled:
        raise Forbidden("this account is disabled")
    return user


def add(
    session: Session,
    now: datetime,
    identity: Identity,
    settings: ProviderSettings,
    *,
    invitation: str,
    password: str,
) -> UserRow:
    """Add a newcomer who has an invitation, or a verified address of a domain that may come.

    password: a hash that nothing matches. Raises Forbidden for anybody else, BadInput for an invitation that
    does not count.
    """
    row = invitations.find(session, now, invitation) if invitation else None
    welcome = settings.domains.get(identity.address.rpartition("@")[2]) if identity.address else None
    if row is None and (welcome is None or session.get(ProjectRow, welcome.project) is None):
        raise Forbidden(NOT_KNOWN)
    by = f"oidc/{settings.issuer}"[:64]
    user = _named(session, now, identity, password, by=by)
    session.add(IdentityRow(issuer=identity.issuer, subject=identity.subject, user=user.id, since=now))
    audit.note(session, now, by=by, action="identity added", subject=f"user/{user.id}")
    if row is not None:
        invitations.redeem(session, now, row, user=user.id)
    elif welcome is not None:
        projects.set_role(session, now, project=welcome.project, user=user.id, role=welcome.role, by=by)
    return user


def _named(session: Session, now: datetime, identity: Identity, password: str, *, by: str) -> UserRow:
    """Add a person under the name that the provider gives them, or one like it where that is taken."""
    suffix = secrets.token_hex(4)
    wished = "".join(
        one for one in identity.name.lower() if one.isascii() and (one.isalnum() or one in "._+-")
    )
    wished = wished.lstrip("._+-")[:100]
    for name in filter(None, (wished, f"{wished}-{suffix}" if wished else f"person-{suffix}")):
        try:
            return users.add(session, now, name=users.check_name(name), password=password, by=by)
        except (AccountConflict, BadInput):
            continue
    raise AccountConflict("no name is free: try again")
