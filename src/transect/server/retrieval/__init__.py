"""Embeddings, scores and reranking. ``protocol``: bodies and answers. ``routes``: the routes."""
