"""Read and write weights: from a name to a ``Decoder``, and from a model to files.

From a name to a model:

* ``resolve.py``: a name to a ``ModelSource``; ``pull.py``: downloads the built-in model (``package_index.py`` without
  pip); ``own_head.py``: checkpoints that claim a tied head but store one
* ``load.py``: ``load_model`` and ``load_on_device`` build and fill a ``Decoder``; ``fill`` copies stored weights into
  any model; ``progress.py``: progress on a terminal; ``kernel_choice.py``: chooses C++ kernels or torch;
  ``layouts.py``: the packing of each matrix of a checkpoint

Formats of files:

* ``hf.py``: reads safetensors; ``hf_out.py``, ``safetensors_out.py``: write them
* ``gguf.py``: reads GGUF; ``gguf_out.py``: writes it
* ``quantized.py``: reads matrices that other programs quantized; ``quantized_codes.py``: keeps them packed;
  ``quantized_bnb.py``: 4-bit matrices of bitsandbytes
* ``quantized_out.py``: writes quantized checkpoints, with the 4-bit values of ``quantized_grid.py``; ``gptq.py``: GPTQ,
  on the inputs that ``calibration.py`` collects
* ``eagle.py``: EAGLE-3 heads; ``kv_scales.py``: scales for an fp8 KV cache; ``dummy.py``: random weights

Adapters:

* ``adapter.py``: adapters loaded into weights; ``adapter_peft.py``: files of PEFT; ``peft_config.py``: their settings;
  ``adapter_start.py``: PiSSA and OLoRA as plain LoRA; ``adapter_served.py``: adapters that requests name
"""
