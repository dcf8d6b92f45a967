"""Templates in a process of their own: the same texts and errors, and an end to whatever does not end."""

import copy
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

from transect.text import template_worker
from transect.text.chat_template import ChatTemplate
from transect.text.template_worker import TemplateApart, TemplateWorker

USER = [{"role": "user", "content": "Hi \u00e9\U0001f600"}]
PLAIN = ChatTemplate("{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ x }}", "<s>")
NESTED = "{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
ENDLESS = ChatTemplate("{% set ns = namespace(x=['a'], y=['a']) %}" + NESTED + "{{ ns.x == ns.y }}")
HUNGRY = ChatTemplate(
    "{% set ns = namespace(x=[]) %}{% for i in range(400) %}{% set ns.x = ns.x + [[1] * 900000] %}{% endfor %}"
)
"""Neither is something that counting forbids."""


@pytest.fixture(scope="module")
def worker():
    worker = TemplateWorker(time_limit_s=20.0, memory_limit_bytes=200 << 20)
    yield worker
    worker.close()


def gone(pid):
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


def test_texts_and_errors_are_those_of_the_template(worker):
    assert worker.pid is None
    for extra in ({"x": 10**30}, {"x": [None, {"a": 1.5}]}, {}):
        assert worker.render(PLAIN, USER, False, extra) == PLAIN.render(USER, False, **extra)
    pid = worker.pid
    refusing = ChatTemplate("{{ raise_exception('no such role') }}")
    with pytest.raises(ValueError, match="refuses these messages: no such role"):
        worker.render(refusing, USER)
    with pytest.raises(ValueError, match="must be a non-empty list"):
        worker.render(PLAIN, [])
    with pytest.raises(ValueError, match="recursion"):
        worker.render(ChatTemplate("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), USER)
    assert worker.render(PLAIN, USER) == PLAIN.render(USER) and worker.pid == pid


def test_want_of_memory_is_an_error_and_no_more(worker):
    with pytest.raises(ValueError, match=r"MemoryError|want of memory"):
        worker.render(HUNGRY, USER)
    assert worker.render(PLAIN, USER) == PLAIN.render(USER)


def test_what_does_not_end_is_ended():
    worker = TemplateWorker(time_limit_s=0.3)
    worker.start(PLAIN)
    pid = worker.pid
    with pytest.raises(ValueError, match=r"asks for too much: it was ended after 0.3 s"):
        worker.render(ENDLESS, USER)
    assert gone(pid)
    worker._time_limit_s = 60.0  # of the next process: a busy machine may take long for a short text
    assert worker.render(PLAIN, USER) == PLAIN.render(USER)
    worker.close()
    worker.close()


def test_close_ends_a_rendering():
    worker = TemplateWorker(time_limit_s=60.0)
    worker.start(PLAIN)
    raised = []

    def render():
        with pytest.raises(ValueError, match="asks for too much"):
            worker.render(ENDLESS, USER)
        raised.append(True)

    thread = threading.Thread(target=render)
    thread.start()
    pid = worker.pid
    until = time.monotonic() + 200
    while not worker._ready and time.monotonic() < until:
        time.sleep(0.01)
    worker.close()
    thread.join(200)
    assert raised and gone(pid)


def test_close_may_come_between_two_messages(monkeypatch):
    worker = TemplateWorker()
    worker.start(PLAIN)
    read = template_worker._read

    def late(pipe):
        worker.close()
        return read(pipe)

    monkeypatch.setattr(template_worker, "_read", late)
    with pytest.raises(ValueError, match="asks for too much"):
        worker.render(PLAIN, USER)


def test_a_worker_that_is_forgotten_leaves_no_process():
    worker = TemplateWorker()
    worker.start(PLAIN)
    pid = worker.pid
    del worker
    gc.collect()
    assert gone(pid)


def test_a_process_does_not_outlive_its_owner():
    """Not even one that renders for ever: its alarm is its own."""
    script = f"""
        import os, sys, threading, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from transect.text.chat_template import ChatTemplate
        from transect.text.template_worker import TemplateApart, TemplateWorker
        worker = TemplateWorker(time_limit_s=1.0)
        worker.start(ChatTemplate("x"))
        print(worker.pid, flush=True)
        os.kill(os.getpid(), 9)
    """
    parent = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    pid = int(parent.stdout)
    for _ in range(4000):
        if gone(pid):
            return
        threading.Event().wait(0.05)
    os.kill(pid, 9)
    pytest.fail("it is still there")


def test_values_that_cannot_be_sent_are_refused_and_nothing_is_lost(worker, monkeypatch):
    module = ModuleType("only_in_this_process")
    module.Own = type("Own", (), {"__module__": module.__name__})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for value in (module.Own(), lambda: 1, threading.Lock()):
        with pytest.raises(ValueError, match="must be plain values"):
            worker.render(PLAIN, USER, True, {"x": value})
    assert worker.render(PLAIN, USER) == PLAIN.render(USER)


def test_a_template_apart_is_a_template_for_any_thread(worker):
    apart = TemplateApart(PLAIN, worker)
    other = apart.with_source("{{ bos_token }}{{ messages | length }}")
    assert (apart.source, other.source) == (PLAIN.source, "{{ bos_token }}{{ messages | length }}")
    found = []
    work = [lambda: found.append((apart.render(USER, x=1), other.render(USER * 3))) for _ in range(8)]
    threads = [threading.Thread(target=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(PLAIN.render(USER, x=1), "<s>3")] * 8
    again = copy.deepcopy(apart)
    assert again.render(USER) == apart.render(USER) and again._worker is not worker
