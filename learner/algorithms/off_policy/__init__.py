"""DQN and SAC: transitions are kept and learned from again."""
