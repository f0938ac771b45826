"""Modules and places that this process may use although a run specification names them."""

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from penstock.config.run_folder import read_whole
from penstock.config.settings import ConfigurationError, Settings
from penstock.config.workload import find, place_keys

_ELSEWHERE = True
"""Stands in a specification for a place of this machine that it does not name."""


def module_of(name: str) -> str:
    return name.rpartition(":")[0]


def check_trusted(key: str, name: str, allowed: Collection[str]) -> None:
    module = module_of(name)
    if module and module not in allowed:
        raise ConfigurationError(
            f"{key}={name!r}: the run asks this process to import {module!r}; "
            f"say --set 'actor.allow_modules=[\"{module}\"]' if you trust it"
        )


def without_places(
    arguments: Mapping[str, Any], keys: Collection[str], unsent: Collection[str]
) -> dict[str, Any]:
    """Return arguments for other machines: True for each place in `keys`, and without `unsent`."""
    return {
        key: _ELSEWHERE if key in keys and value else value
        for key, value in arguments.items()
        if key not in unsent
    }


def placed(
    section: str, arguments: Mapping[str, Any], keys: Collection[str], places: Mapping[str, str]
) -> dict[str, Any]:
    """Return the arguments of a specification, with those under `keys` from `places` of this process."""
    missing = sorted(key for key in keys if arguments.get(key) and key not in places)
    if missing:
        key = missing[0]
        raise ConfigurationError(
            f"{section}.{key}: places are not taken from a run's specification; say where this machine has "
            f"it with --set 'actor.places.{key}=\"…\"'"
        )
    return {**arguments, **{key: places[key] for key in keys if arguments.get(key)}}


def places_of(settings: Settings) -> dict[str, str]:
    """Return `actor.places` for this machine's actors: the places of the run, and those set over them."""
    named = {**settings.policy.kwargs, **settings.environment.kwargs}
    keys = place_keys(settings.workload, settings.environment.id)
    return {key: str(named[key]) for key in keys if named.get(key)} | settings.actor.places


# ---- Whether this user made a run's folder, so that its modules and places may be used.

SEAL_FILE: Final = "seal"
_KEY_FILE: Final = "penstock/seal.key"
_KEY_BYTES: Final = 32
_FUNCTION: Final = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")
"""A place that is `module:function`."""

log = logging.getLogger(__name__)


def seal(run_dir: Path, settings: Settings) -> None:
    """Mark the folder as made by this user with these settings, where they name modules or places."""
    modules, places = modules_of(settings), places_beyond(run_dir, settings)
    file = run_dir / SEAL_FILE
    if not modules and not places:
        file.unlink(missing_ok=True)
        return
    try:
        file.write_text(_code(_key(), run_dir, modules, places) + "\n")
    except OSError as error:
        log.warning(
            "the folder is not marked as trusted: commands on it will require --trust",
            extra={"why": str(error)},
        )


def check_own(
    run_dir: Path,
    settings: Settings,
    allowed: Collection[str],
    remedy: str = "say --trust if you trust its maker",
    *,
    allowed_places: Collection[str] = (),
) -> None:
    """Raise ConfigurationError for a folder of others that names modules or places beyond itself.

    allowed, allowed_places: modules and places that the caller has named, too.
    """
    modules, places = modules_of(settings), places_beyond(run_dir, settings)
    foreign = modules if set(modules) - set(allowed) else ()
    beyond = places if set(places) - set(allowed_places) else ()
    if not (foreign or beyond) or _is_sealed(run_dir, modules, places):
        return
    named = [f"modules to be imported: {', '.join(foreign)}"] if foreign else []
    named += [f"places outside of it: {', '.join(beyond)}"] if beyond else []
    raise ConfigurationError(f"{run_dir}: was not made here, and names {' and '.join(named)}; {remedy}")


def check_places(run_dir: Path, settings: Settings, remedy: str) -> None:
    """Raise ConfigurationError as `check_own` does, for a command that imports no module of the run."""
    check_own(run_dir, settings, modules_of(settings), remedy)


def places_beyond(run_dir: Path, settings: Settings) -> tuple[str, ...]:
    """Return the files and URLs beyond the folder that commands would write to or send secrets to."""
    security = settings.security
    files = (
        security.token_file,
        security.redis_password_file,
        security.http_headers_file,
        settings.registry.password_file,
        settings.serving.shadow_record,
        settings.actor.ack_journal,
        settings.learner.record,
    )
    own = run_dir.resolve()
    found = {str(file) for file in files if file and not file.resolve().is_relative_to(own)}
    called = (settings.registry.url, *places_of(settings).values())
    return tuple(sorted(found | {place for place in called if "://" in place}))


def modules_of(settings: Settings) -> tuple[str, ...]:
    """Return the modules that a configuration imports, except those of the workload, sorted."""
    environment = settings.environment
    names = [environment.id, settings.policy.network, *(one.shape or "" for one in environment.reward)]
    names += [place for place in places_of(settings).values() if _FUNCTION.fullmatch(place)]
    own = module_of(find(settings.workload).generator).rpartition(".")[0]
    modules = {module_of(name) for name in names} | set(settings.actor.allow_modules)
    return tuple(sorted(name for name in modules if name and not name.startswith(f"{own}.")))


def _is_sealed(run_dir: Path, modules: tuple[str, ...], places: tuple[str, ...]) -> bool:
    try:
        found, key = read_whole(run_dir / SEAL_FILE).strip(), _key_file().read_bytes()
    except OSError:
        return False
    return hmac.compare_digest(found, _code(key, run_dir, modules, places).encode())


def _code(key: bytes, run_dir: Path, modules: tuple[str, ...], places: tuple[str, ...]) -> str:
    named = [*modules, *([list(places)] if places else [])]
    text = json.dumps([str(run_dir.resolve()), *named])
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _key() -> bytes:
    """Return this user's key, created at the first use; raises OSError."""
    file = _key_file()
    if not file.exists():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        temporary.touch(mode=0o600)
        temporary.write_bytes(secrets.token_bytes(_KEY_BYTES))
        try:
            os.link(temporary, file)  # does not replace the key of another launcher
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
    return file.read_bytes()


def _key_file() -> Path:
    """Return its path in the user's state folder (XDG); raises OSError for a user without a home."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():
        try:
            state = Path.home() / ".local" / "state"
        except RuntimeError as error:
            raise FileNotFoundError(str(error)) from error
    return state / _KEY_FILE
