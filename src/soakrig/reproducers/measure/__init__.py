"""Measuring a change: two settings or two engines compared so that the answer holds, and one engine taken apart."""
