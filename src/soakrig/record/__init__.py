"""What a run leaves on disk, and the judgement of it: events, verdict, gates, store, redaction."""
