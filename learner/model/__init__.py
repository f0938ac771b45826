"""What a run learns with, made from its settings."""
