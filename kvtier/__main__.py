"""`python -m kvtier`, and `kvtier`: see `kvtier.cli`."""

import sys


def main() -> int:
    """Run a command; Ctrl-C ends in a line, also while the commands are still being imported."""
    try:
        from kvtier.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        print("kvtier: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
