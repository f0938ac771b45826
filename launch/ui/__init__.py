"""The page on which a person watches runs in a browser: reads, never steers."""
