"""Settings of a fleet: frozen dataclasses, read from a TOML file. The JSON schema and the checks are derived from them.

The tables ``[engine]`` and ``[server]`` take the settings of ``transect serve``, by the names of its options or of
their fields. The others are below.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from ..engine.config import EngineConfig
from ..engine.executors.gpu.options import GPUOptions
from ..hardware.cache import cache_folder
from ..server.options import ServerOptions
from ..spec.settings import About, Setting, check_values, nearest, settings_of

NOT_HERE = ("data_parallel_size", "decision_log", "first_device", "fail_over")
"""Settings of ``serve`` that a fleet sets itself."""
TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}
"""Names of types in JSON schemas."""
MOST_NAME = 40


@dataclass(frozen=True)
class ReplicaSettings:
    """Replicas: engines, each with a process (and ranks) of its own, on any machine of the fleet.

    Attributes:
        min: Fewest replicas.
        max: Most replicas.
        cpus: Cores of a replica, for Ray's and Kubernetes' placement; the engine's ``threads`` default to it.
        gpus: GPUs of a replica; default: one per rank of an engine with ``device`` cuda, else none.
        memory_gb: Memory of a replica in GB, for placement; default: not limited.
        per_node: Most replicas on one node; default: no limit.
        drain_timeout_s: Seconds for the streams of a replica that leaves; then they continue elsewhere.
        start_timeout_s: Seconds for the first replica to be ready.
        engine_module: Python module that runs as the engine process; for tests, and for engines of your own that
            speak the same messages.
    """

    min: Annotated[int, About(least=1)] = 1
    max: Annotated[int | None, About(least=1)] = None
    cpus: Annotated[float, About(least=0)] = 1.0
    gpus: Annotated[float | None, About(least=0)] = None
    memory_gb: Annotated[float | None, About(above=0)] = None
    per_node: Annotated[int | None, About(least=1)] = None
    drain_timeout_s: Annotated[float, About(least=0)] = 60.0
    start_timeout_s: Annotated[float, About(above=0)] = 1800.0
    engine_module: str = "transect.engine.frontends.process"

    def __post_init__(self) -> None:
        check_values(self)
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max must be at least min ({self.min}), not {self.max}")

    @property
    def most(self) -> int:
        """``max``, or ``min`` if that is unset."""
        return self.min if self.max is None else self.max


@dataclass(frozen=True)
class LinkSettings:
    """Connections between the router and its replicas.

    Attributes:
        host: Local address of the router for replicas; 0.0.0.0 for all.
        port: Port of the router for replicas; 0 for any free one.
        address: Host name or address by which replicas reach the router; default: ``host``, or on Ray the address of
            the router's node if ``host`` is 0.0.0.0.
        key_file: File with the fleet's key, at least 16 characters, the same on all machines. Default: a new key in
            ``folder``, which suits one machine.
        lost_after_s: Seconds of silence of a machine after which its requests continue on others.
        wait_s: Seconds that requests wait for a replica if there is none.
        ssl_certfile: Certificate of the router (PEM), for TLS on links.
        ssl_keyfile: Key of the certificate (PEM).
        ssl_ca_file: Certificates (PEM) that replicas trust; needed for TLS.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, About(least=0, most=65535)] = 8001
    address: str | None = None
    key_file: str | None = None
    lost_after_s: Annotated[float, About(above=0)] = 5.0
    wait_s: Annotated[float, About(least=0)] = 120.0
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_file: str | None = None

    def __post_init__(self) -> None:
        check_values(self)
        if (self.ssl_certfile is None) != (self.ssl_ca_file is None):
            raise ValueError("ssl_certfile and ssl_ca_file go together: the router shows the one, replicas check it")


