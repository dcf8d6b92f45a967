"""The rungs, a folder for each part of the road; a file each, whose docstring is the page that the student reads.

``inputs`` draws tensors and lists for them.
"""
