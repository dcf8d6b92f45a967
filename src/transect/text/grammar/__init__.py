"""Constrain answers by grammars: the form of an answer, and the tokens that may come next.

llguidance (MIT licence) compiles grammars and computes masks; only this folder imports it. The page
docs/serve/structured-output.md compares it with xgrammar. In the order of a request:

* ``params.py``      StructuredOutputsParams: what a caller asks for, checked as far as that costs nothing
* ``sources.py``     from that to one grammar in llguidance's form; what users' schemas get so that they work
* ``closed.py``      objects of schemas without undeclared properties
* ``lark.py``        small helpers to write such grammars: literals, special tokens, text up to a mark
* ``vocabulary.py``  the bytes of the model's tokens, for grammars
* ``compiler.py``    GrammarCompiler: from a grammar to a constraint, off the step, with limits; keeps what comes again
* ``checker.py``     a process that compiles a grammar first, where it can be ended
* ``constraint.py``  GrammarConstraint: the state of one answer; masks of many answers at once
* ``bad_words.py``   WithoutSequences: token sequences that an answer must not have

Nothing here imports torch.
"""