@dataclass(frozen=True)
class ScalingSettings:
    """Number of replicas, between ``min`` and ``max`` of ``[replicas]``.

    Attributes:
        policy: Rule for the number: ``backlog`` holds the time that queued tokens need below ``target_s``;
            ``concurrency`` holds the requests of a replica at ``each``; ``fixed`` stays at ``min``.
        target_s: Seconds that a replica may need for the tokens that it has to compute.
        tokens_per_s: Tokens per second of a busy replica, until that has been measured; default: unknown, and no
            replica is added before the first measurement.
        each: Requests of a replica, waiting or running.
        interval_s: Seconds between two decisions.
        patience_s: Seconds for which fewer replicas must have been enough before one is removed.
    """

    policy: Literal["backlog", "concurrency", "fixed"] = "backlog"
    target_s: Annotated[float, About(above=0)] = 10.0
    tokens_per_s: Annotated[float | None, About(above=0)] = None
    each: Annotated[float, About(above=0)] = 32.0
    interval_s: Annotated[float, About(above=0)] = 5.0
    patience_s: Annotated[float, About(least=0)] = 300.0

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True)
class RaySettings:
    """Ray, which starts the router and the replicas, and starts them again.

    Attributes:
        address: Ray cluster to use: ``auto`` is that of this machine, which is started if there is none; ``local``
            always starts one.
        num_cpus: Cores of a cluster that is started here; default: all.
        object_store_mb: Object store of a cluster that is started here, in MB; no tokens pass through it.
        port: Port of a cluster that is started here.
        router_on_head: Keep the router on the head node, whose address clients know.
        health_period_s: Seconds between two health checks of replicas.
        health_timeout_s: Seconds that a health check may take.
    """

    address: str = "auto"
    num_cpus: Annotated[int | None, About(least=1)] = None
    object_store_mb: Annotated[int, About(least=80)] = 100
    port: Annotated[int, About(least=1024, most=65535)] = 6379
    router_on_head: bool = True
    health_period_s: Annotated[float, About(above=0)] = 2.0
    health_timeout_s: Annotated[float, About(above=0)] = 30.0

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True)
class FleetSettings:
    """A fleet.

    Attributes:
        name: Name of the fleet, and of its applications on Ray.
        folder: Folder for the fleet's key, its logs and the state of its commands; default: ``fleets/NAME`` in the
            cache's folder.
        engine: Settings of the engines. server: Settings of the router's HTTP server.
    """

    TABLES: ClassVar[Mapping[str, Any]] = {"engine": EngineConfig, "server": ServerOptions}
    """Tables whose settings are those of ``serve``."""

    engine: EngineConfig
    server: ServerOptions
    name: str = "fleet"
    folder: str | None = None
    replicas: ReplicaSettings = field(default_factory=ReplicaSettings)
    links: LinkSettings = field(default_factory=LinkSettings)
    scaling: ScalingSettings = field(default_factory=ScalingSettings)
    ray: RaySettings = field(default_factory=RaySettings)

    def __post_init__(self) -> None:
        name = self.name
        if not name or len(name) > MOST_NAME or not all(each.isalnum() or each == "-" for each in name):
            raise ValueError(f"name must have 1 to {MOST_NAME} letters, digits and dashes, not {name!r}")
        if self.server.port and self.server.port == self.links.port and self.server.uds is None:
            raise ValueError(f"links.port is server.port ({self.links.port}): choose another for one of them")
        if self.engine.replicas > 1:
            raise ValueError("engine.data_parallel_size is for one machine: give replicas.min and replicas.max")

    @property
    def place(self) -> Path:
        """``folder``, or its default."""
        return cache_folder() / "fleets" / self.name if self.folder is None else Path(self.folder).expanduser()

    @property
    def gpus(self) -> float:
        """GPUs of a replica."""
        own = self.replicas.gpus
        return (float(self.engine.ranks) if self.engine.device == "cuda" else 0.0) if own is None else own

    def key(self) -> bytes:
        """Read the fleet's key; without ``links.key_file``, make one at first use.

        Raises:
            ValueError: the file cannot be read, or the key is too short.
        """
        file = self.links.key_file
        path = self.place / "key" if file is None else Path(file).expanduser()
        if file is None and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_text(secrets.token_urlsafe(32))
        try:
            key = path.read_bytes().strip()
        except OSError as error:
            raise ValueError(f"links.key_file {path} cannot be read ({error.strerror or error})") from None
        if len(key) < 16:
            raise ValueError(f"the key in {path} has {len(key)} characters: give one of at least 16 random ones")
        return key


