"""Tool calls in a model's text: one description of a form yields both the grammar that enforces it and the parser that
reads it.

* ``families.py``  the table: one row for each family of models; a new one begins here
* ``shape.py``     CallShape, a row: the literal text around a call's name and arguments; the grammar of it
* ``arguments.py`` how arguments are written: as JSON; ``tagged.py``, ``pythonic.py``: otherwise
* ``parser.py``    ToolParser: from text in pieces to text and calls in pieces
* ``spec.py``      tools and ``tool_choice`` of a request, checked
* ``generic.py``   models whose template knows no tools: the prompt teaches a form
* ``history.py``   calls of earlier turns as a template can take them
* ``registry.py``  which form a model speaks, by name or by its chat template
"""
