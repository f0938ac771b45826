"""Feedback on responses: read from where it lies, checked row by row, normalised, split by prompt."""
