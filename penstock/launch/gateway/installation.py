"""What an operator does once for gateways that share a database: tables and keys."""

import sys
from pathlib import Path

from penstock.config.run_folder import keep_private
from penstock.gateway.accounts.sessions import make_keys as write_keys
from penstock.gateway.accounts.sessions import read_keys
from penstock.gateway.process import Places, open_accounts_database, open_registry
from penstock.runtime.exit import EXIT_OK


def migrate(places: Places) -> int:
    """Make the tables of both databases; returns the exit code. Raises ConfigurationError, Fatal."""
    keep_private()
    if not (places.database and places.registry):
        places.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    for opened in (open_accounts_database(places), open_registry(places)):
        opened.close()
    sys.stdout.write("the tables are up to date\n")
    return EXIT_OK


def make_keys(file: Path) -> int:
    """Write keys, unless the file is there; returns the exit code. Raises ConfigurationError, OSError."""
    try:
        write_keys(file)
    except OSError as error:  # it names a file beside this one, which becomes this one
        raise OSError(error.errno, error.strerror, str(file)) from error
    read_keys(file)
    return EXIT_OK
