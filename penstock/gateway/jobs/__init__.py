"""Trainings that people ask for: their queue, and the dispatcher that has them run and sees them end."""
