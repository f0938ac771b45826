"""Logs of tasks, a JSON line for each decision: what was seen, what was done, what became of it."""
