"""What rollouts, evaluations and policy servers act with: environments, rewards, a policy, headers."""
