"""Watch a served model, from the requests and answers that its server has captured.

* ``captures``: the files: segments of JSON lines with a quota, an age, and deletion by user.
* ``refusals``: answers that refuse.
"""
