"""Tool calls in a model's text: one description of their form makes the grammar that keeps answers to it and the parser
that reads them, so that what is streamed is always what was written.

* ``shape.py``    CallShape: the literal text around a call's name and arguments; the grammar of it
* ``parser.py``   ToolParser: from text in pieces to text and calls in pieces
* ``spec.py``     tools and ``tool_choice`` of a request, checked
* ``hermes.py``, ``llama3.py``, ``mistral.py``, ``generic.py``   the forms, one a file
* ``registry.py`` all forms by name, and which of them a chat template speaks
"""
