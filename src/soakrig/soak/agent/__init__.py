"""The coding agent that the load imitates: its tools, what they return, and how its conversations grow."""
