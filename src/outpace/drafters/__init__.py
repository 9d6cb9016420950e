"""Drafters: cheap guesses at what the target will say. Each is one file behind the contract in `base`."""
