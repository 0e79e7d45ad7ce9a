"""vLLM as the bundled engine: a tiny checkpoint for it."""
