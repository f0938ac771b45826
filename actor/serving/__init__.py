"""The policy server: acts for environments that live in a gRPC client, and learns from what happens there."""
