"""One archive of a run that may leave the house: for an issue upstream."""
