"""OpenAI's API: completions, chat completions and responses.

* ``protocol``: request bodies. ``unsupported``: parameters that are refused, with the reason.
* ``completions``, ``chat``: the two main routes. ``replies``, ``logprobs``: shapes of answers. ``long_replies``: long
  answers, encoded in pieces.
* ``responses``, ``responses_protocol``: the responses API.
"""
