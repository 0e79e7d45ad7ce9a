"""``python -m soakrig`` is ``soak``."""

from soakrig.cli.main import soak

if __name__ == "__main__":
    soak()
