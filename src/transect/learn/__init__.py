"""The graded ladder: exercises from a line through some points to a router for a fleet, each a piece of this project.

* ``record``     ``Rung``: one exercise, and the parts of its record
* ``rungs/``     the exercises, a file each; ``registry`` finds them
* ``texts``      programs as texts: excerpts of this package, and programs with a hole
* ``grade/``     the grader
* ``folder``     the folder that a student works in
* ``ladder``     the path: the list, advice after a check, the map of what unlocks what, and the chapters of the docs
* ``progress``   what a student has climbed; ``portfolio`` makes a page of it
* ``live``       puts a student's piece into a command of the product, and counts its calls; ``hook`` does it in each
  process, ``live_scheduler`` translates for the engine, ``live_training`` writes a short training run
* ``classroom``  grades submissions of a class in a sandbox
* ``template``   makes a new rung from an operator, from any policy (``template_policies``) or from an objective
  (``template_sources``); ``closure`` finds all that a function needs
* ``stage``      plays requests through small engines on a virtual clock, with a student's policy inside
"""
