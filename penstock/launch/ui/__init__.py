"""What the page of one person is handed: runs of a folder, a starter of trainings, and the socket."""
