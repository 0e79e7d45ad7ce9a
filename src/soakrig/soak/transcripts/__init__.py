"""Recorded loads: one module for each format that a transcript may have, and what hides the people in it."""
