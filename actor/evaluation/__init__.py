"""Evaluation actors: whole episodes are played to measure a version."""
