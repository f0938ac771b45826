"""Generated from protos/penstock/v1 by protos/generate.py; do not edit."""
