"""Serves the page: in the foreground for `penstock ui`, in a thread for `penstock train --ui`.

It uses plain HTTP, so it binds to loopback unless `--insecure` is given. In the foreground it admits one
browser, by the secret in the URL that it prints. With `--ui` it runs in a thread of the launcher: a failure
of the page does not affect the run.
"""

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from penstock.config.configuration_error import how_to_install
from penstock.config.settings import ConfigurationError
from penstock.launch.ui.catalogue import Catalogue
from penstock.rpc.address import AddressInUse, is_local
from penstock.runtime.exit import EXIT_INTERRUPTED, EXIT_OK
from penstock.runtime.lifecycle import Lifecycle

BESIDE_A_RUN: Final = "127.0.0.1:0"

log = logging.getLogger(__name__)


class Page:
    """The page of a folder of runs, on a socket that is bound when this is made.

    for_one: admit one browser, by the secret in its URL. state: folder for trainings that are started here;
    None: the page is read-only.

    Raises ConfigurationError for an address that is taken, or beyond loopback without `insecure`, and where
    the extra `ui` is not installed.
    """

    def __init__(
        self,
        folder: Path,
        address: str,
        *,
        insecure: bool,
        for_one: bool = False,
        state: Path | None = None,
    ) -> None:
        try:
            import uvicorn  # noqa: F401 - the first that is absent without the extra

            from penstock.gateway.frame.envelope import Doors
            from penstock.gateway.http_server import HttpServer, check_listen
            from penstock.launch.ui.application import PARAMETER, Admission, make_app
            from penstock.launch.ui.run_starter import RunStarter
        except ImportError as error:
            raise ConfigurationError(f"no page without its extra: {error}; {how_to_install('ui')}") from error
        check_listen(address, encrypted=False, insecure=True)
        if not insecure and not is_local(address):
            raise ConfigurationError(
                f"--listen {address}: beyond loopback anybody could read the page, it has no authentication; "
                "forward a port (ssh -L), or say --insecure"
            )
        admission = Admission() if for_one else None
        app = make_app(
            Catalogue(folder),
            doors=Doors(any_host=not is_local(address), large=frozenset()),
            admission=admission,
            starter=None if state is None else RunStarter(folder.resolve(), state),
        )
        try:
            # The launcher's own logging stays as it is: lines of a web server are no lines of a run.
            self._server = HttpServer(app, address, insecure=True, log_level="warning")
        except AddressInUse as error:
            raise ConfigurationError(str(error)) from error
        self.url = f"{self._server.url}/"
        self.entry = self.url if admission is None else f"{self.url}?{PARAMETER}={admission.secret}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.stop()


def main(folder: Path, address: str, *, insecure: bool) -> int:
    """Run `penstock ui` on a folder that holds runs, or is one; returns the exit code.

    Raises ConfigurationError as `Page` does.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"{folder}: no such folder; name the one that holds runs, as `runs`")
    lifecycle = Lifecycle("ui")
    lifecycle.install()
    state = state_folder() if is_local(address) and os.access(folder, os.W_OK) else None
    with Page(folder, address, insecure=insecure, for_one=True, state=state) as page:
        sys.stdout.write(f"{page.entry}\n")
        sys.stdout.flush()
        lifecycle.draining.wait()
    return EXIT_INTERRUPTED if lifecycle.interrupted else EXIT_OK


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the state folder of the page by the XDG specification, which ignores relative paths."""
    state = Path(environ.get("XDG_STATE_HOME", ""))
    return (state if state.is_absolute() else Path.home() / ".local" / "state") / "penstock" / "ui"
