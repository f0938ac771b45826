"""MinAtar's games under their ids of Gymnasium, such as `MinAtar/Breakout-v1` (Young and Tian 2019)."""

from minatar.gym import register_envs

register_envs()
