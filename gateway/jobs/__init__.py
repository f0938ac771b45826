"""Trainings that people ask for: their queue, and the desk that has them run and sees them end."""
