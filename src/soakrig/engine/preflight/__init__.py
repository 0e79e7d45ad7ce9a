"""Preflights: what would make a launch fail or hurt the host, found before anything is started."""
