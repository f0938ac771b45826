"""Publication of weights, and registration of the versions to keep."""
