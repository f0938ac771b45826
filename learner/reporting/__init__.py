"""What a run leaves to read: metrics, evidence, trackers."""
