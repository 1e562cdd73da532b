from pathlib import Path

import pytest
import sqlalchemy as sa

from jobs.errors import SettingsError
from jobs.settings import PREFIX, SECRETS, Settings, environment_of, load_settings


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
        ("LAYA_BATCH_INPUT_ROOTS", "[/data", "begins like a JSON list and is none"),
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


def test_an_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    unset = load_settings()
    for name in Settings.model_fields.keys() - {"data_dir"}:
        monkeypatch.setenv(PREFIX + name.upper(), "")
    for name in SECRETS:
        monkeypatch.setenv(f"{name}_FILE", "")
    assert load_settings() == unset


def test_the_short_name_of_postgresql_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYA_BATCH_DATABASE_URL", "postgres://u:p@h/d")
    assert load_settings().resolved_database_url == "postgresql://u:p@h/d"


def test_a_password_may_come_apart_and_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("p@s/w:ö#?\n")
    monkeypatch.setenv("LAYA_BATCH_DATABASE_URL", "postgresql://laya@h:5432/d")
    monkeypatch.setenv("LAYA_BATCH_DATABASE_PASSWORD_FILE", str(tmp_path / "password"))
    settings = load_settings()
    assert sa.make_url(settings.resolved_database_url).password == "p@s/w:ö#?"
    assert sa.make_url(settings.resolved_database_url).host == "h"
    for variable, value in environment_of(settings).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.delenv("LAYA_BATCH_DATABASE_PASSWORD_FILE")
    assert load_settings() == settings


def test_a_secret_is_given_once_and_its_file_can_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LAYA_BATCH_BROKER_URL_FILE", str(tmp_path / "none"))
    with pytest.raises(SettingsError, match=r"LAYA_BATCH_BROKER_URL_FILE: .*none cannot be read"):
        load_settings()
    monkeypatch.setenv("LAYA_BATCH_BROKER_URL", "redis://h/0")
    with pytest.raises(SettingsError, match="both set"):
        load_settings()
    monkeypatch.setenv("LAYA_BATCH_LEASE_S_FILE", "x")
    monkeypatch.delenv("LAYA_BATCH_BROKER_URL_FILE")
    with pytest.raises(SettingsError, match="unknown setting LAYA_BATCH_LEASE_S_FILE"):
        load_settings()


def test_without_a_broker_the_error_says_what_to_set() -> None:
    with pytest.raises(SettingsError, match="LAYA_BATCH_BROKER_URL"):
        load_settings().require_broker_url()
