"""How a process lives: signals, the one retry loop, metrics, logs, health, traces."""
