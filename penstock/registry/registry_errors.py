"""Errors of the registry. Each message names the field, the value and the remedy.

    RegistryError                 base of all
      UnknownVersion  LookupError the registry holds no such version
      NotAllowed      ValueError  the version's status, or what serves it, does not admit the change
      DifferentBytes  ValueError  the number is taken by a version with another sha256
      TooManyPinned   ValueError  a policy keeps MAX_PINNED versions already
      NoRoom          ValueError  a project has as many ratings, or as much text in them, as it may have
      Conflict        ValueError  another caller changed the same policy meanwhile: read again, then decide
      SchemaMismatch  ValueError  the database has no tables, or those of another revision
      Unavailable     OSError     the database does not answer: serve what is loaded, try again later

A field that is wrong in itself (a share of 1.5, a name with a space) is a plain ValueError.
"""


class RegistryError(Exception):
    """Base of all errors of the registry."""


class UnknownVersion(RegistryError, LookupError):
    """Reports that the registry holds no such version."""


class NotAllowed(RegistryError, ValueError):
    """Reports that the version's status, or what serves it, does not admit the change."""


class DifferentBytes(RegistryError, ValueError):
    """Reports that the number already names other weights: numbers are never reused."""


class TooManyPinned(RegistryError, ValueError):
    """Reports that a policy keeps as many versions as it may."""


class NoRoom(RegistryError, ValueError):
    """Reports that a project would have more than it may. bound: `ratings` or `text_bytes`; most: of it."""

    def __init__(self, bound: str, most: int) -> None:
        super().__init__(f"the project may have {most} {bound} of ratings: delete some, or raise the bound")
        self.bound = bound


class Conflict(RegistryError, ValueError):
    """Reports that another caller changed the same policy at the same time."""


class SchemaMismatch(RegistryError, ValueError):
    """Reports tables that are absent or of another revision than this program's."""


class Unavailable(RegistryError, OSError):
    """Reports that the database does not answer."""
