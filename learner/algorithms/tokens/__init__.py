"""PPO and its relatives for language models: an action is a token."""
