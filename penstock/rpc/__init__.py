"""Transport and identity of calls."""
