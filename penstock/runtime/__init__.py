"""The life of a process: signals, the one retry loop, metrics, logs, health."""
