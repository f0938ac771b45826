"""Keeps progress bars and warnings that transformers writes to stderr away from our logs."""

import warnings

from transformers.utils import logging


def quieten() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
