"""Positions and the start of a step.

* ``rotary.py``        rotary position embedding of q and k
* ``norm_rotary.py``   the same after a norm of each head
* ``embed_tokens.py``  rows of the embedding and of the table of rotations, for the tokens of a step
"""
