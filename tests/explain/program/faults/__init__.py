"""Small programs with one fault each.

``KIND`` is the finding that must come first; ``fixed`` is the same work without the fault. Programs make their tensors
on torch's default device, and more of them on a GPU, where the same work would be too little to see. Those called
``gpu_...`` make no sense elsewhere.
"""
