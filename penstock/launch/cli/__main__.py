"""`python -m penstock.launch.cli` is the `penstock` command."""

from penstock.launch.cli.app import main

main()
