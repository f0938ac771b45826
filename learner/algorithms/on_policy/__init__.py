"""PPO, IMPALA and REINFORCE: each batch is learned from while it is fresh."""
