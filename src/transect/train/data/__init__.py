"""Training data: files to rows, rows to documents, documents to micro-batches.

* ``files.py``: files of training data and their rows. ``layouts.py``: layouts of rows, told apart by their keys;
  ``messages.py``: their messages. ``documents.py``: rows and text to token ids; ``chat.py``: the chat template of a
  run. ``checks.py``: a check of files before a run.
* ``tokens.py``: token streams and token files; ``tokenize.py`` writes them, from the ``chunks.py`` of other files;
  ``streaming.py`` reads those during the run.
* ``loader.py``: files to streams, and the position in them. ``batches.py``: documents packed side by side, and
  shares of several files. ``identity.py``: digests of data and base, compared when a run resumes.
"""
