"""What a process is configured with."""
