"""The page of one person, without accounts: live runs of a folder, and a form that starts trainings."""
