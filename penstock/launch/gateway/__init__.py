"""`penstock gateway`: its commands, its people and tokens, its jobs, and the run behind a site."""
