"""`python -m launch.cli` is the `penstock` command."""

from launch.cli.app import main

main()
