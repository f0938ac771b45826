"""Publication of weights, and the versions that are kept."""
