"""Text on both sides of the engine, which sees token ids only. Nothing here imports torch.

Prompts to token ids:

* ``tokenizer.py``: ``Tokenizer``, text to token ids and back, from a Hugging Face directory or a GGUF file.
  ``pretokenizers.py``: each family's split of a text before merges. ``token_bytes.py``: bytes of each token.
  ``hf_tokenizer.py``: ``HFTokenizer``, a tokenizer with the method names of transformers.
* ``hf_settings.py``: the small JSON files of a Hugging Face tokenizer. ``gguf_vocab.py``: a tokenizer from GGUF
  metadata; ``gguf_pieces.py``: its SentencePiece vocabularies; ``gguf_vocab_out.py``: writes GGUF metadata.
* ``sampling_defaults.py``: the sampling parameters that a model's files recommend.
* ``model_text.py``: ``ModelText``, the tokenizer, chat template and sampling defaults of an engine.
* ``chat_messages.py``: messages in the form that templates expect. ``chat_template.py``: ``ChatTemplate``, messages to
  one string, with Jinja. ``template_sandbox.py``: the limits of a template. ``template_worker.py``: ``TemplateWorker``
  and ``TemplateApart``, templates in a process that can be killed.
* ``inert.py``: ``chat_tokens``, messages to token ids; text of a message never becomes a special token.
* ``fill_in.py``: ``gap_of``, the format of a model for filling in text between two texts.

Formats of answers:

* ``grammar/``: the tokens that a grammar or JSON schema allows next. ``tools/``: formats of tool calls.
* ``harmony.py``: answers in channels (gpt-oss). ``reasoning.py``: thoughts before an answer.

Token ids to answers:

* ``output_processor.py``: ``OutputProcessor``, engine outputs to updates of each choice.
* ``detokenizer.py``: ``IncrementalDetokenizer``, token ids to whole characters. ``stop.py``: ``StopAutomaton`` and
  ``StopMatcher``, stop strings, also across updates. ``number_text.py``: ``NumberText``, ids as text for a model
  without a tokenizer.
* ``outputs.py``: ``RequestOutput``, ``CompletionOutput``, ``Logprob``: results for the caller.

``protocols.py`` has the interfaces that other levels use, ``export.py`` writes a tokenizer beside trained weights.
"""