def read(path: Path | str) -> FleetSettings:
    """Read a fleet file.

    Raises:
        ValueError: it cannot be read, or a setting is at fault; the message names file and key.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be read ({reason}): give a fleet file (TOML)") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML ({error})") from None
    try:
        return build(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def build(values: Mapping[str, Any]) -> FleetSettings:
    """Build the settings of a fleet from nested values by name.

    Raises:
        ValueError: an unknown key, or a value that cannot be; the message names the key.
    """
    own = {each.name: each for each in settings_of(FleetSettings)}
    tables = _tables()
    made: dict[str, Any] = {}
    for key, value in values.items():
        if key in tables:
            if not isinstance(value, Mapping):
                raise ValueError(f"{key} must be a table, not {value!r}")
            made[key] = value
        elif key in own:
            made[key] = _checked(own[key], value, key)
        else:
            raise ValueError(f"there is no setting {key!r}{nearest(key, [*own, *tables])}")
    for key, kind in tables.items():
        if key not in FleetSettings.TABLES:
            made[key] = _table(kind, made.get(key, {}), key)
    made["engine"] = _engine(made.get("engine", {}), made["replicas"])
    server = dict(made.get("server", {}))
    if not {"served-model-name", "served_model_name", "model_names"} & server.keys():
        server["model_names"] = [made["engine"].model]
    made["server"] = _table(ServerOptions, server, "server")
    return FleetSettings(**made)


def _engine(table: Mapping[str, Any], replicas: ReplicaSettings) -> EngineConfig:
    names = _names(EngineConfig)
    gpu = {key: value for key, value in table.items() if key not in names and key in _names(GPUOptions)}
    fields = _values(EngineConfig, {key: value for key, value in table.items() if key not in gpu}, "engine")
    if "model" not in fields:
        raise ValueError('engine.model is missing: name a model, such as model = "smollm2-135m"')
    if replicas.cpus >= 1:
        fields.setdefault("threads", math.floor(replicas.cpus) if fields.get("device") != "cuda" else None)
    fields = {"max_queue_bytes": 512 * 2**20, "max_queue_wait": 120.0} | fields  # as ``serve`` has it
    try:
        return EngineConfig(**fields, gpu=_table(GPUOptions, gpu, "engine")).for_server()
    except ValueError as error:
        raise ValueError(f"engine: {error}") from None


def _tables() -> dict[str, Any]:
    hints = typing.get_type_hints(FleetSettings)
    return {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}


def _names(kind: Any) -> dict[str, Setting]:
    """Return the settings of a dataclass by all names of their options and fields."""
    found = {}
    for each in settings_of(kind):
        if each.name not in NOT_HERE:
            for name in (each.name, each.option, *each.about.also):
                found[name] = found[name.replace("-", "_")] = each
    return found


def _values(kind: Any, table: Mapping[str, Any], where: str) -> dict[str, Any]:
    names = _names(kind)
    fields: dict[str, Any] = {}
    for key, value in table.items():
        if key not in names:
            shown = [name for name in names if "-" not in name]
            raise ValueError(f"there is no setting {where}.{key}{nearest(key, shown)}")
        setting = names[key]
        if setting.name in fields:
            raise ValueError(f"{where}.{key} is given twice, under two names")
        fields[setting.name] = _checked(setting, value, f"{where}.{key}")
    return fields


def _table(kind: Any, table: Mapping[str, Any], where: str) -> Any:
    fields = _values(kind, table, where)
    try:
        return kind(**fields)
    except ValueError as error:
        raise ValueError(f"{where}: {error}" if "." in str(error).split()[0] else f"{where}.{error}") from None


def _checked(setting: Setting, value: Any, where: str) -> Any:
    """Check the type of a value, and convert it to that of the field."""
    for kind in setting.kinds:
        if isinstance(kind, str | int) and not isinstance(kind, type):
            if value == kind:
                return value
        elif kind is Any or (get_origin(kind) in (dict, Mapping) and isinstance(value, Mapping)):
            return value
        elif get_origin(kind) is tuple:
            items = [value] if isinstance(value, get_args(kind)[0]) else value
            if isinstance(items, list) and all(isinstance(each, get_args(kind)[0]) for each in items):
                return tuple(items)
        elif kind in TYPES and type(value) is kind:
            return value
        elif kind is float and type(value) is int:
            return float(value)
    choices = [repr(each) for each in setting.choices]
    kinds = [TYPES.get(kind, "list" if get_origin(kind) is tuple else "table") for kind in setting.kinds]
    wanted = " or ".join(dict.fromkeys(choices or [f"a value of type {kind}" for kind in kinds]))
    raise ValueError(f"{where} must be {wanted}, not {value!r}")


def schema() -> dict[str, Any]:
    """Return the JSON schema (2020-12) of a fleet file, for editors and checks."""
    properties = {each.name: _schema_of(each) for each in settings_of(FleetSettings) if each.name not in ("engine",)}
    for key, kind in _tables().items():
        kinds = (kind, GPUOptions) if key == "engine" else (kind,)
        names = {name: each for one in kinds for name, each in _names(one).items()}
        inner = {name: _schema_of(each) for name, each in names.items()}
        about = (kind.__doc__ or "").split("\n")[0]
        properties[key] = {
            "type": "object", "description": about, "properties": inner, "additionalProperties": False,
        }  # fmt: skip
    properties["engine"]["required"] = ["model"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A fleet of transect",
        "type": "object",
        "properties": properties,
        "required": ["engine"],
        "additionalProperties": False,
    }


def _schema_of(setting: Setting) -> dict[str, Any]:
    forms: list[dict[str, Any]] = []
    literals = [kind for kind in setting.kinds if isinstance(kind, str | int) and not isinstance(kind, type)]
    if literals:
        forms.append({"enum": literals})
    for kind in setting.kinds:
        if kind in TYPES:
            form: dict[str, Any] = {"type": TYPES[kind]}
            about = setting.about
            if kind in (int, float):
                bounds = {"minimum": about.least, "exclusiveMinimum": about.above, "maximum": about.most}
                form |= {name: value for name, value in bounds.items() if value is not None}
            forms.append(form)
        elif get_origin(kind) is tuple:
            item = {"type": TYPES.get(get_args(kind)[0], "string")}
            forms += [{"type": "array", "items": item}, item]
        elif get_origin(kind) in (dict, Mapping):
            forms.append({"type": "object"})
    found = forms[0] if len(forms) == 1 else {"anyOf": forms} if forms else {}
    return {**found, "description": setting.help} if setting.meaning else found
