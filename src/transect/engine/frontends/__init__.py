"""Ways to use an engine: in the caller's process, in a process of its own, or several replicas.

* ``llm``: ``LLM``, the engine in the caller's process. ``inputs``: accepted forms of prompts. ``interrupts``: Ctrl-C
  between steps. ``vllm_arguments``: arguments of programs written for vLLM.
* ``async_engine``, ``process``, ``wire``: ``AsyncEngine``, the engine in another process, and the messages between.
  ``mailbox``: outputs that wait for a request's task. ``questions``: questions to the process and their answers.
  ``launch``: starts the process. ``socket_folder``: the folder of their socket.
  ``collector``: garbage collection in a process that serves. ``grammar_queue``: requests that wait for the compilation
  of a grammar. ``adapter_queue``: requests that wait for an adapter.
* ``streams``: a request and its answer so far, which another engine can continue. ``client``: ``EngineClient``, text
  and embeddings on top of a stream.
* ``replicas``: several engines behind one interface. ``supervisor``: watches, restarts and replaces them.
  ``looks``: the times at which replicas are looked at.
* ``beam_search``: beam search over requests of one token. ``scoring``: query likelihood of a document.
"""
