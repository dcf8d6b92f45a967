"""The OpenAI-compatible HTTP server around an ``AsyncEngine``. In the order of a request:

* ``process.py``: bind, serve, drain on SIGTERM, end with the engine.
* ``app.py``: the routes, and nothing else.
* ``connections.py``: how many clients there may be, and how long they may take to send a request.
* ``gate.py``: what every request passes first: counting, draining, API keys. ``deadline.py``: when it took too long.
* ``body.py``: reading a JSON body, bounded while it arrives. ``bounds.py``: how many values it may hold.
* ``protocol.py``: what clients may send; ``unsupported.py``: what they send and is not supported here.
  ``errors.py``: what they hear when they sent something else.
* ``prompts.py``: chat template and tokenizer. ``rendering.py``, ``encoding.py``: so that neither holds up others.
* ``generation.py``: the engine requests behind one HTTP request. ``beams.py``: those of a beam search.
* ``structured.py``: the form that an answer shall have. ``answers.py``: its thoughts, text and calls, whole or in
  pieces.
* ``chat.py``, ``completions.py``: the two APIs. ``replies.py``, ``logprobs.py``: the shapes of answers;
  ``long_replies.py``: the long ones, little by little.
* ``responses.py``, ``messages.py`` (bodies: ``responses_protocol.py``, ``messages_protocol.py``): two more APIs, which
  show answers as ``blocks.py``.
* ``retrieval.py`` (bodies and answers: ``retrieval_protocol.py``): embeddings, scores and ranks.
* ``sse.py``: streams that always end well. ``disconnect.py``: ending work whose client has gone.
* ``request_log.py``: one line for each request. ``tracing.py``: its spans for OpenTelemetry.
* ``operations.py``: further routes for operators. ``bills.py``: where the time of requests went.
* ``health.py``, ``metrics.py``: what operators see; ``metric_names.py``: and under which names.
  ``serving.py``: the state that all of these share.

Nothing here imports torch: HTTP, text and JSON live in this process, tensors in the engine's.
"""
