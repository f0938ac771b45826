"""The learner's side: REINFORCE of thoughts, rewarded by what the answer gains from them."""
