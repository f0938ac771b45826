"""Trackers of experiments: the lines of `metrics.jsonl` once more, in formats that other tools read."""
