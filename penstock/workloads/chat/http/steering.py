"""What those who look after a chat decide: which version answers, what counts, whether the loop goes on."""

from pathlib import Path
from typing import Any

from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.surface import ApiError, RunSettings
from penstock.registry.records import PolicyVersion, RegistryError, Unavailable, UnknownVersion
from penstock.registry.registry import Registry
from penstock.workloads.chat.http.chat_bodies import OfVersion, Reasoned, Weigh
from penstock.workloads.chat.loop import loop_state, served_judge


def promote(url: str, policy: str, body: OfVersion, by: str) -> dict[str, Any]:
    """Let a version answer everybody; raises ApiError. url, policy: of the registry. by: for the audit."""
    try:
        with Registry.open(url, migrate=True) as opened:
            return _shown(opened.promote(policy, body.version, body.reason, by=by))
    except RegistryError as error:
        raise _refused(error) from error


def roll_back(url: str, policy: str, body: OfVersion, by: str) -> dict[str, Any]:
    """Withdraw the canary, or the version that answers for the one before it.

    url, policy: of the registry. by: for the audit. Raises ApiError.
    """
    try:
        with Registry.open(url, migrate=True) as opened:
            done = opened.rollback(policy, body.reason, by=by, version=body.version)
    except RegistryError as error:
        raise _refused(error) from error
    return _shown(done.withdrawn)


def weigh(run: RunSettings, body: Weigh, by: str) -> dict[str, Any]:
    """Change what criteria count in the reward, from the next reward model on.

    Raises ApiError 409 where there is no loop, 422 for weights that cannot be.
    """
    folder = _loop_of(run)
    try:
        return {"weights": served_judge.weigh(folder, body.weights, body.reason, by)}
    except ConfigurationError as error:
        raise ApiError(422, str(error), field="weights") from error


def pause_loop(run: RunSettings, body: Reasoned, by: str) -> dict[str, Any]:
    """Have the loop of a run wait; raises ApiError 409 where there is none."""
    loop_state.pause(_loop_of(run), body.reason, by)
    return {"paused": True}


def resume_loop(run: RunSettings) -> dict[str, Any]:
    """Let the loop of a run go on; raises ApiError 409 where there is none."""
    loop_state.resume(_loop_of(run))
    return {"paused": False}


def abandon_round(run: RunSettings, body: Reasoned, by: str) -> dict[str, Any]:
    """Have the loop of a run give up the round that goes on; raises ApiError 409 where none does."""
    folder = _loop_of(run)
    try:
        return {"abandoned": loop_state.abandon(folder, body.reason, by)}
    except ConfigurationError as error:
        raise ApiError(409, str(error)) from error


def _loop_of(run: RunSettings) -> Path:
    folder = None if run.folder is None else loop_state.folder_of(run.folder)
    if folder is None or not folder.is_dir():
        raise ApiError(409, "there is no loop: start it with --learn, or `penstock chat loop run`")
    return folder


def _shown(version: PolicyVersion) -> dict[str, Any]:
    return {"version": version.version, "status": version.status.value}


def _refused(error: RegistryError) -> ApiError:
    match error:
        case UnknownVersion():
            return ApiError(404, str(error), field="version")
        case Unavailable():
            return ApiError(503, str(error), retry_s=1)
        case _:
            return ApiError(409, str(error), field="version")
