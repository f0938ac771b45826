"""Gymnasium spaces as data: `penstock.protocol.spaces` says which kinds a fragment can carry."""

from gymnasium import spaces as gym_spaces

from penstock.config.settings import ConfigurationError
from penstock.protocol import spaces as wire_spaces
from penstock.protocol.limits import MAX_MESSAGE_BYTES
from penstock.protocol.spaces import Space


def to_space(field: str, space: gym_spaces.Space) -> Space:  # type: ignore[type-arg]
    """The space as data; raises ConfigurationError that names `field`, the space and what works."""
    match space:
        case gym_spaces.Box():
            return _box(field, space)
        case gym_spaces.Discrete():
            return wire_spaces.Discrete(int(space.n), int(space.start))
        case gym_spaces.MultiDiscrete():
            return _multi_discrete(field, space)
        case gym_spaces.MultiBinary() if isinstance(space.n, int):
            return wire_spaces.MultiBinary(space.n)
        case gym_spaces.Dict():
            parts = space.spaces.items()
            return wire_spaces.Dict(tuple((_key(field, k), to_space(f"{field}/{k}", v)) for k, v in parts))
        case gym_spaces.Tuple():
            return wire_spaces.Tuple(
                tuple(to_space(f"{field}/{index}", part) for index, part in enumerate(space.spaces))
            )
        case _:
            raise _unsupported(field, space)


def _box(field: str, space: gym_spaces.Box) -> Space:
    if space.low.nbytes > MAX_MESSAGE_BYTES:
        raise ConfigurationError(
            f"{field}: a Box of shape {space.shape} and {space.dtype} has {space.low.nbytes} bytes, "
            f"a message holds {MAX_MESSAGE_BYTES}; make it smaller in the environment"
        )
    try:
        return wire_spaces.Box(space.low.copy(), space.high.copy())
    except ValueError as error:
        raise ConfigurationError(f"{field}={space}: {error}") from error


def _multi_discrete(field: str, space: gym_spaces.MultiDiscrete) -> Space:
    if space.nvec.ndim != 1 or space.start.any():
        raise ConfigurationError(
            f"{field}={space}: one axis that starts at 0 is supported; wrap the environment"
        )
    return wire_spaces.MultiDiscrete(tuple(int(n) for n in space.nvec))


def _key(field: str, key: object) -> str:
    # Keys become parts of tensor names, where "/" separates.
    if not isinstance(key, str) or not key or "/" in key:
        raise ConfigurationError(
            f"{field}: key {key!r} is no text, is empty or holds '/'; rename it in the environment"
        )
    return key


def _unsupported(field: str, space: object) -> ConfigurationError:
    return ConfigurationError(
        f"{field}={space}: not supported; use Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple "
        "(a wrapper of gymnasium.wrappers may convert it)"
    )
