"""The OpenAI-compatible HTTP server around an ``AsyncEngine``. In the order of a request:

* ``process.py``: bind, serve, drain on SIGTERM, end with the engine.
* ``app.py``: the routes, and nothing else.
* ``gate.py``: what every request passes first: counting, draining, API keys.
* ``body.py``: reading a JSON body, bounded while it arrives.
* ``protocol.py``: what clients may send. ``errors.py``: what they hear when they sent something else.
* ``prompts.py``: chat template and tokenizer. ``generation.py``: the engine requests behind one HTTP request.
* ``structured.py``: the form that an answer shall have. ``answers.py``: its thoughts, text and calls, whole or in
  pieces.
* ``responses.py``, ``messages.py`` (bodies: ``responses_protocol.py``, ``messages_protocol.py``): two more APIs, which
  show answers as ``blocks.py``.
* ``chat.py``, ``completions.py``: the two APIs. ``replies.py``, ``logprobs.py``: the shapes of answers.
* ``sse.py``: streams that always end well. ``disconnect.py``: ending work whose client has gone.
* ``health.py``, ``metrics.py``: what operators see. ``serving.py``: the state that all of these share.

Nothing here imports torch: HTTP, text and JSON live in this process, tensors in the engine's.
"""
