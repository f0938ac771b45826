"""Episodes whose environment lives in a client, and the segments that they are cut into."""
