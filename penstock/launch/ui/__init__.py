"""The page of one person: runs of a folder live, and a form that starts trainings; no accounts."""
