"""DQN and SAC: algorithms that keep transitions in replay and learn from each several times."""
