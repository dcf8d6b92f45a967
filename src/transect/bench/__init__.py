"""Measuring a running system: load for any OpenAI-compatible server, and the offline protocols, beside their floors.

Work and when it arrives (plain Python, every draw from a seed):

* ``workload.py``   ``Work``: prompts and output lengths, random or from files; the throughput protocol
* ``lengths.py``    distributions of lengths, as they are written on the command line
* ``traces/``       requests without their tokens: recorded traces of others, and generated ones

A server under load:

* ``http_stream.py`` a small HTTP/1.1 client that times every piece of a streamed answer as it arrives
* ``target.py``      which server, and what one request to it looks like
* ``load.py``        open loop (arrivals do not wait for answers) and closed loop (fixed concurrency)
* ``levels.py``      a load test: levels of load, one after the other; arrivals: Poisson, gamma, all at once
* ``objectives.py``  latency objectives, for goodput
* ``same_answers.py`` requests of every kind, and whether two answers to one of them are the same
* ``summary.py``     percentiles, rates, goodput, errors by kind. ``plots.py``: pictures of them

An engine in this process:

* ``offline.py``    latency at batch sizes, and throughput of a fixed set of sequences
* ``scaling.py``    sums between ranks, measured as a step has them
* ``host_link.py``  what the links to the host give, of several devices at the same time
* ``collectives.py`` what ranks exchange, how fast, and whether it is right
* ``intervals.py``  confidence intervals; ``search_gain.py``: what a search gains over one answer, with them
* ``compare_formats.py``: one model in several number formats: perplexity, bits, speed, memory
* ``energy.py``     joules, from NVML. ``rapl.py``: of a processor, and what they stand for
* ``environment.py`` machine and versions, for the JSON
"""
