"""Planning without an engine: replays of routing traces, memory ledgers, and what each lever would buy."""
