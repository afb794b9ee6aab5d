"""`python -m kvtier`, and `kvtier`: see `kvtier.cli`."""

import os
import sys
import warnings

_OTHERS = warnings.formatwarning


def main() -> int:
    """Run a command; Ctrl-C ends in a line, also while the commands are still being imported."""
    warnings.formatwarning = _sentence
    try:
        from kvtier.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        print("kvtier: interrupted", file=sys.stderr)
        return 130


def _sentence(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """A warning of kvtier's as its errors are: a user of a command has no line of code to change."""
    if filename.startswith(os.path.dirname(os.path.abspath(__file__)) + os.sep):
        from kvtier.cli.arguments import with_flags

        return f"kvtier: {with_flags(str(message))}\n"
    return str(_OTHERS(message, category, filename, lineno, line))


if __name__ == "__main__":
    sys.exit(main())
