"""The life of a model, from data to a release and back: a chain of steps that resumes, skips and explains.

* ``settings.py``: a flow from its TOML file. ``chain.py``: runs its steps; read it first. ``folder.py``: their states
  and results on disk. ``digests.py``: content hashes, by which steps are skipped. ``picture.py`` draws the chain.
* ``steps/``: the steps, one file each.
* ``rows/``: data that are cleaned and split. ``gate/``: measures beside the current model. ``catalog/``: versions with
  their lineage. ``rollout/``: releases on a server, and the rule by which they are promoted or rolled back.
* ``watch/``: captured requests and answers: their files, drift, and pairs from feedback.
"""
