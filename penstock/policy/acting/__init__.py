"""Acting without torch: how actions are drawn, forward passes in numpy, and the policy made of both."""
