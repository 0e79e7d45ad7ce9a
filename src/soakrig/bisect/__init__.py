"""Which one variable causes an intermittent fault: what runs of arms support, and which arm to run next."""
