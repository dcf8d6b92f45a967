"""Which pages of the documentation are read as one story."""

CHAPTERS = ("docs/train/csv-to-adapter.md", "docs/learn/chat-model.md", "docs/train/recipes.md")
"""Their commands depend on each other and on the files of the page: ``tests/test_chapters.py`` runs them in order."""
