"""Routes and records for operators.

* ``routes``: prefix cache, tokenization and other operators' routes. ``health``: liveness.
* ``metrics``, ``metric_names``: Prometheus metrics. ``drift``: the alarm StepTimeDrift.
* ``adapter_routes``: load and unload adapters. ``release_routes``: versions of released names.
* ``bills``: the time of each request by cause.
* ``live``, ``live_reader``, ``live_routes``: the work of an engine as it happens, for the page. ``what_if``:
  predictions for other settings.
* ``request_log``: a log line per request. ``tracing``: OpenTelemetry spans.
"""
