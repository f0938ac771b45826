"""The versions that can answer, what answers when none can, and what a shadow would have said."""
