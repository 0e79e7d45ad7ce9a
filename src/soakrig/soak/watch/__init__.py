"""The watchers: kernel log, NVML, processes, engine log, metrics. Each polls one source in a thread of its own."""
