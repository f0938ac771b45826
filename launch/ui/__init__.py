"""A page that shows runs in a browser; it reads and never steers."""
