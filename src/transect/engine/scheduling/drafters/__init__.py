"""Ways to guess the next tokens of a sequence, one a file. Plain Python without tensors.

* ``drafter``: the interface, and ``Guess``.
* ``token_index``: finds earlier places of a sequence's last tokens.
* ``ngram``: copies the tokens after the longest earlier match in the same sequence (prompt lookup).
* ``suffix``: votes among matches in the sequence and in earlier answers.
* ``drawn``: drafts that an executor draws. ``model``: a smaller model of the same vocabulary, with KV blocks of its
  own. ``eagle``: an EAGLE-3 head, which reads hidden states of the engine's model.
* ``planned``: guesses of a given acceptance, for simulations; also those of a model whose steps take given times.
* ``registry``: the drafters by the names of ``--speculative-config``.
"""
