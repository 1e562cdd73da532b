"""Every setting of laya-batch, read from the environment once. Nothing else of jobs reads the environment."""

import difflib
import json
import os
import re
import shlex
from pathlib import Path
from typing import Annotated, Any

import platformdirs
import sqlalchemy as sa
from pydantic import AfterValidator, BeforeValidator, Field, PositiveFloat, PositiveInt, SecretStr, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from jobs.errors import SettingsError
from jobs.terminal import is_utf8, printable
from schemas.job import BackendName

PREFIX = "LAYA_BATCH_"
FILE = "_FILE"
SECRETS = tuple(PREFIX + name for name in ("DATABASE_URL", "DATABASE_PASSWORD", "BROKER_URL"))
# user and password, host, port, database, options
_REDIS_SERVER = re.compile(r"rediss?://([^/?#]*@)?(\[[^\]]+\]|[^/?#@:\[\]]+)(:\d+)?(/\d*)?(\?.*)?")


def _split_roots(roots: object) -> object:
    if isinstance(roots, str) and roots.lstrip().startswith("["):
        try:
            return json.loads(roots)
        except json.JSONDecodeError as error:
            raise ValueError(f"begins like a JSON list and is none: {error}") from error
    return [root.strip() for root in roots.split(",") if root.strip()] if isinstance(roots, str) else roots


def _is_redis_url(url: SecretStr) -> SecretStr:
    text = url.get_secret_value()
    if not (_REDIS_SERVER.fullmatch(text) or text.startswith("redis+socket://")):
        raise ValueError("is not a Redis URL; write redis://host:6379/0, or rediss:// for TLS")
    return url


class Settings(BaseSettings):
    """One environment variable for each field: its name in capitals after `LAYA_BATCH_`."""

    # An empty variable is an unset one: a compose file or a shell script often leaves one behind.
    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid")

    data_dir: Path = Field(
        default_factory=lambda: Path(platformdirs.user_data_dir("laya-batch")),
        description="Folder of the embedded database, used where no `database_url` is set.",
    )
    database_url: SecretStr | None = Field(
        default=None, description="`postgresql://…` or `sqlite:////…`; unset: SQLite in `data_dir`, migrated by itself."
    )
    database_password: SecretStr | None = Field(
        default=None, description="Password of `database_url`, as it is: in the URL itself it must be URL-encoded."
    )
    broker_url: Annotated[SecretStr, AfterValidator(_is_redis_url)] | None = Field(
        default=None,
        description="`redis://…` or `rediss://…` (TLS); unset: only `run` works, with a server of its own.",
    )
    queue: str = Field(default="laya-batch", min_length=1, description="Name of the queue, if several share one Redis.")
    input_roots: Annotated[list[str], BeforeValidator(_split_roots), NoDecode] = Field(
        default=[],
        description="Folders or URLs to read under, by commas or as JSON; a URL's options hold for its files.",
    )
    checkpoint: str = Field(
        default="english",
        description="Checkpoint that a worker warms at boot (`router`: both); a job may name another.",
    )
    revision: str | None = Field(
        default=None, description="Commit, branch or tag of `checkpoint` on the Hub, which a worker warms at boot."
    )
    max_len: PositiveInt | None = Field(
        default=None,
        description="Tokens of the longest text that a worker warms for; a job with more loads the model once more.",
    )
    backend: BackendName = Field(
        default="auto",
        description="Backend that a worker warms at boot; a job that asks for another loads the model once more.",
    )
    rows_per_shard: PositiveInt = Field(
        default=4096, description="Rows that a worker claims at once; read where a job is submitted or run."
    )
    rows_per_window: PositiveInt = Field(
        default=2048, description="Rows read, tokenised and packed together, while the window before is scored."
    )
    max_batch_tokens: PositiveInt | None = Field(
        default=None, description="Tokens in one forward pass, at most; unset: what suits the device."
    )
    mask_budget_bytes: PositiveInt = Field(
        default=256 * 1024 * 1024, description="Bytes of rows x heads x length x length that a batch's mask could take."
    )
    batch_timeout_s: PositiveFloat = Field(
        default=600, description="Seconds that reading a window or scoring a batch may take; then its process is ended."
    )
    lease_s: PositiveFloat = Field(default=120, description="Seconds after which a silent worker's shard is another's.")
    max_attempts: PositiveInt = Field(
        default=3, description="Attempts without an answer in between that may fail, of a shard; and deaths of a row."
    )
    sweep_s: PositiveFloat = Field(
        default=10, description="Seconds between searches for ended leases and lost messages."
    )
    resend_s: PositiveFloat = Field(
        default=10,
        description="Seconds after which a submitted shard's message must be in the queue, or is sent again.",
    )
    database_retry_s: PositiveFloat = Field(
        default=300,
        description="Seconds for which a worker tries again what the database refuses or loses.",
    )
    visibility_timeout_s: PositiveInt = Field(
        default=3600, description="Seconds after which Redis delivers an unacknowledged message again."
    )
    boot_timeout_s: PositiveFloat = Field(default=1800, description="Seconds that loading and warming up may take.")
    poll_timeout_s: PositiveFloat = Field(
        default=120,
        description="Seconds without an answer from the broker after which an idle worker ends, to be started again.",
    )
    max_rss_bytes: PositiveInt | None = Field(
        default=None,
        description="Memory past which a scoring process gives its shard back and starts anew; killed at 1.5 times it.",
    )
    log_level: str = Field(default="INFO", description="Level of the workers' log: DEBUG, INFO, WARNING or ERROR.")

    @property
    def owns_database(self) -> bool:
        """Whether the database is the embedded one, which the program migrates by itself."""
        return self.database_url is None

    @property
    def embedded_database(self) -> Path:
        """The file of the database that `run` keeps in the data folder."""
        return self.data_dir / "laya-batch.db"

    @property
    def resolved_database_url(self) -> str:
        if self.database_url is not None:
            url = re.sub(r"^postgres://", "postgresql://", self.database_url.get_secret_value())
            return url if self.database_password is None else _with_password(url, self.database_password)
        file = str(self.embedded_database.absolute())
        if not is_utf8(file):
            raise SettingsError(f"the data folder {printable(file)} is not UTF-8; set {PREFIX}DATA_DIR to another")
        return f"sqlite:///{file}"

    def require_broker_url(self) -> str:
        """The broker's URL with its password; raises SettingsError when none is set."""
        if self.broker_url is None:
            raise SettingsError(
                f"no broker is set: set {PREFIX}BROKER_URL=redis://host:6379/0, or use `laya-batch run`, without one"
            )
        return self.broker_url.get_secret_value()


