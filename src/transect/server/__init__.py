"""The OpenAI-compatible HTTP server around an ``AsyncEngine``.

* ``process``: bind, serve, drain on SIGTERM, end with the engine. ``hand_over``: the socket's way to a successor.
* ``app``: the table of routes.
* ``http/``: connections, limits, bodies, errors, streams.
* ``openai/``, ``anthropic/``, ``retrieval/``: the APIs. ``operations/``: metrics, health, logs and operators' routes.
* ``page/``: the page at ``/``.

The APIs share:

* ``options``: the settings. ``serving``: the server's state. ``sender``: the user behind a request, and its model.
* ``adapters``: adapters that requests choose by name. ``releases``: released names that stand for weighted versions.
* ``capture/``: requests and answers kept with consent, and feedback on them. ``watching``: a request as both see it.
* ``prompts``: chat templates and tokenizers. ``rendering``, ``encoding``: both in bounded time.
* ``generation``: the engine requests behind one HTTP request. ``beams``: those of a beam search.
  ``searching``: those of a test-time search; ``searches``: its judges and settings.
* ``structured``: the form of an answer. ``answers``: its thoughts, text and tool calls, whole or in pieces.
  ``blocks``: an answer as a list of items, for responses and messages.

Nothing here imports torch: HTTP, text and JSON live in this process, tensors in the engine's.
"""
