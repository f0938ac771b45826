"""Keeps what transformers writes to stderr by itself away from our logs.

It writes progress bars, and warnings to its own developers.
"""

import warnings

from transformers.utils import logging


def quieten() -> None:
    """For the life of this process."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
