"""The files and figures that a run leaves: metrics, evidence, trackers."""
