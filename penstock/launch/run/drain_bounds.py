"""By when the services of each stage of a drain shall be gone, in order, in seconds since it began."""

from collections.abc import Mapping
from typing import Final

from penstock.actor.serving.experience.drain_bounds import SERVER_GONE_S
from penstock.launch.run.child_process import DrainStage

_ACTING_S: Final = 4.0
_BEHIND_S: Final = {DrainStage.LEARNER: 7.0, DrainStage.BROKER: 8.5, DrainStage.REDIS: 10.5}
"""Since the stages before the learner's are over."""


def gone_by(*, serves: bool) -> Mapping[DrainStage, float]:
    """Return the bounds of a run. serves: it has services between actors and learner, which may flush."""
    before = _ACTING_S + (SERVER_GONE_S if serves else 0.0)
    behind = {stage: before + after for stage, after in _BEHIND_S.items()}
    return {DrainStage.ACTING: _ACTING_S, DrainStage.SERVING: before, **behind}
