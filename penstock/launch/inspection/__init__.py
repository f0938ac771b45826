"""The state of a run, measured from outside and never steered, for the terminal and the browser alike."""
