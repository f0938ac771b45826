"""What algorithms of several families use: advantages, losses, schedules, scales, groups of ranks."""
