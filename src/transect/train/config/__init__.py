"""A training run as a frozen description, read from a TOML file and kept with every checkpoint.

```toml
model = "smollm2-135m"          # a name, directory or .gguf file to start from; or a directory with a config.json alone
task = "finetune"               # pretrain, finetune, lora, qlora
run_dir = "runs/chat"
steps = 200

[data]
train = ["chats.jsonl"]         # text files, JSONL chats or token files; by what they are
validation = ["held-out.jsonl"]

[optimizer]
name = "adamw"
learning_rate = 2e-5
```

An unknown key is an error that names the nearest known one.

* ``run.py``: the run; read it first. ``data.py``: what it trains on. ``optim.py``: how it changes weights.
* ``adapters.py``: adapters. ``objectives.py``: the settings of each objective. ``router.py``: losses on routers.
  ``parallel.py``: several devices.
* ``defaults.py``: what the task decides where a file leaves it out, and names that other trainers have.
* ``watching.py``: what a run shows of itself.
* ``parse.py``: plain values to these classes, and what is wrong with them.
"""

from __future__ import annotations

from .adapters import LoRAConfig
from .data import DataConfig
from .objectives import DistillConfig, DPOConfig, GRPOConfig, KTOConfig, ORPOConfig
from .optim import OptimizerConfig, ScheduleConfig
from .parallel import ParallelConfig
from .router import RouterConfig
from .run import Checkpointing, Precision, Task, TrainConfig
from .watching import SamplesConfig

__all__ = [
    "Checkpointing",
    "DPOConfig",
    "DataConfig",
    "DistillConfig",
    "GRPOConfig",
    "KTOConfig",
    "LoRAConfig",
    "ORPOConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Precision",
    "RouterConfig",
    "SamplesConfig",
    "ScheduleConfig",
    "Task",
    "TrainConfig",
]
