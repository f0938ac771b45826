"""The registry of policy versions."""

from pathlib import Path
from typing import Annotated

from penstock.config.sections.section import ADVANCED, PositiveReal, Section


class RegistrySection(Section):
    """Which versions of a policy are kept, and where they are recorded."""

    url: str = ""
    """sqlite:///FILE or postgresql://USER@HOST/DATABASE, the password in `registry.password_file`, PGPASSWORD
    or a passfile; empty: `registry.sqlite` in the run's folder."""
    password_file: Path | None = None
    """File with the password of the registry's user; none: libpq looks for it."""
    activate_first: bool = True
    """The first best or last version becomes active where none is, and the best one when the run ends, unless
    an operator has decided by then; false: an operator promotes, and clients follow the learner until then.
    `penstock train --serve` means false unless it is said."""
    refresh_s: Annotated[PositiveReal, ADVANCED] = 1.0
    """A policy server reads versions and traffic again after this long, in seconds."""
