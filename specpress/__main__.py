"""`python -m specpress`, and the command `specpress`."""

import sys


def main() -> None:
    """Runs the command line; Ctrl-C while it is still being imported ends it in silence."""
    try:
        from specpress.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
