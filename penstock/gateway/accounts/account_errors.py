"""What the accounts refuse. Messages say what to do, not whether an account or a project exists."""


class AccountError(Exception):
    """Base of all refusals of this package."""


class BadInput(AccountError):
    """Reports a value that cannot be used. field: the name under which it came."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Unauthenticated(AccountError):
    """Reports that what was presented belongs to no account."""


class Forbidden(AccountError):
    """Reports that the caller's role does not suffice."""


class NoSuchThing(AccountError):
    """Reports that there is no such thing, or none that the caller may know of."""


class AccountConflict(AccountError):
    """Reports that the state does not admit the change."""


class QuotaReached(AccountError):
    """Reports that a project has all that it may have of something."""


class TooManyAttempts(AccountError):
    """Reports that signing in was tried too often. wait_s: seconds after which it may be tried again."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"signing in was tried too often: wait {wait_s:.0f} s")
        self.wait_s = wait_s
