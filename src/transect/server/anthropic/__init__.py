"""Anthropic's messages API. ``protocol``: bodies. ``messages``: the route."""
