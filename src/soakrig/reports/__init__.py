"""What people read: the terminal report and the live view. Sees ``record`` only."""
