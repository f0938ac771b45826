"""Replay: transitions of the log's newest fragments in the learner's memory, to be sampled many times."""
