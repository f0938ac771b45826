"""Readings of this machine, by psutil, which the extra `launch` brings."""

import os
import time
from pathlib import Path

from penstock.config.configuration_error import ConfigurationError
from penstock.config.extras import how_to_install
from penstock.workloads.goals.executors.executor import Readings


def read_host(folder: Path) -> Readings:
    """Return the load of this host and of the disk that holds `folder`.

    Raises ConfigurationError where psutil is not installed.
    """
    try:
        import psutil  # noqa: PLC0415 - an extra brings it
    except ImportError as error:
        raise ConfigurationError(f"reading this host needs psutil: {how_to_install('launch')}") from error
    now = time.localtime()
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return Readings(
        cpu=min(load, 1.0),
        memory=psutil.virtual_memory().percent / 100,
        disk=psutil.disk_usage(str(folder)).percent / 100,
        processes=len(psutil.pids()) / 100,
        day=(now.tm_hour * 60 + now.tm_min) / 1440,
        weekday=now.tm_wday / 7,
    )
