"""What the registry refuses. Each message names the field, the value and the remedy.

    RegistryError                 everything here
      UnknownVersion  LookupError the registry holds no such version
      NotAllowed      ValueError  the version's status, or what serves it, does not admit the change
      DifferentBytes  ValueError  the number is taken by a version with another sha256
      TooManyPinned   ValueError  a policy keeps MAX_PINNED versions already
      Conflict        ValueError  somebody else changed the same policy at the same time: look, then decide again
      SchemaMismatch  ValueError  the database has no tables, older ones, or newer ones than this program knows
      Unavailable     OSError     the database does not answer: serve what is loaded, try again later

A field that is wrong in itself (a share of 1.5, a name with a space) is a plain ValueError.
"""


class RegistryError(Exception):
    """Base of everything that the registry refuses."""


class UnknownVersion(RegistryError, LookupError):
    """The registry holds no such version."""


class NotAllowed(RegistryError, ValueError):
    """The version's status, or what serves it, does not admit the change."""


class DifferentBytes(RegistryError, ValueError):
    """The number names other weights already: numbers are never reused."""


class TooManyPinned(RegistryError, ValueError):
    """A policy keeps as many versions as it may."""


class Conflict(RegistryError, ValueError):
    """Somebody else changed the same policy at the same time."""


class SchemaMismatch(RegistryError, ValueError):
    """The tables are not those that this program knows."""


class Unavailable(RegistryError, OSError):
    """The database does not answer."""
