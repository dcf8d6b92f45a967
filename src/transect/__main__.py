"""``python -m transect`` is the ``transect`` command."""

from transect.cli import main

if __name__ == "__main__":
    main()
