"""What a run is doing, measured from outside: for the terminal and the browser alike. Reads, never steers."""
