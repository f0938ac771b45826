"""Passwords of people, as argon2id with the parameters of RFC 9106 for 64 MiB of memory.

At most two hashes are computed at once in a process, so that a flood of sign-ins takes 128 MiB and no more.
"""

import contextlib
import threading
from typing import Final

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError, VerifyMismatchError
from argon2.profiles import RFC_9106_LOW_MEMORY

from penstock.gateway.accounts.account_errors import BadInput

MIN_LENGTH: Final = 12
MAX_LENGTH: Final = 256
_AT_ONCE: Final = threading.BoundedSemaphore(2)

_hasher = PasswordHasher.from_parameters(RFC_9106_LOW_MEMORY)
_nobodys = _hasher.hash("of no account")


def hash_password(password: str, *, name: str) -> str:
    """Return the encoded hash of a new password; raises BadInput as `check_password` does."""
    check_password(password, name=name)
    with _AT_ONCE:
        encoded: str = _hasher.hash(password)
    return encoded


def check_password(password: str, *, name: str) -> None:
    """Raise BadInput for a new password that is too easily guessed.

    name: of the account, which the password may not contain.
    """
    if not MIN_LENGTH <= len(password) <= MAX_LENGTH:
        raise BadInput("password", f"must have {MIN_LENGTH} to {MAX_LENGTH} characters")
    if name.lower() in password.lower() or len(set(password)) < MIN_LENGTH // 2:
        raise BadInput("password", "must not contain the account's name nor repeat few characters")


def is_password(encoded: str | None, password: str) -> bool:
    """Return whether a password is that of the encoded hash; takes as long where there is none (None).

    Where a hash cannot be read, no password is its own: such a person has a new one set by the operator.
    """
    if len(password) > MAX_LENGTH:
        return False
    with _AT_ONCE:
        try:
            _hasher.verify(encoded or _nobodys, password)
        except VerifyMismatchError:
            return False
        except (InvalidHashError, VerificationError):
            with contextlib.suppress(VerifyMismatchError):
                _hasher.verify(_nobodys, password)  # an account must not be told from none by the time
            return False
    return bool(encoded)
