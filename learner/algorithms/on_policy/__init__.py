"""PPO, IMPALA and REINFORCE: each batch is learned from while it is fresh.

on_policy       the frame of an update, which keeps everything or puts everything back
preparation     what is computed once per batch
reward_scale    rewards divided by the deviation of the return
gradient_steps  one minibatch: losses, gradient, optimiser
update_metrics  metrics, and whether an update may be kept
ppo             epochs of minibatches, clipped
impala          V-trace
reinforce       returns
"""
