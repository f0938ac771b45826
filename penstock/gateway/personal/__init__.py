"""The gateway of one person: runs of a folder, for a browser that was let in; no accounts, no database."""
