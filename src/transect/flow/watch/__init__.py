"""Watch a served model, from the requests and answers that its server has captured.

* ``captures``: the files: segments of JSON lines with quota, age, and deletion by user. ``records``: their content.
* ``drift``: windows of requests beside a reference, with a known rate of false alarms. ``two_sample``: the tests.
  ``report``: results and alarms.
  ``follow``: window after window. ``models``: vectors of texts, and a judge. ``refusals``: answers that refuse.
* ``feedback``: rows for preference training from users' judgements.
"""
