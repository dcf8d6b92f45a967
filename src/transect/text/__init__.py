"""Text on both sides of the engine, which itself sees token ids only.

On the way in:

* ``tokenizer.py``       Tokenizer: text to ids and back; from a Hugging Face directory or GGUF metadata
* ``hf_settings.py``     the small JSON files beside a tokenizer.json
* ``sampling_defaults.py`` what the model's makers recommend for sampling
* ``model_text.py``      ModelText: tokenizer, template and defaults, as settings choose
* ``gguf_vocab.py``      a tokenizer out of GGUF metadata
* ``gguf_pieces.py``     SentencePiece vocabularies there: merged by score, or Unigram
* ``gguf_vocab_out.py``  and into it
* ``pretokenizers.py``   how each model family cuts text before merging, by its GGUF name
* ``hf_tokenizer.py``    HFTokenizer: the same under the names of transformers
* ``token_bytes.py``     which bytes a token spells: byte level and sentence pieces
* ``chat_messages.py``   messages in the one form that templates expect
* ``chat_template.py``   ChatTemplate: messages to one string, by a Jinja template
* ``template_sandbox.py``  where templates run, and what bounds them
* ``template_worker.py``   TemplateWorker, TemplateApart: templates in a process that can be ended
* ``fill_in.py``         gap_of: how a model writes what is missing between two texts
* ``inert.py``           chat_tokens: messages to ids, where no message can speak the protocol

* ``grammar/``             what an answer must look like, and which tokens may come next so that it does
* ``tools/``               tool calls: their forms, as grammars and as parsers
* ``harmony.py``           answers in channels (gpt-oss): thoughts, text and calls
* ``reasoning.py``         thoughts before an answer: their grammar and parser

Of both, what other levels need: ``protocols.py``.

On the way out:

* ``number_text.py``       NumberText: what stands in for a tokenizer where a model has none
* ``detokenizer.py``       IncrementalDetokenizer: ids to text a few at a time, whole characters only
* ``stop.py``              StopAutomaton, StopMatcher: stop strings across any chunk border
* ``outputs.py``           RequestOutput, CompletionOutput, Logprob: what a caller gets
* ``output_processor.py``  OutputProcessor: engine outputs to updates, one terminal event for each choice

Beside the weights of a trained model: ``export.py``, the tokenizer's files into its directory.

Nothing here imports torch.
"""
