"""HTTP below the APIs: connections, limits, bodies, errors, streams.

* ``connections``: limits on clients and on the time that a request takes to arrive.
* ``gate``: counting, draining and API keys, before every route.
* ``lifetime``: time limits of answers; cancels work whose client has left.
* ``clients``: clients by API key or address, their permissions, and their requests.
* ``accounts``: limits of clients, and their use.
* ``body``: bounded JSON bodies. ``bounds``: limits on the number of values in a body.
* ``errors``: error bodies of the APIs.
* ``turns``: crowds of requests pass a few at a time. ``lanes``: threads that clients share by time.
* ``sse``: server-sent events that always end well.
"""
