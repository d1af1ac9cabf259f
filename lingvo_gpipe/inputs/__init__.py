"""Input generators that need no download."""
