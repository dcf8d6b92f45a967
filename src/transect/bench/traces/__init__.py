"""Traces of requests: when they come, how long they are, and which tokens they share. Plain Python.

* ``asked``: ``Asked``, one request without its tokens; ``work_of`` draws them.
* ``reading``: ``read_trace`` finds the format of a file. ``json_lines``: our own and Mooncake's lines. ``azure``: CSV
  files of AzurePublicDataset. ``servegen``: rates and lengths of clients. ``load_log``: what ``bench serve --json``
  wrote.
* ``mix``: generated traces: bursts, clients, conversations of several turns, shared prefixes.
"""
