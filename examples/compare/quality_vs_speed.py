"""Every built-in recipe on the embedded pair: size, quality and speed in one table and one plot.

    .venv/bin/python examples/compare/quality_vs_speed.py

compress.sweep with defaults; it takes the same options, and goes on where it was cut short.
"""

import sys

from compress.sweep import app

DEFAULTS = {"--recipes": "all", "--out": "runs/quality_vs_speed"}

if __name__ == "__main__":
    given = {word.partition("=")[0] for word in sys.argv[1:]}
    app([*sys.argv[1:], *(word for option in DEFAULTS.items() if option[0] not in given for word in option)])
