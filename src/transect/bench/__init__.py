"""Measure a running system: load on any OpenAI-compatible server, and offline protocols beside their floors.

Workloads (plain Python, every draw from a seed):

* ``workload.py``: ``Work``, prompts and output lengths, random or from files; the throughput protocol
* ``lengths.py``: distributions of lengths, in the form of the command line
* ``traces/``: recorded and generated traces of requests

A server under load:

* ``http_stream.py``: a small HTTP/1.1 client that times every piece of a streamed answer
* ``target.py``: the server, and the bodies of its requests
* ``load.py``: open loop (arrivals do not wait for answers) and closed loop (fixed concurrency)
* ``levels.py``: a load test at increasing rates; arrivals: Poisson, gamma, all at once
* ``objectives.py``: latency objectives, for goodput
* ``summary.py``: percentiles, rates, goodput, errors by kind; ``plots.py`` draws them
* ``same_answers.py``: requests of every kind, and a comparison of their answers

An engine in this process:

* ``offline.py``: latency at batch sizes, and throughput of a fixed set of sequences
* ``search_gain.py``: the gain of a search over one answer; ``intervals.py``: its confidence intervals
* ``compare_formats.py``: one model in several number formats: perplexity, bits, speed, memory

Links between devices:

* ``collectives.py``: bandwidth and correctness of collectives; ``scaling.py``: sums between ranks as in a step
* ``host_link.py``: bandwidth of host links, of several devices at the same time

Energy, and the record's facts:

* ``energy.py``: joules of GPUs, from NVML; ``rapl.py``: joules of a processor
* ``environment.py``: machine and versions, for the JSON
"""
