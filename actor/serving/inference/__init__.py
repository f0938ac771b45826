"""Forward passes: many requests, one version."""
