"""Explain a server from its decision log.

* ``log``: a decision log: steps, rows, requests. ``sources``: logs of files and of servers.
* ``work``: work of its steps, and their floors. ``rates``: ceilings of the device that ran them.
* ``bill``: the time of a request by cause. ``meter``: its arithmetic, step by step.
* ``replay``: the log through the shipping scheduler again, decision by decision.
* ``calibration``: the step-time model of ``costs/fitting``, fitted on a log. ``simulate``: a log's requests on a
  virtual clock, with changed settings. ``what_if``: that from the command line.
* ``live``: the present state of a running server. ``live_log``: its log as it grows. ``growing_bill``: the bill of a
  request that runs. ``kv_map``: the owners of KV blocks.
"""
