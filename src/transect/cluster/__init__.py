"""A fleet: replicas of an engine on any machines behind one router, which loses no byte when one of them dies.

* ``settings``: the fleet file.
* ``links``: authenticated connections. ``remote_engine``: the engine at the other end of one, as an ``AsyncEngine``.
* ``fleet``: the replicas at the router's end, as one engine: ``engine/frontends/replicas.py`` with places that come
  and go. ``host``: a replica at the other end.
* ``router``: both as plain processes.
"""
