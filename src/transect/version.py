"""The version of this project. It stands alone in a file so that every level can import it."""

__version__ = "0.2.0"
