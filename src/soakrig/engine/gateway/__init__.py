"""The gateway: between clients and an engine. It repairs what clients leave out, and says when the engine is dead."""
