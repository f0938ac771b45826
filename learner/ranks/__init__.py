"""Several ranks of one learner: how they meet, how they communicate, and what rank 0 alone does."""
