"""What an actor makes of a run specification: its sections, its environments, its policy."""
