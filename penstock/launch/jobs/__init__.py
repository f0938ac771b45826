"""Trainings that go on in the background: jobs of this machine, and the commands `penstock jobs`."""
