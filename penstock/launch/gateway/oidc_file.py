"""The file that names a provider of identities (`penstock gateway --oidc FILE`).

issuer = "https://accounts.example"            # exactly as its tokens say it
client_id = "penstock"
client_secret_file = "/run/secrets/oidc"       # beside this file, where it is relative
gateway = "https://gateway.example"            # where browsers reach the gateway
title = "Example"

[domains."example.com"]                        # who has a verified address of it may come uninvited
project = "alpha"
role = "viewer"
"""

import tomllib
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.accounts.account_errors import BadInput
from penstock.gateway.accounts.oidc_provider import Newcomers, ProviderSettings, is_safe
from penstock.gateway.accounts.projects import check_project
from penstock.gateway.store.tables import Role

_OTHERS: Final = 0o077


class _Newcomers(BaseModel):
    model_config = ConfigDict(extra="forbid")

    project: str
    role: Role = Role.VIEWER


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    issuer: Annotated[str, Field(max_length=256)]
    client_id: Annotated[str, Field(min_length=1, max_length=256)]
    client_secret_file: Path
    gateway: Annotated[str, Field(max_length=256)]
    title: Annotated[str, Field(min_length=1, max_length=64)] = "single sign-on"
    domains: dict[str, _Newcomers] = Field(default_factory=dict)


def read_provider(file: Path) -> ProviderSettings:
    """Return the provider that a file names; raises ConfigurationError that names what is wrong in it."""
    try:
        said = _File.model_validate(tomllib.loads(file.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigurationError(
            f"--oidc {file}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--oidc {file}: cannot be read as TOML: {error}") from error
    for name, url in (("issuer", said.issuer), ("gateway", said.gateway)):
        if not is_safe(url):
            raise ConfigurationError(f"--oidc {file}: {name}: use https://, or http:// on this machine alone")
    return ProviderSettings(
        issuer=said.issuer,
        client_id=said.client_id,
        client_secret=_secret(file.parent / said.client_secret_file),
        gateway=said.gateway,
        title=said.title,
        domains={name.lower(): _newcomers(file, name, one) for name, one in said.domains.items()},
    )


def _newcomers(file: Path, domain: str, one: _Newcomers) -> Newcomers:
    try:
        project = check_project(one.project)
    except BadInput as error:
        raise ConfigurationError(f"--oidc {file}: domains.{domain}.project: {error}") from error
    if one.role is Role.OWNER:
        raise ConfigurationError(f"--oidc {file}: domains.{domain}.role: viewer or editor, owners are named")
    return Newcomers(project=project, role=one.role)


def _secret(file: Path) -> str:
    try:
        if file.stat().st_mode & _OTHERS:
            raise ConfigurationError(
                f"client_secret_file={str(file)!r}: others may read it; chmod 600 it, and renew the secret"
            )
        found = file.read_text().strip()
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"client_secret_file={str(file)!r}: the client's secret cannot be read: {error}"
        ) from error
    if not found:
        raise ConfigurationError(
            f"client_secret_file={str(file)!r}: is empty; write the client's secret into it"
        )
    return found
