"""Several ranks of one learner: how they meet, what they say to one another, and what rank 0 alone does."""
