"""The goals of the simulated host, in the order of the actions of `Goals-v0`; action 0 is to do nothing."""

from typing import Final

NOTHING: Final = "nothing"
GOALS: Final = (
    "rotate_logs",
    "archive_logs",
    "clear_cache",
    "compact_memory",
    "restart_service",
    "reinstall_service",
    "shed_load",
    "add_workers",
    "check_disks",
    "write_report",
)
ACTIONS: Final = (NOTHING, *GOALS)
