import pytest

from jobs.errors import SettingsError
from jobs.settings import Settings, environment_of, load_settings, without_password


def test_an_unknown_variable_is_refused_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYA_BATCH_BROKER", "redis://h")
    with pytest.raises(SettingsError, match="unknown setting LAYA_BATCH_BROKER; did you mean LAYA_BATCH_BROKER_URL"):
        load_settings()


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("LAYA_BATCH_BROKER_URL", "amqp://user:secret@host", "is not a Redis URL"),
        ("LAYA_BATCH_ROWS_PER_SHARD", "0", "greater than 0"),
        ("LAYA_BATCH_LEASE_S", "soon", "valid number"),
        ("LAYA_BATCH_BACKEND", "fast", "'auto', 'eager'"),
    ],
)
def test_a_wrong_value_is_refused_by_name_without_showing_it(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, problem: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=variable) as raised:
        load_settings()
    assert problem in str(raised.value)
    assert "secret" not in str(raised.value)


def test_settings_survive_the_way_into_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(
        broker_url="redis://:secret@host/0", database_url="postgresql://u:p@h/d", input_roots=["/a", "s3://b/c"]
    )
    for variable, value in environment_of(settings).items():
        monkeypatch.setenv(variable, value)
    assert load_settings() == settings
    assert load_settings().input_roots == ["/a", "s3://b/c"]


def test_secrets_do_not_show_in_a_settings_text() -> None:
    settings = Settings(broker_url="redis://:hunter2@host/0", database_url="postgresql://u:hunter2@h/d")
    assert "hunter2" not in repr(settings)
    assert "hunter2" not in str(settings.model_dump())


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:pw@host:6379/0", "redis://:***@host:6379/0"),
        ("rediss://me:pw@host/0", "rediss://me:***@host/0"),
        ("redis://host/0", "redis://host/0"),
        ("s3://key:p%40w@bucket/a?region=x", "s3://key:***@bucket/a?region=x"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_without_a_broker_the_error_says_what_to_set() -> None:
    with pytest.raises(SettingsError, match="LAYA_BATCH_BROKER_URL"):
        load_settings().require_broker_url()
