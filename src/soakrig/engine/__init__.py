"""The bundled serving stack: the launcher and its keeper, and the embedded engine."""
