"""The processes of one run on this machine, from plan to summary."""