def load_settings(**overrides: Any) -> Settings:
    """Settings from the environment; `overrides` (by field name, None ignored) win.

    Raises:
        SettingsError: naming each wrong variable, or an unknown one with the nearest known name.
    """
    secret_files = _read_secret_files()
    known = {PREFIX + name.upper() for name in Settings.model_fields} | {name + FILE for name in SECRETS}
    for variable in sorted(os.environ):
        if variable.startswith(PREFIX) and not is_utf8(os.environ[variable]):
            raise SettingsError(f"{variable} is not UTF-8; write it in UTF-8")
        if variable.startswith(PREFIX) and variable not in known:
            near = difflib.get_close_matches(variable, known, n=1)
            raise SettingsError(f"unknown setting {variable}" + (f"; did you mean {near[0]}?" if near else ""))
    try:
        return Settings(**{**secret_files, **{name: value for name, value in overrides.items() if value is not None}})
    except ValidationError as error:
        wrong = [
            f"{PREFIX}{str(problem['loc'][0]).upper()}: {problem['msg'].removeprefix('Value error, ')}"
            for problem in error.errors(include_input=False)
        ]
        raise SettingsError("\n".join(wrong)) from error


def follow_up(words: str, settings: Settings) -> str:
    """Return a command to copy that goes on with this data folder, named in it where the environment means another."""
    meant = load_settings()
    if meant.database_url is None and meant.data_dir == settings.data_dir:
        return f"laya-batch {words}"
    return f"laya-batch {words} --data-dir {shlex.quote(str(settings.data_dir))}"


def _read_secret_files() -> dict[str, str]:
    """Return the secrets, by field name, whose variable ends in _FILE and names a file, as container secrets are."""
    found = {}
    for variable in SECRETS:
        if not (path := os.environ.get(variable + FILE)):
            continue
        if os.environ.get(variable):
            raise SettingsError(f"{variable} and {variable}{FILE} are both set; leave one out")
        try:
            found[variable.removeprefix(PREFIX).lower()] = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{variable}{FILE}: {path} cannot be read: {error}") from error
    return found


def _with_password(url: str, password: SecretStr) -> str:
    try:
        made = sa.make_url(url).set(password=password.get_secret_value())
    except (sa.exc.ArgumentError, ValueError):
        return url  # which the database will refuse, and say how to write it
    return made.render_as_string(hide_password=False)


def environment_of(settings: Settings) -> dict[str, str]:
    """The environment of a Python process that is to have these settings: this one's, with no other of ours.

    No module of its working folder is imported, as `python -m` would; PYTHONPATH stays as it is.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    variables["PYTHONSAFEPATH"] = "1"
    for name in Settings.model_fields:
        value = getattr(settings, name)
        if isinstance(value, SecretStr):
            value = value.get_secret_value()
        if value is not None and value != []:
            variables[PREFIX + name.upper()] = json.dumps(value) if isinstance(value, list) else str(value)
    return variables
