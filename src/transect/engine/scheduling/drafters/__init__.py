"""Ways to guess the next tokens of a sequence, one a file. Plain Python without tensors.

* ``drafter``: the interface, and ``Guess``.
* ``token_index``: finds earlier places of a sequence's last tokens.
* ``ngram``: copies the tokens after the longest earlier match in the same sequence (prompt lookup).
* ``suffix``: votes among matches in the sequence and in earlier answers.
* ``model``: a smaller model of the same vocabulary, with an executor and KV blocks of its own.
* ``planned``: guesses of a given acceptance, for simulations.
* ``registry``: the drafters by the names of ``--speculative-config``.
"""
