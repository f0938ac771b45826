"""What a policy would have earned, estimated from what another policy did. Knows arrays only."""
