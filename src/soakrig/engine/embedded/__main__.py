"""``python -m soakrig.engine.embedded``: start the embedded engine. Exit status: 0, or that of the error."""

from __future__ import annotations

import sys

from soakrig.errors import SoakrigError


def main(argv: list[str]) -> int:
    from .flags import parse_flags
    from .server import run
    from .settings import Settings

    try:
        run(parse_flags(argv), Settings.from_environment())
    except SoakrigError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
