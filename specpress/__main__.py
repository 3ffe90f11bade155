"""`python -m specpress`: the same as the command `specpress`."""

from specpress.cli import main

if __name__ == "__main__":
    main()
