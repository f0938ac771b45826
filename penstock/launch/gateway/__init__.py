"""`penstock gateway`: the command, the people and tokens of one, and what it is handed from above."""
