r"""List the families: the form of each one's calls, and the texts of a chat template that identify it.

``shape_of`` takes the first row whose ``told_by`` texts a template has, so a row with more such texts precedes a row
with fewer.
"""

from __future__ import annotations

from typing import Any

from .pythonic import PythonArguments
from .shape import CallShape
from .tagged import TaggedArguments


def _object(name: str, begin: str, end: str = "}", **rest: Any) -> CallShape:
    """Build a family in which a call is a JSON object."""
    return CallShape(name, begin, '{"name": "', '", "arguments": ', end, **rest)


def _list(name: str, begin: str, close: str = "]", **rest: Any) -> CallShape:
    """Build a family in which calls are a JSON list of objects."""
    return _object(name, begin, opening="[", separator=", ", begins_each=False, close=close, **rest)


FAMILIES = (
    # gpt-oss. A call is a message to a function in the commentary channel; ``text/harmony.py`` reads and writes it.
    CallShape("gpt_oss", "<|channel|>", "commentary to=functions.", " <|constrain|>json<|message|>", "",
              told_by=("<|channel|>", "<|message|>"), single=True, channels=True),
    # DeepSeek V3 and R1, then V3.1
    CallShape("deepseek_v3", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n",
              "\n```<｜tool▁call▁end｜>", told_by=("<｜tool▁calls▁begin｜>", "```json"), separator="\n",
              begins_each=False, close="<｜tool▁calls▁end｜>"),
    CallShape("deepseek_v31", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
              "<｜tool▁call▁end｜>", told_by=("<｜tool▁calls▁begin｜>",), begins_each=False,
              close="<｜tool▁calls▁end｜>"),
    # Kimi K2. The id goes back with the result, and numbers all calls of a conversation.
    CallShape("kimi_k2", "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.",
              "<|tool_call_argument_begin|>", "<|tool_call_end|>", told_by=("tool_declare<|im_middle|>",),
              begins_each=False, close="<|tool_calls_section_end|>", id_mark=":", id_pattern="[0-9]{1,4}",
              ids="numbered"),
    # Mistral from version 11 of its tokenizers on (Small 3.2, Magistral, Devstral, Ministral 3); then those before
    CallShape("mistral_v11", "[TOOL_CALLS]", "", "[ARGS]", "", told_by=("[TOOL_CALLS]", "[ARGS]"),
              id_mark="[CALL_ID]", id_pattern="[a-zA-Z0-9]{9}", ids="nine"),
    _list("mistral", "[TOOL_CALLS]", told_by=("[TOOL_CALLS]",), ids="nine"),
    # Qwen3-Coder, and later Qwen
    CallShape("qwen3_coder", "<tool_call>", "\n<function=", ">\n", "</function>\n</tool_call>",
              told_by=("<function=", "<parameter="), separator="\n",
              arguments=TaggedArguments("<parameter=", ">\n", "\n</parameter>")),
    CallShape("glm45", "<tool_call>", "", "\n", "</tool_call>", told_by=("<arg_key>",), separator="\n",
              arguments=TaggedArguments("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>")),
    # Phi-4-mini: its own form; that of templates which ask for one object between the marks; that of vLLM's template
    _object("phi4_object", "<|tool_call|>", "}<|/tool_call|>",
            told_by=('<|tool_call|>{"name"', "<|/tool_call|>")),
    _list("phi4_functools", "functools", told_by=("functools[",)),
    _list("phi4_mini", "<|tool_call|>", "]<|/tool_call|>", told_by=("<|tool|>' + message['tools']",), in_system=True),
    # Granite 3
    _list("granite", "<|tool_call|>", told_by=("<|tool_call|>",)),
    # Hermes 2 and 3, Qwen 2.5 and 3, Granite 4 and others
    CallShape("hermes", "<tool_call>", '\n{"name": "', '", "arguments": ', "}\n</tool_call>", told_by=("<tool_call>",),
              separator="\n"),
    CallShape("lfm2", "<|tool_call_start|>", "", "(", ")", told_by=("<|tool_list_start|>",), opening="[",
              separator=", ", begins_each=False, close="]<|tool_call_end|>", arguments=PythonArguments()),
    # Llama 4, and Llama 3.2 where it is asked for calls in Python
    CallShape("pythonic", "", "", "(", ")", told_by=("[func_name1(",), prefix="<|python_start|>", opening="[",
              separator=", ", begins_each=False, close="]", arguments=PythonArguments()),
    # Llama 3.1 to 3.3, and Llama 4 by its own template
    CallShape("llama3_json", "", '{"name": "', '", "parameters": ', "}", told_by=("ipython", "parameters"),
              prefix="<|python_tag|>", separator="; ", begins_each=False),
)  # fmt: skip

ALIASES = {
    "qwen": "hermes", "qwen25": "hermes", "qwen3": "hermes", "granite4": "hermes", "llama3": "llama3_json",
    "llama4_pythonic": "pythonic", "llama4_json": "llama3_json", "qwen3_xml": "qwen3_coder", "openai": "gpt_oss",
    "harmony": "gpt_oss", "deepseek_r1": "deepseek_v3", "glm4_moe": "glm45", "phi4_mini_json": "phi4_mini",
}  # fmt: skip
"""Other names of forms, among them vLLM's."""
