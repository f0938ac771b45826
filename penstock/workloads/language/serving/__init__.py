"""Text that is served: answers to messages, conversations, and what of them is learned from."""
