"""Jobs of this machine: trainings in the background, and the commands `penstock jobs`."""
