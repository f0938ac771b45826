"""The API of prompts over HTTP: `penstock gateway prompts`, port 8765. Nothing here loads torch."""
