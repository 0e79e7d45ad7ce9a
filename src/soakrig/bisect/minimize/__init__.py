"""From a run that faulted to the smallest load that still faults often enough to be useful."""
