"""Device mesh and the ways to spread a model over devices. Nothing is here yet."""
