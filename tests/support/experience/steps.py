"""Transitions of a fragment as a policy reads them, without a replay memory."""

from penstock.learner.algorithms.off_policy.memory import Steps, Transitions
from penstock.policy.recurrent import FrameStack


def read(steps: Steps, stack: FrameStack) -> Transitions:
    before, after = (
        {path: frames[rows] for path, frames in steps.frames.items()} for rows in (steps.before, steps.after)
    )
    return Transitions(stack.row(before), steps.action, steps.reward, steps.discount, stack.row(after))
