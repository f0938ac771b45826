"""Format bytes and seconds for people."""

from typing import Final

_MIB: Final = 1024 * 1024
_GIB: Final = 1024 * _MIB
_MINUTE_S: Final = 60
_HOUR_S: Final = 3600


def size(count: float) -> str:
    """Return bytes as text."""
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / _MIB:.1f} MiB"


def span(seconds: float) -> str:
    """Return seconds as text, in the largest two units that they fill."""
    if seconds < 2 * _MINUTE_S:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if seconds < 2 * _HOUR_S:
        return f"{whole // _MINUTE_S} min {whole % _MINUTE_S} s"
    return f"{whole // _HOUR_S} h {whole % _HOUR_S // _MINUTE_S} min"
