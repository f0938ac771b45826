"""Command line, local launcher and supervisor, and what looks at a run."""
