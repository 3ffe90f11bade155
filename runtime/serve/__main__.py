"""`python -m runtime.serve`."""

from runtime.serve.command import app

if __name__ == "__main__":
    app()
