"""Which pages of the documentation are read as one story."""

CHAPTERS = ("docs/csv-to-adapter.md", "docs/chat-model.md", "docs/recipes.md")
"""Their commands depend on each other and on the files of the page: ``tests/test_chapters.py`` runs them in order."""
