"""How a process lives: settings, signals, the one retry loop, metrics, logs, health."""
