"""A served model: its supervisor, the processes that it is made of, its state, and what it leaves behind."""
