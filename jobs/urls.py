"""URLs as a person, a log or the database may see them: only what is known to be harmless is shown.

Owns that list. A URL of a broker, a database or an input is never put into a message in another way.
"""

import re

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^\s'\"]*)")
_HOST_AND_PORT = re.compile(r"(\[[^\]]*\]|[^:\[\]]+)?(:\d*)?")
_SHOWN_OPTIONS = frozenset(
    {
        *("application_name", "connect_timeout", "sslmode", "sslrootcert", "target_session_attrs"),  # PostgreSQL
        *("db", "protocol", "socket_timeout", "ssl_ca_certs", "ssl_cert_reqs", "virtual_host"),  # Redis
        *("allow_bucket_creation", "anonymous", "endpoint_override", "region", "scheme"),  # object stores
        *("mode", "cache"),  # SQLite
    }
)
# What stands before their @ is a container, or the name of a user, as long as no password follows.
_NAMES_BEFORE_HOST = ("abfs", "abfss", "wasb", "wasbs", "hdfs", "viewfs")
HIDDEN = "***"


def shown_url(url: str) -> str:
    """Return a URL with its scheme, host, port, path and known options; all else is `***`."""
    found = _URL.match(url)
    if found is None:
        return url
    scheme, rest = url[: found.end(1)], url[found.end(1) + len("://") :]
    if _has_user(scheme, rest):
        rest = f"{HIDDEN}@{rest.rpartition('@')[2]}"  # a password may hold any of @ / ? #
    place, _, options = rest.partition("#")[0].partition("?")
    shown = f"{scheme}://{place}"
    if options:
        shown += "?" + "&".join(_shown_option(option) for option in options.split("&"))
    return shown + (f"#{HIDDEN}" if "#" in rest else "")


def hide_secrets(text: object) -> str:
    """Return a text, such as a library's error, with each URL in it as `shown_url` shows it."""
    return _URL.sub(lambda found: shown_url(found[0]), str(text))


def _has_user(scheme: str, rest: str) -> bool:
    if "@" not in rest:
        return False
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in authority or scheme.startswith(("redis", "postgres")):  # whose paths hold none
        named = scheme in _NAMES_BEFORE_HOST and authority.count("@") == 1 and ":" not in authority.partition("@")[0]
        return authority != "" and not named
    host = _HOST_AND_PORT.fullmatch(authority)
    # `key:sec/ret@bucket` is no host and port: the slash belongs to the secret.
    return authority != "" and (host is None or (host[1] is None and host[2] is not None))


def _shown_option(option: str) -> str:
    name, equals, value = option.partition("=")
    if not equals:
        return HIDDEN
    return option if name in _SHOWN_OPTIONS and "@" not in value else f"{name}={HIDDEN}"
