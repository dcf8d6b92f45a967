"""Where weights come from and go to.

A name to a ``Decoder``:

* ``resolve.py``: a name to a ``ModelSource``; ``pull.py`` fetches the built-in model, ``package_index.py`` where there
  is no pip; ``own_head.py``: checkpoints that say tied and are not
* ``load.py``: ``fill``, the one way of stored weights into a model; ``load_model``, ``load_on_device``: a source to a
  ``Decoder``, with ``progress.py`` on a terminal; ``kernel_choice.py``: what computes it; ``layouts.py``: how a model's
  checkpoint packs its matrices

Formats of files:

* ``hf.py``: safetensors in, ``hf_out.py``: out (``safetensors_out.py``: their files)
* ``gguf.py``: GGUF in, ``gguf_out.py``: out
* ``quantized.py``: other programs' quantized matrices; ``quantized_codes.py``: the same packed; ``quantized_bnb.py``:
  those that bitsandbytes packed in 4 bits; ``quantized_out.py`` writes such, on the 4-bit values of
  ``quantized_grid.py``; ``calibration.py``: inputs of matrices while a model reads a text; ``gptq.py`` rounds by them
* ``eagle.py``: EAGLE-3 heads, in and out
* ``kv_scales.py``: scales of keys and values for a cache in fp8
* ``dummy.py``: random weights

Adapters:

* ``adapter.py``: adapters on their way into weights; ``adapter_peft.py``: PEFT's files in and out; ``peft_config.py``:
  their settings; ``adapter_start.py``: PiSSA and OLoRA as plain LoRA; ``adapter_served.py``: those that requests name
"""
