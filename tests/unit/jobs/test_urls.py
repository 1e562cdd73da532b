"""Nothing of a URL is shown that could be a secret, wherever it stands."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.errors import InputError
from jobs.planning import find_files
from jobs.urls import hide_secrets, shown_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:pw@host:6379/0", "redis://***@host:6379/0"),
        ("rediss://me:p@w@host/0", "rediss://***@host/0"),
        ("redis://:p/w@host/0", "redis://***@host/0"),
        ("redis://:1/2@host/0", "redis://***@host/0"),
        ("redis://:p?w#x@host/0", "redis://***@host/0"),
        ("redis://host/0", "redis://host/0"),
        ("redis://[::1]:6379/0?ssl_cert_reqs=none&password=x", "redis://[::1]:6379/0?ssl_cert_reqs=none&password=***"),
        ("redis+socket:///tmp/a@b/v.sock", "redis+socket:///tmp/a@b/v.sock"),
        ("postgresql://u:p%40w@h:5432/d?sslmode=require", "postgresql://***@h:5432/d?sslmode=require"),
        ("postgresql://h/d?user=u&sslpassword=x", "postgresql://h/d?user=***&sslpassword=***"),
        ("sqlite:////data/me@home/laya.db", "sqlite:////data/me@home/laya.db"),
        ("s3://key:se/cr+et@bucket/a?region=x", "s3://***@bucket/a?region=x"),
        ("s3://bucket/me@home/*.parquet", "s3://bucket/me@home/*.parquet"),
        ("s3://b/a?endpoint_override=http://u:p@h", "s3://b/a?endpoint_override=***"),
        ("abfs://c@account/a?client_secret=x", "abfs://c@account/a?client_secret=***"),
        ("abfss://c:key@account/a", "abfss://***@account/a"),
        ("https://h/a.parquet?sv=1&sig=abc%3D", "https://h/a.parquet?sv=***&sig=***"),
        ("https://h/a.parquet?X-Amz-Signature=abc", "https://h/a.parquet?X-Amz-Signature=***"),
        ("https://h/a?token", "https://h/a?***"),
        ("https://h/a#token", "https://h/a#***"),
        ("/data/a?b#c@d.parquet", "/data/a?b#c@d.parquet"),
    ],
)
def test_only_what_is_known_to_be_harmless_is_shown(url: str, shown: str) -> None:
    assert shown_url(url) == shown
    assert hide_secrets(f"cannot reach {url} now") == f"cannot reach {shown} now"


@given(st.sampled_from(["redis", "rediss", "postgresql", "s3"]), st.text("abc@:/?#&=%._-0", max_size=12))
def test_a_password_of_any_characters_stays_hidden(scheme: str, middle: str) -> None:
    assert "XYZ" not in shown_url(f"{scheme}://user:XYZ{middle}XYZ@host/path")
    assert "XYZ" not in shown_url(f"{scheme}://host/path?option=XYZ{middle.replace('&', '')}")


def test_an_input_with_a_secret_is_refused_without_showing_it() -> None:
    with pytest.raises(InputError, match=r"names a user|cannot set|fragment") as raised:
        find_files(["s3://bucket/a.parquet?session_token=hunter2"])
    assert "hunter2" not in str(raised.value)
