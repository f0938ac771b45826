"""Hooks of schemathesis (SCHEMATHESIS_HOOKS): who calls signs in anew before the session's token ends."""

import os
from typing import Any, Final

import httpx2
import schemathesis

URL: Final = "PENSTOCK_TEST_GATEWAY"
"""In the environment: the address of the gateway."""
PASSWORD: Final = "PENSTOCK_TEST_PASSWORD"  # noqa: S105 - the name of a variable
NAME: Final = "ada"
ELSEWHERE: Final = "192.0.2.1"
"""Where she signs in from: generated sign-ins use up the attempts of the address that all calls come from."""


@schemathesis.auth(refresh_interval=300)
class SignedIn:
    """A token lives for a quarter of an hour, and all calls together take longer."""

    def get(self, case: Any, context: Any) -> str:
        form = {"grant_type": "password", "username": NAME, "password": os.environ[PASSWORD]}
        headers = {"X-Forwarded-For": ELSEWHERE}
        reply = httpx2.post(f"{os.environ[URL]}/api/auth/token", data=form, headers=headers, timeout=60)
        reply.raise_for_status()
        return str(reply.json()["access_token"])

    def set(self, case: Any, data: str, context: Any) -> None:
        case.headers["Authorization"] = f"Bearer {data}"
