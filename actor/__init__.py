"""Actors: everything that acts, cuts fragments and sends them; needs only a broker's address."""
